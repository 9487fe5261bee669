"""Every pattern of context parallelism against attention on one rank: values, gradients, and whole training."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formula import (
    CASES,
    CAUSAL,
    S,
    assert_same,
    build_attention,
    make_inputs,
    packed,
    packed_mask,
    plain_attention,
    random_mask,
    with_gradients,
)
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_batch_on_this_cp_rank
from ranks import run_ranks
from small import DEVICE, SEQUENCE_LENGTH, rounding, small_config, small_state, text_loader
from torch import Tensor

import minloop
from minloop.layers.cp_layout import packed_share
from minloop.losses import token_loss

PATTERNS: list[tuple[int, str | None]] = [
    (2, None), (2, "p2p"), (2, "a2a"), (2, "all_gather"),
    (4, "p2p"), (4, "a2a"), (4, "all_gather"), (4, "a2a+p2p"),
]  # fmt: skip
EXACT = (DEVICE, torch.float64, 1e-10)
PLACES = [  # device, dtype of the inputs, tolerance
    pytest.param(EXACT, id="fp64"),
    pytest.param(("cuda", torch.float32, 1e-4), id="gpu-fp32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16, 5e-2), id="gpu-bf16", marks=pytest.mark.gpu),
]
SINKS = torch.tensor([-1.0, 0.5, 1.0, 3.0])
BLIND = torch.zeros(1, 1, 1, S, dtype=torch.bool)
BLIND[..., :12] = True  # the first tokens may look nowhere, and so everywhere
PACKED = [([16, 0, 32, 8], None), ([64], (5, 0)), ([8, 24], (9, 0))]


def layout(size: int, pattern: str | None, **fields: Any) -> dict[str, Any]:
    hierarchy = {"hierarchical_context_parallel_sizes": [2, size // 2]} if pattern == "a2a+p2p" else {}
    return {"context_parallel_size": size, "cp_comm_type": pattern, **hierarchy, **fields}


def init(fields: dict[str, Any]) -> Callable[..., Any]:
    """Make the groups; returns `build_attention` for them."""
    groups = minloop.init_distributed(small_config(**fields), seed=3)
    arguments = {"cp_comm_type": fields["cp_comm_type"]}

    def build(mask_type: AttnMaskType = AttnMaskType.causal, **case: Any) -> torch.nn.Module:
        case["arguments"] = arguments | case.get("arguments", {})
        sizes = {name: fields[name] for name in ("context_parallel_size", "cp_comm_type")}
        return build_attention(mask_type, groups, **(sizes | case))

    return build


def positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What mcore deals out to this rank: the positions of its tokens, and its rows of masks."""
    group: Any = minloop.ProcessGroupCollection.use_mpu_process_groups(["cp"]).cp
    return get_batch_on_this_cp_rank({"tokens": torch.arange(S)[None], **batch}, is_hybrid_cp=False, cp_group=group)


def scattered(output: Tensor, positions: Tensor) -> Tensor:
    """This rank's rows in their place of the whole, so that all ranks use the rows of one gradient."""
    return output.new_zeros(S, *output.shape[1:]).index_copy(0, positions.to(output.device), output)


def attend_in_parallel(fields: dict[str, Any], place: tuple[Any, ...]) -> dict[str, list[Tensor]]:
    """Positions, output and input gradients of this rank, case by case."""
    build, results = init(fields), {}
    dealt = positions({"attention_mask": random_mask()})
    mine = dealt["tokens"][0]

    def attend(module: torch.nn.Module, mask: Tensor | None, **shapes: Any) -> list[Tensor]:
        inputs = [x[mine] for x in make_inputs(**shapes, place=place)]
        mask = None if mask is None else mask.to(place[0])
        return [mine, *with_gradients(lambda q, k, v: scattered(module(q, k, v, mask), mine), *inputs)]

    for case, (of_module, shapes, _) in CASES.items():
        if "sq" not in shapes:
            results[case] = attend(build(**of_module), None, **shapes)
    results["mask"] = attend(build(num_query_groups=2), dealt["attention_mask"], query_groups=2)
    results["blind"] = attend(build(), BLIND)
    for index, (lengths, window) in enumerate(PACKED):
        results[f"packed {index}"] = attend_packed(build, lengths, window, place)
    results["sinks"] = attend_with_sinks(build, mine, place)
    minloop.shutdown_distributed()
    return results


def attend_packed(build: Callable[..., Any], lengths: list[int], window: Any, place: tuple[Any, ...]) -> list[Tensor]:
    params = packed(lengths, cu_seqlens_q=None)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv.to(place[0])
    boundaries = torch.cat((params.cu_seqlens_kv, torch.tensor([S])))
    group: Any = minloop.ProcessGroupCollection.use_mpu_process_groups(["cp"]).cp
    mine = packed_share(boundaries, S, group.size(), group.rank())
    module = build(num_query_groups=2, window_size=window)
    inputs = [x[mine, 0] for x in make_inputs(2, place=place)]
    attend = lambda q, k, v: scattered(module(q, k, v, None, packed_seq_params=params), mine)  # noqa: E731  one line
    return [mine, *with_gradients(attend, *inputs)]


def attend_with_sinks(build: Callable[..., Any], mine: Tensor, place: tuple[Any, ...]) -> list[Tensor]:
    module = build(num_query_groups=2, softmax_type="learnable", params_dtype=place[1])

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        output = torch.func.functional_call(module, {"softmax_offset": sinks}, (query, key, value, None))
        return scattered(output, mine)

    inputs = [x[mine] for x in make_inputs(2, place=place)]
    return [mine, *with_gradients(attend, *inputs, SINKS.to(*place[:2]))]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("size", "pattern"), PATTERNS)
def test_every_pattern_is_the_formula(size: int, pattern: str | None, place: tuple[Any, ...]) -> None:
    ranks = run_ranks(size, attend_in_parallel, layout(size, pattern), place)
    for case in ranks[0]:
        expected = the_formula(case, place)
        assert sorted(torch.cat([rank[case][0] for rank in ranks]).tolist()) == list(range(S)), case
        for rank in ranks:
            mine, output, *gradients = rank[case]
            actual, wanted = [output[mine], *gradients[:3]], [x[mine] for x in expected[:4]]
            assert_same(actual, wanted, place[2], case)
        if case == "sinks":  # data parallelism sums them over all ranks
            total = torch.stack([rank[case][5] for rank in ranks]).sum(0)
            assert_same([total], expected[4:], 5 * place[2])


def the_formula(case: str, place: tuple[Any, ...]) -> list[Tensor]:
    """Output and gradients of one rank."""
    inputs = make_inputs(2, place=("cpu", place[1]))
    scale, sinks = 8**-0.5, None
    if case in CASES:
        fields, shapes, allowed = CASES[case]
        inputs = make_inputs(**shapes, place=("cpu", place[1]))
        scale = fields.get("arguments", {}).get("softmax_scale", scale)
    elif case == "mask":
        allowed = CAUSAL & ~random_mask()
    elif case == "blind":
        inputs, allowed = make_inputs(place=("cpu", place[1])), CAUSAL & ~BLIND
        allowed[..., :12, :] = True
    elif case == "sinks":
        allowed, sinks = CAUSAL, SINKS.to(place[1])
    else:
        lengths, window = PACKED[int(case.removeprefix("packed "))]
        one = [x[:, :1] for x in inputs]
        allowed = packed_mask(lengths, window)
        return [x[:, 0] for x in with_gradients(lambda q, k, v: plain_attention(q, k, v, allowed), *one)]
    if sinks is not None:
        return with_gradients(lambda q, k, v, s: plain_attention(q, k, v, allowed, sinks=s), *inputs, sinks)
    return with_gradients(lambda q, k, v: plain_attention(q, k, v, allowed, scale), *inputs)


def attend_with_dropout(fields: dict[str, Any]) -> dict[str, Any]:
    build = init(fields)
    module, mine = build(num_query_groups=2, attention_dropout=0.5), positions({})["tokens"][0]
    inputs = [x[mine] for x in make_inputs(2, place=EXACT)]
    state = torch.get_rng_state()
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    before = tracker.get_states()

    def attend(*inputs: Tensor) -> Tensor:
        tracker.set_states(dict(before))
        return module(*inputs, None)

    output, *slopes = with_gradients(attend, *inputs)
    gradient, *direction = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype).to(x) for x in (output, *inputs)
    )  # that of the output is the one in `with_gradients`
    step = 1e-6
    ahead, behind = (attend(*[x + s * d for x, d in zip(inputs, direction, strict=True)]) for s in (step, -step))
    measured = ((ahead - behind) * gradient).sum() / (2 * step)
    sums = torch.stack([measured, *((s * d).sum() for s, d in zip(slopes, direction, strict=True))])
    dist.all_reduce(sums)  # a rank's output depends on the inputs of all, and its gradients come from all
    again, other = attend(*inputs), module(*inputs, None)
    without = module.eval()(*inputs, None)
    untouched = torch.equal(state, torch.get_rng_state())
    minloop.shutdown_distributed()
    return {"sums": sums, "outputs": (output, again, other, without), "untouched": untouched}


@pytest.mark.parametrize(("size", "pattern"), [(2, "p2p"), (2, "a2a"), (2, "all_gather"), (4, "a2a+p2p")])
def test_dropout_drops_the_same_in_forward_and_backward(size: int, pattern: str) -> None:
    for rank in run_ranks(size, attend_with_dropout, layout(size, pattern)):
        output, again, other, without = rank["outputs"]
        assert torch.equal(output, again)
        assert not torch.allclose(output, other)
        assert not torch.allclose(output, without)
        assert rank["untouched"]
        torch.testing.assert_close(rank["sums"][0], rank["sums"][1:].sum(), rtol=1e-6, atol=1e-6)


def refusals(fields: dict[str, Any], calls: list[dict[str, Any]]) -> list[str]:
    """The messages of what attention refuses, at its making or at a call."""
    build = init(fields)
    messages: list[str] = []
    for call in calls:
        shape = call.get("tokens", slice(0, S // 2)), slice(None, None if "packed" not in call else 1)
        query, key, value = (x[shape] for x in make_inputs(place=EXACT))
        params = call.get("packed")
        if params is not None:
            query, key, value = query[:, 0], key[:, 0], value[:, 0]
        key = key[call.get("keys", slice(None))]
        with pytest.raises(ValueError) as refusal:  # noqa: PT011  the messages are looked at by the caller
            build(**call.get("module", {}))(query, key, value, call.get("mask"), packed_seq_params=params)
        messages.append(str(refusal.value))
    minloop.shutdown_distributed()
    return messages


@pytest.mark.parametrize("pattern", ["p2p", "a2a"])
def test_what_context_parallel_refuses(pattern: str) -> None:
    calls: list[dict[str, Any]] = [
        {"tokens": slice(0, 7)},
        {"keys": slice(0, 8)},
        {"packed": packed([14, 50])},
        {"packed": packed([16], local_cp_size=1)},
        {"module": {"arguments": {"cp_comm_type": "ring"}}},
        {"mask": torch.zeros(1, 4, S // 2, S, dtype=torch.bool)},
    ]
    calls = calls if pattern == "a2a" else calls[:-1]
    for messages in run_ranks(2, refusals, layout(2, pattern), calls):
        odd, cached, sequences, dynamic, unknown, *per_head = messages
        assert "context_parallel_size is 2 and a rank has 7 tokens" in odd
        assert "32 queries and 8 keys" in cached
        assert "padded to a multiple of 2 * context_parallel_size (4)" in sequences
        assert "local_cp_size=1" in dynamic
        assert "cp_comm_type='ring'" in unknown
        assert all("attention_mask of its own for each of 4 heads" in message for message in per_head)


def attend_alone() -> list[Tensor]:
    fields = layout(2, "p2p")
    build, mine = init(fields), positions({})["tokens"][0]
    module = build(context_parallel_size=1)
    output = module(*(x[mine] for x in make_inputs()), None)
    minloop.shutdown_distributed()
    return [mine, output]


def test_a_config_without_context_parallel_ignores_the_group() -> None:
    """The two ranks see their own tokens alone."""
    for mine, output in run_ranks(2, attend_alone):
        query, key, value = (x[mine] for x in make_inputs())
        assert_same([output], [plain_attention(query, key, value, CAUSAL[: len(mine), : len(mine)])])


GQA: dict[str, Any] = {"num_query_groups": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "p2p": layout(2, "p2p"),
        "a2a": layout(2, "a2a"),
        "all_gather": layout(2, "all_gather"),
        "a list": layout(2, None) | {"cp_comm_type": ["p2p", "a2a", "all_gather", "a2a"]},
    },
    4: {
        "a2a+p2p": layout(4, "a2a+p2p"),
        "a list": layout(4, "a2a+p2p") | {"cp_comm_type": ["a2a+p2p", "a2a", "p2p", "all_gather"]},
        "TP2+SP, a2a": layout(2, "a2a") | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}


STEPS, ENOUGH = 8, 20  # that layouts take, and after which one rank has learnt
Train = Callable[[minloop.TrainState, int], list[minloop.StepMetrics]]


def train_plain(state: minloop.TrainState, steps: int) -> list[minloop.StepMetrics]:
    loader = text_loader(state)
    return [minloop.train_step(state, loader, num_microbatches=4) for _ in range(steps)]


def histories(directory: str, fields: dict[str, Any], layouts: dict[str, Any], run: Train, save: bool) -> Any:
    """Losses and gradient norms of each layout."""
    results: dict[str, Any] = {}
    for name, layout_fields in layouts.items():
        state = small_state(seed=2 if save else 99, lr=2e-3, transformer_impl="local", **fields, **layout_fields)
        if save:
            minloop.save_checkpoint(directory, state)
        else:
            minloop.load_checkpoint(directory, state)
        steps = run(state, ENOUGH if save else STEPS)
        rows = ([*s.losses.values(), torch.as_tensor(s.grad_norm).to(s.loss)] for s in steps)
        results[name] = torch.stack([torch.stack(row) for row in rows])
        minloop.shutdown_distributed()
    return results


def assert_trains_the_same(
    directory: Path, fields: dict[str, Any], layouts: dict[int, dict[str, Any]], run: Train
) -> None:
    (alone,) = run_ranks(1, histories, str(directory), fields, {"alone": {}}, run, True)
    expected = alone["alone"]
    assert expected[-1, 0] < 0.9 * expected[0, 0]
    for size, of_size in layouts.items():
        for results in run_ranks(size, histories, str(directory), fields, of_size, run, False):
            assert results.keys() == of_size.keys()
            for name, history in results.items():
                difference = ((history - expected[:STEPS]).abs() / expected[:STEPS]).max().item()
                assert difference <= rounding(2e-6), f"{name} on {size} ranks: {difference:.1e}"


def test_layouts_train_the_same_model(tmp_path: Path) -> None:
    assert_trains_the_same(tmp_path, GQA, LAYOUTS, train_plain)


@pytest.mark.parametrize("depths", [1, 2])
def test_multi_token_prediction_trains_the_same_model(tmp_path: Path, depths: int) -> None:
    fields: dict[str, Any] = {"num_layers": 2, "mtp_num_layers": depths}
    assert_trains_the_same(tmp_path, fields, {2: {"p2p": LAYOUTS[2]["p2p"]}}, train_plain)


def packed_step(data: Any, model: torch.nn.Module) -> Any:
    """Two documents and a rest in every sample of [1, s]."""
    batch = next(data)
    boundaries = torch.tensor([0, 8, 24, SEQUENCE_LENGTH])
    group: Any = minloop.ProcessGroupCollection.use_mpu_process_groups(["cp"]).cp
    mine = packed_share(boundaries, SEQUENCE_LENGTH, group.size(), group.rank())
    batch = {name: value[:, mine].cuda() for name, value in batch.items()}
    params = packed([8, 16], max_seqlen_q=16, max_seqlen_kv=16)
    params.cu_seqlens_q = params.cu_seqlens_kv = boundaries.int().cuda()
    inputs = batch["tokens"], batch["position_ids"], None
    output = model(*inputs, labels=batch["labels"], packed_seq_params=params)
    return output, partial(token_loss, batch["loss_mask"])


def train_packed(state: minloop.TrainState, steps: int) -> list[minloop.StepMetrics]:
    loader = text_loader(state, 1)
    return [minloop.train_step(state, loader, num_microbatches=4, forward_step=packed_step) for _ in range(steps)]


def test_packed_sequences_train_the_same_model(tmp_path: Path) -> None:
    fields = GQA | {"gpt": {"position_embedding_type": "rope"}}
    layouts = {name: LAYOUTS[2][name] for name in ("p2p", "a list")}
    assert_trains_the_same(tmp_path, fields, {2: layouts}, train_packed)
