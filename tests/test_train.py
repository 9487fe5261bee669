"""The step: it trains, its numbers are those of the definition, and evaluation leaves no trace."""

import copy
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from small import (
    GLOBAL_BATCH_SIZE,
    MICRO_BATCH_SIZE,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Text,
    rounding,
    shared_state,
    small_state,
    text_loader,
    train,
)

import minloop

SHARDED = {"use_distributed_optimizer": True}


def weights(state: minloop.TrainState) -> dict[str, torch.Tensor]:
    with minloop.gathered_parameters(state.chunks):
        return {name: p.detach().clone() for chunk in state.chunks for name, p in chunk.named_parameters()}


def one_step_moves(options: dict[str, Any]) -> tuple[float, list[str]]:
    state = small_state(**options)
    before = weights(state)
    ((loss, _),) = train(state, text_loader(state), 1)
    unmoved = [name for name, now in weights(state).items() if torch.equal(now, before[name])]
    minloop.shutdown_distributed()
    return loss, unmoved


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2, "ddp": SHARDED}),
        (2, {"pipeline_model_parallel_size": 2}),
        (2, {"ddp": SHARDED, "bf16": True, "lr": 0.1}),
        (1, {"fp16": True, "lr": 0.1, "optimizer": {"initial_loss_scale": 2.0**8}}),
    ],
    ids=["1 rank", "TP2 ZeRO-1", "PP2", "DP2 ZeRO-1 bf16", "fp16"],
)
def test_the_first_loss_is_that_of_chance_and_every_weight_moves(ranks: int, options: dict[str, Any]) -> None:
    for loss, unmoved in run_ranks(ranks, one_step_moves, options):
        assert abs(loss / math.log(VOCAB_SIZE) - 1) < 0.02
        assert not unmoved


def gradient_sizes(ddp: dict[str, Any]) -> list[float]:
    """Sum of |main_grad| of five steps on one batch at learning rate 0."""
    state = small_state(lr=0.0, ddp=ddp)
    parameters: list[Any] = [p for chunk in state.chunks for p in chunk.parameters()]
    batch = next(text_loader(state))
    sizes: list[float] = []
    for _ in range(5):
        minloop.train_step(state, iter([batch] * 2), num_microbatches=2)
        sizes.append(sum(float(p.main_grad.abs().sum()) for p in parameters))
    minloop.shutdown_distributed()
    return sizes


@pytest.mark.parametrize("ddp", [{}, SHARDED], ids=["DDP", "ZeRO-1"])
def test_gradients_do_not_add_up_over_steps(ddp: dict[str, Any]) -> None:
    for sizes in run_ranks(2, gradient_sizes, ddp):
        assert sizes[0] > 0
        assert sizes == pytest.approx([sizes[0]] * 5, rel=1e-6)


def reported_and_direct_loss() -> tuple[float, float]:
    """The reported loss of a step; and sum / number over all tokens, computed by hand from the same weights."""
    state = small_state(lr=0.0)
    count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, 2, state.groups)
    reported = minloop.train_step(state, text_loader(state), num_microbatches=count).loss.item()
    data, total, tokens = Text(), 0.0, 0.0
    for index in range(GLOBAL_BATCH_SIZE):
        sample = {name: value[None].cuda() for name, value in data[index].items()}
        with torch.no_grad():
            losses = state.chunks[0](sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
        total += float((losses * sample["loss_mask"]).sum())
        tokens += float(sample["loss_mask"].sum())
    minloop.shutdown_distributed()
    return reported, total / tokens


def test_the_loss_is_the_mean_over_the_global_batchs_tokens() -> None:
    for reported, direct in run_ranks(2, reported_and_direct_loss):
        assert reported == pytest.approx(direct, rel=rounding(1e-6))


def train_with_evaluation(ddp: dict[str, Any], evaluate: bool) -> tuple[list[tuple[float, float]], list[float]]:
    state = small_state(ddp=ddp, hidden_dropout=0.1, attention_dropout=0.1)
    loader, history, evaluated = text_loader(state), [], []
    for _ in range(3):
        history += train(state, loader, 1)
        if evaluate:
            metrics = minloop.eval_step(state, text_loader(state), num_microbatches=2)
            assert metrics.grad_norm is None
            evaluated.append(metrics.loss.item())
    minloop.shutdown_distributed()
    return history, evaluated


@pytest.mark.parametrize("ddp", [{}, SHARDED], ids=["DDP", "ZeRO-1 with parameter gather overlapped"])
def test_evaluation_between_steps_changes_nothing(ddp: dict[str, Any]) -> None:
    without = run_ranks(2, train_with_evaluation, ddp, evaluate=False)
    with_evaluation = run_ranks(2, train_with_evaluation, ddp, evaluate=True)
    assert [history for history, _ in with_evaluation] == [history for history, _ in without]
    losses = with_evaluation[0][1]
    assert losses == sorted(losses, reverse=True), "evaluation must see the new weights each time"
    assert len(set(losses)) == 3


def differing_replicas(options: dict[str, Any]) -> list[str]:
    """Names of parameters that are not bitwise equal on the data parallel ranks after three steps."""
    state = small_state(**options)
    train(state, text_loader(state), 3)
    differing = []
    for name, weight in weights(state).items():
        copies = [torch.empty_like(weight) for _ in range(state.groups.dp_cp.size())]
        dist.all_gather(copies, weight.contiguous(), group=state.groups.dp_cp)
        if any(not torch.equal(copy, copies[0]) for copy in copies):
            differing.append(name)
    minloop.shutdown_distributed()
    return differing


@pytest.mark.parametrize("ddp", [{}, SHARDED], ids=["DDP", "ZeRO-1"])
def test_data_parallel_ranks_hold_equal_weights(ddp: dict[str, Any]) -> None:
    assert run_ranks(2, differing_replicas, {"ddp": ddp}) == [[], []]


def first_weights(seed: int, random_init: bool) -> torch.Tensor:
    config = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
    groups = minloop.init_distributed(config, seed=seed, data_parallel_random_init=random_init)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=8, max_sequence_length=4)
    model: Any = chunks[0]
    own = model.embedding.word_embeddings.weight.detach().clone()
    (wrapped,) = minloop.wrap_ddp(chunks, minloop.build_ddp_config(config), groups)
    model = wrapped.module
    shared = model.embedding.word_embeddings.weight.detach().clone()
    minloop.shutdown_distributed()
    return torch.stack([own, shared])


def test_seeds_of_data_parallel_ranks() -> None:
    (own_0, shared_0), (own_1, shared_1) = run_ranks(2, first_weights, 5, False)
    assert torch.equal(own_0, own_1)
    (own_0, shared_0), (own_1, shared_1) = run_ranks(2, first_weights, 5, True)
    assert not torch.equal(own_0, own_1)
    assert torch.equal(shared_0, shared_1)
    assert torch.equal(shared_0, own_0)


def overflowing_step() -> tuple[list[bool], int, list[float], bool]:
    state = small_state(
        fp16=True, optimizer={"initial_loss_scale": 2.0**32, "hysteresis": 1}, scheduler={"train_iters": 9}
    )
    before = weights(state)
    loader = text_loader(state)
    first = minloop.train_step(state, loader, num_microbatches=4)
    unchanged = all(torch.equal(now, before[name]) for name, now in weights(state).items())
    rest = [minloop.train_step(state, loader, num_microbatches=4) for _ in range(26)]
    minloop.shutdown_distributed()
    steps = [first, *rest]
    return [step.skipped for step in steps], state.skipped_iterations, [step.loss_scale for step in steps], unchanged


def test_an_fp16_overflow_skips_the_update_and_lowers_the_scale() -> None:
    ((skipped, count, scales, unchanged),) = run_ranks(1, overflowing_step)
    assert skipped[0]
    assert unchanged
    assert not skipped[-1]
    assert count == sum(skipped)
    assert scales[0] == 2.0**32
    assert scales[1] == 2.0**31


def twice_in_one_process() -> list[list[tuple[float, float]]]:
    """The same training twice, between them another layout: init and shutdown leave nothing behind."""
    histories: list[list[tuple[float, float]]] = []
    layouts: list[dict[str, Any]] = [{}, {"tensor_model_parallel_size": 2}, {}]
    for layout in layouts:
        state = small_state(**layout)
        histories.append(train(state, text_loader(state), 2))
        minloop.shutdown_distributed()
        minloop.shutdown_distributed()
        assert not dist.is_initialized()
    return histories


def test_init_and_shutdown_twice_in_one_process() -> None:
    for first, _, second in run_ranks(2, twice_in_one_process):
        assert first == second


def threads_of_each_life() -> list[int]:
    """How many threads this process has after each of three trainings; gloo's groups have some each, CUDA too."""
    counts: list[int] = []
    sharded = {"use_distributed_optimizer": True}
    experts: dict[str, Any] = {
        "num_moe_experts": 2,
        "moe_ffn_hidden_size": 32,
        "gpt": {"position_embedding_type": "rope"},
    }
    one_layer = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
    for _ in range(4):
        minloop.init_distributed(one_layer, seed=1)  # frees what the life before left behind
        minloop.shutdown_distributed()
        counts.append(len(os.listdir("/proc/self/task")))
        state = small_state(ddp=sharded, **experts)
        train(state, text_loader(state), 1)
        del state
        minloop.shutdown_distributed()
    return counts


def test_lives_leave_no_groups_behind() -> None:
    for _, first, *others in run_ranks(2, threads_of_each_life):
        assert max(others) <= first + 6  # of a group or two that torch itself keeps


def two_states_from_one_config() -> bool:
    """One config serves two models: each binds its hooks on its own copy."""
    config = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
    untouched = copy.copy(config)
    groups = minloop.init_distributed(config, seed=1)
    ddp_config = minloop.build_ddp_config(config)
    states = []
    for _ in range(2):
        chunks = minloop.wrap_ddp(
            minloop.build_gpt_model(config, groups, vocab_size=8, max_sequence_length=4), ddp_config, groups
        )
        optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1.0), groups)
        states.append(minloop.TrainState(chunks, optimizer, None, config, groups))
    same = config.grad_scale_func is None and config == untouched
    distinct = states[0].config is not states[1].config
    minloop.shutdown_distributed()
    return same and distinct


def test_one_config_serves_two_states() -> None:
    assert run_ranks(1, two_states_from_one_config) == [True]


def second_state_on_one_model() -> None:
    state = small_state()
    minloop.TrainState(state.chunks, state.optimizer, None, state.config, state.groups)


def torch_optimizer_on_ddp() -> None:
    state = small_state()
    adam = torch.optim.Adam(state.chunks[0].parameters())
    minloop.TrainState(state.chunks, adam, None, state.config, state.groups)  # pyright: ignore[reportArgumentType]


def unwrapped_chunks() -> None:
    config = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
    groups = minloop.init_distributed(config, seed=1)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=8, max_sequence_length=4)
    optimizer_config = minloop.build_optimizer_config(config, minloop.build_ddp_config(config), lr=1.0)
    minloop.build_optimizer(chunks, optimizer_config, groups)  # pyright: ignore[reportArgumentType]


def contradicting_optimizer_config() -> None:
    state = small_state()
    minloop.build_optimizer(state.chunks, minloop.OptimizerConfig(lr=1.0, use_distributed_optimizer=True), state.groups)


def too_few_batches() -> None:
    state = small_state()
    minloop.train_step(state, iter([next(text_loader(state))]), num_microbatches=2)


def token_beyond_the_vocabulary() -> None:
    state = small_state()
    batch = next(text_loader(state))
    batch["labels"][0, 3] = VOCAB_SIZE
    minloop.train_step(state, iter([batch]), num_microbatches=1)


def a_list_of_batches() -> None:
    state = small_state()
    minloop.train_step(state, [next(text_loader(state))], num_microbatches=1)  # pyright: ignore[reportArgumentType]


def ragged_batches() -> None:
    state = small_state()
    batch = next(text_loader(state))
    shorter = {name: value[:1] for name, value in batch.items()}
    minloop.train_step(state, iter([batch, shorter]), num_microbatches=2)


def batch_without_a_mask() -> None:
    state = small_state()
    batch = next(text_loader(state))
    del batch["loss_mask"]
    minloop.train_step(state, iter([batch]), num_microbatches=1)


def sequence_beyond_the_positions() -> None:
    state = small_state()
    batch = {name: torch.cat([value, value], dim=1) for name, value in next(text_loader(state)).items()}
    minloop.train_step(state, iter([batch]), num_microbatches=1)


def mean_reported(data: Any, model: Any) -> Any:
    output, loss = minloop.gpt_forward_step(data, model)
    return output, lambda output: (*loss(output)[:2], {"lm loss": output.mean()})


def report_of_another_shape() -> None:
    state = small_state()
    minloop.train_step(state, text_loader(state), num_microbatches=1, forward_step=mean_reported)


def packed_batch() -> None:
    state = small_state()
    batch = next(text_loader(state)) | {"cu_seqlens": torch.zeros(2, 33, dtype=torch.int32)}
    minloop.train_step(state, iter([batch]), num_microbatches=1)


def microbatches_with_virtual_stages(count: int, group: int) -> None:
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    state = small_state(**stages, microbatch_group_size_per_vp_stage=group)
    minloop.train_step(state, text_loader(state), num_microbatches=count)


@pytest.mark.parametrize(
    ("ranks", "function", "message"),
    [
        (1, second_state_on_one_model, "another TrainState or a host owns this model"),
        (1, torch_optimizer_on_ddp, "Adam sees no gradients on DDP chunks"),
        (1, unwrapped_chunks, "GPTModel is not wrapped for data parallelism: call wrap_ddp first"),
        (1, contradicting_optimizer_config, "OptimizerConfig.use_distributed_optimizer is True"),
        (1, too_few_batches, "it held 1 of the 2 microbatches of this step"),
        (1, token_beyond_the_vocabulary, str(VOCAB_SIZE)),
        (1, a_list_of_batches, "list begins anew whenever it is iterated"),
        (1, ragged_batches, r"microbatch 1 holds tokens \[1, 32\], the first one \[2, 32\]"),
        (1, batch_without_a_mask, "the batch lacks loss_mask"),
        (1, sequence_beyond_the_positions, "a sequence of 64 tokens, but max_sequence_length is 32"),
        (1, report_of_another_shape, r"must report {name: \[sum, count\]}"),
        (1, packed_batch, "would ignore: attention would cross documents"),
        (2, partial(microbatches_with_virtual_stages, 3, 2), r"num_microbatches \(3\) cannot be .* \(2\), the last"),
        (2, partial(microbatches_with_virtual_stages, 4, 3), r"num_microbatches \(4\) cannot be .* \(3\), the last"),
    ],
)
def test_misuse_is_refused_by_name(ranks: int, function: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(ranks, function, timeout=60)


def two_losses(data: Any, model: Any) -> Any:
    output, loss = minloop.gpt_forward_step(data, model)

    def both(output: torch.Tensor) -> Any:
        total, tokens, report = loss(output)
        return total, tokens, report | {"double": report["lm loss"] * report["lm loss"].new_tensor([2.0, 1.0])}

    return output, both


def names_of_losses(**fields: Any) -> list[Any]:
    state = small_state(**fields)
    loader = text_loader(state)
    steps: list[Any] = [minloop.train_step(state, loader, num_microbatches=2)]
    steps += [minloop.eval_step(state, loader, num_microbatches=2, forward_step=two_losses)]
    steps += [minloop.train_step(state, loader, num_microbatches=2)]
    minloop.shutdown_distributed()
    return [list(step.losses) for step in steps]


@pytest.mark.parametrize("fields", [{}, {"pipeline_model_parallel_size": 2}], ids=["DP2", "PP2"])
def test_each_forward_step_reports_its_own_losses(fields: dict[str, Any]) -> None:
    for names in run_ranks(2, names_of_losses, **fields):
        assert names == [["lm loss"], ["lm loss", "double"], ["lm loss"]]


VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def logits_in_layout(directory: str, fields: dict[str, Any], save: bool = False) -> torch.Tensor:
    state = shared_state(directory, save, **fields)
    logits = minloop.forward_logits(state, torch.arange(32)[None])
    minloop.shutdown_distributed()
    return logits


def test_logits_are_equal_in_every_layout(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, logits_in_layout, str(tmp_path), {}, save=True)
    assert expected.shape == (1, 32, VOCAB_SIZE)
    for fields in (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        VPP2,
        VPP2 | {"microbatch_group_size_per_vp_stage": 4},
    ):
        for logits in run_ranks(2, logits_in_layout, str(tmp_path), fields):
            torch.testing.assert_close(logits, expected, rtol=0, atol=rounding(1e-6))


def test_the_log_line_is_megatrons() -> None:
    (line,) = run_ranks(1, one_line)
    assert (
        " iteration        1/       7 | consumed samples:            8 | elapsed time per iteration (ms): 500.0 | "
        in line
    )
    assert "learning rate: 5.000000E-03 | global batch size:     8 | lm loss: 5." in line
    assert SEQUENCE_LENGTH == 32


def one_line() -> str:
    state = small_state()
    metrics = minloop.train_step(state, text_loader(state), num_microbatches=4)
    line = minloop.log_line(state, metrics, train_iters=7, elapsed=0.5)
    minloop.shutdown_distributed()
    return line


class Masked(Text):
    """Text of which every token also has one earlier token that it may not look at."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        forbidden = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
        rows = torch.arange(1, SEQUENCE_LENGTH)
        forbidden[rows, rows // 2] = True
        return super().__getitem__(index) | {"attention_mask": forbidden[None]}


def losses_with_a_mask(directory: str, fields: dict[str, Any], first: bool) -> list[tuple[float, float]]:
    local = {"transformer_impl": "local"}  # Transformer Engine's causal attention takes no further mask
    state = shared_state(directory, first, **local, **fields)
    loader = minloop.build_loader(Masked(), state.groups, micro_batch_size=MICRO_BATCH_SIZE)
    history = train(state, loader, 3)
    minloop.shutdown_distributed()
    return history


@pytest.mark.parametrize(("ranks", "vpp"), [(4, None), (2, 2)], ids=["PP4", "PP2 VPP2"])
def test_middle_stages_get_the_attention_mask(tmp_path: Path, ranks: int, vpp: int | None) -> None:
    (expected,) = run_ranks(1, losses_with_a_mask, str(tmp_path), {}, first=True)
    layout = {"pipeline_model_parallel_size": ranks, "virtual_pipeline_model_parallel_size": vpp}
    actual = run_ranks(ranks, losses_with_a_mask, str(tmp_path), layout, first=False)[0]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rounding(2e-6))


def freeze_embedding(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if name.startswith("embedding.word_embeddings"):
            parameter.requires_grad_(False)


def losses_with_a_frozen_embedding(directory: str, fields: dict[str, Any], first: bool) -> list[tuple[float, float]]:
    gpt = {"share_embeddings_and_output_weights": True, "before_wrapping": freeze_embedding}
    state = shared_state(directory, first, gpt=gpt, **fields)
    before = minloop.full_weights(state)
    history = train(state, text_loader(state), 3)
    after = minloop.full_weights(state)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "embedding.word_embeddings.weight" not in changed
    minloop.shutdown_distributed()
    return history


@pytest.mark.parametrize("vpp", [None, 2])
def test_a_frozen_tied_embedding_is_frozen_on_both_stages(tmp_path: Path, vpp: int | None) -> None:
    (expected,) = run_ranks(1, losses_with_a_frozen_embedding, str(tmp_path), {}, first=True)
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": vpp}
    actual = run_ranks(2, losses_with_a_frozen_embedding, str(tmp_path), layout, first=False, timeout=60)[0]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rounding(2e-6))
