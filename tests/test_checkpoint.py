"""Checkpoints: resume bit for bit, reshard element for element, refuse what does not fit, lose nothing."""

import hashlib
import itertools
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.utils import unwrap_model
from ranks import RankError, run_ranks
from reshard import differing_tensors, load_and_save, train_and_save
from sameness_cases import ARCHITECTURES, layout
from small import GLOBAL_BATCH_SIZE, rounding, small_state, text_loader, train
from torch.distributed.checkpoint.filesystem import FileSystemReader

import minloop
from minloop.checkpoint import restricted, tensors
from minloop.checkpoint.extra_state import leave_out_other_scales
from minloop.checkpoint.flat_ranges import rectangles
from minloop.optimizer import prepare_optimizer_state

SHARDED = {"use_distributed_optimizer": True}
SCHEDULE = {"train_iters": 8, "lr_warmup_iters": 3}


def run(directory: str, options: dict[str, Any], steps: int, *, load: bool, save: bool) -> list[tuple[float, float]]:
    """Build, perhaps load, train, perhaps save. The seed differs after a load: nothing may depend on it."""
    options = {"seed": 77 if load else 1, "scheduler": SCHEDULE} | options
    global_batch_size = options.pop("global_batch_size", GLOBAL_BATCH_SIZE)
    state = small_state(**options)
    loader = text_loader(state)
    if load:
        minloop.load_checkpoint(directory, state, loader)
    history = train(state, loader, steps, global_batch_size=global_batch_size)
    if save:
        minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()
    return history


def resume(directory: str, options: dict[str, Any], steps: int = 4) -> tuple[Any, Any]:
    """The steps after a save in the background, in the state that was saved and in one that was loaded."""
    options = {"scheduler": SCHEDULE} | options
    global_batch_size = options.pop("global_batch_size", GLOBAL_BATCH_SIZE)
    state = small_state(seed=1, **options)
    loader = text_loader(state)
    train(state, loader, steps, global_batch_size=global_batch_size)
    pending = minloop.start_save(directory, state, loader)
    straight = train(state, loader, steps, global_batch_size=global_batch_size), weight_bits(state)
    pending.wait()
    minloop.shutdown_distributed()
    state = small_state(seed=77, **options)  # nothing may depend on it
    loader = text_loader(state)
    minloop.load_checkpoint(directory, state, loader)
    resumed = train(state, loader, steps, global_batch_size=global_batch_size), weight_bits(state)
    minloop.shutdown_distributed()
    return straight, resumed


def weight_bits(state: minloop.TrainState) -> list[str]:
    """A digest of each of this rank's weights and buffers."""
    with minloop.gathered_parameters(state.chunks):
        models: list[Any] = [unwrap_model(chunk) for chunk in state.chunks]
        held = [x for model in models for x in [*model.parameters(), *model.buffers()]]
        bits = [x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy() for x in held]
        return [hashlib.sha256(x).hexdigest() for x in bits]


def resume_each(directory: str, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: resume(f"{directory}/{name}", options) for name, options in cases.items()}


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RESUMED: dict[str, dict[str, Any]] = {
    "DDP, dropout": DROPOUT,
    "ZeRO-1, dropout": {"ddp": SHARDED} | DROPOUT,
    "ZeRO-1 bf16": {"ddp": SHARDED, "bf16": True},
    "DDP fp16": {"fp16": True, "optimizer": {"initial_loss_scale": 2.0**10}},
    "ZeRO-1 fp16": {"fp16": True, "ddp": SHARDED, "optimizer": {"initial_loss_scale": 2.0**10}},
    "DDP bf16, TP2+SP, dropout": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True} | DROPOUT,
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP2, dropout": {"context_parallel_size": 2} | DROPOUT,
    "ZeRO-1, padding between buckets": {"ddp": SHARDED | {"bucket_size": 5000}},
    "ZeRO-1, tied, PP2 VPP2": {
        "ddp": SHARDED,
        "gpt": {"share_embeddings_and_output_weights": True},
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "EP2, expert bias, ZeRO-1": ARCHITECTURES["MoE, DeepSeek-like"] | {"expert_model_parallel_size": 2, "ddp": SHARDED},
    "MLA, TP2": ARCHITECTURES["MLA, q-LoRA, YaRN"] | {"tensor_model_parallel_size": 2, "ddp": SHARDED},
    "MTP, PP2": ARCHITECTURES["MTP 1, tied"] | {"pipeline_model_parallel_size": 2},
    "SGD": {"optimizer": {"optimizer": "sgd"}},
    "lion bf16, PP2": {"pipeline_model_parallel_size": 2, "bf16": True, "optimizer": {"optimizer": "lion"}},
    "muon": {"optimizer": {"optimizer": "muon"}},
    "muon bf16, TP2": {
        "tensor_model_parallel_size": 2,
        "bf16": True,
        "optimizer": {"optimizer": "muon", "muon_tp_mode": "distributed"},
    },
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Any, Any]]]:
    """All cases on the same two ranks, one after another."""
    return run_ranks(2, resume_each, str(tmp_path_factory.mktemp("resumed")), RESUMED, timeout=600)


@pytest.mark.parametrize("case", RESUMED)
def test_four_and_four_steps_are_eight(resumed: list[dict[str, tuple[Any, Any]]], case: str) -> None:
    for rank in resumed:
        straight, loaded = rank[case]
        assert straight == loaded


def test_three_ranks_resume_bitwise(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ddp": SHARDED | {"bucket_size": 5000}, "bf16": True, "global_batch_size": 12}
    for straight, loaded in run_ranks(3, resume, str(tmp_path), options):
        assert straight == loaded


def test_four_and_four_steps_in_two_processes_are_eight(tmp_path: Path) -> None:
    options = {"ddp": SHARDED} | DROPOUT
    straight = run_ranks(2, run, str(tmp_path), options, 8, load=False, save=False)
    first = run_ranks(2, run, str(tmp_path), options, 4, load=False, save=True)
    second = run_ranks(2, run, str(tmp_path), options, 4, load=True, save=False)
    assert [a + b for a, b in zip(first, second, strict=True)] == straight


def test_a_chain_of_layouts_leads_back(tmp_path: Path) -> None:
    """benchmarks/reshard_chain.py does it through ten layouts on up to eight ranks."""
    model: dict[str, Any] = ARCHITECTURES["Llama"] | {"bf16": True}
    chain = [
        layout(2, tp=2, sequence_parallel=True, ddp=SHARDED),
        layout(3, ddp=SHARDED | {"bucket_size": 3000}),
        layout(4, pp=2, vpp=2),
        layout(4, cp=2, tp=2, sequence_parallel=True, ddp=SHARDED),
    ]
    chain.append(chain[0])
    paths = [str(tmp_path / str(number)) for number in range(len(chain))]
    run_ranks(chain[0][0], train_and_save, paths[0], model | chain[0][1])
    for number, (ranks, options) in enumerate(chain[1:], start=1):
        run_ranks(ranks, load_and_save, paths[number - 1], paths[number], model | options)
    ((count, differing),) = run_ranks(1, differing_tensors, paths)
    assert count > 20
    assert not differing


def test_rectangles_are_a_range_of_a_block() -> None:
    draw = random.Random(1)
    for _ in range(300):
        whole = torch.arange(math.prod(shape := [draw.randint(1, 4) for _ in range(draw.randint(1, 4))])).view(shape)
        axis = draw.randrange(len(shape))
        first = draw.randrange(shape[axis])
        block = whole.narrow(axis, first, draw.randint(1, shape[axis] - first))
        start = draw.randint(0, whole.numel())
        stop = draw.randint(start, whole.numel())
        cut = [
            block[tuple(slice(at, at + length) for at, length in zip(place, size, strict=True))].flatten().tolist()
            for place, size in rectangles(block.shape, block.stride(), int(block.storage_offset()), start, stop)
        ]
        assert [*itertools.chain(*cut)] == [place for place in block.flatten().tolist() if start <= place < stop]


def load_by_exchange(directory: str, options: dict[str, Any], pays: bool) -> list[str]:
    """The weights as each rank reads them, or as ranks read them for each other, where the fault of one is told."""
    with mock.patch.object(tensors, "_exchange_pays", return_value=pays):
        state = small_state(seed=77, **options)
        checkpoint = minloop.load_checkpoint(directory, state)
        loaded = weight_bits(state)
        if pays:
            failing = mock.patch.object(restricted.Reader, "read_data", fail_on_last_rank)
            with failing, pytest.raises(minloop.CheckpointError, match=r"on rank 1: .*not today"):
                minloop.load_checkpoint(checkpoint, state)
    minloop.shutdown_distributed()
    return loaded


def fail_on_last_rank(reader: Any, plan: Any, planner: Any) -> Any:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        raise OSError("not today")
    return FileSystemReader.read_data(reader, plan, planner)


def test_ranks_read_for_each_other_where_that_pays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bf16": True}
    run_ranks(2, run, str(tmp_path), options, 2, load=False, save=True)
    alone, exchanged = (run_ranks(2, load_by_exchange, str(tmp_path), options, pays) for pays in (False, True))
    assert alone == exchanged


SAVED = (2, {"tensor_model_parallel_size": 2})
RESHARDED: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP4": (4, {"tensor_model_parallel_size": 4}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2": (2, {}),
    "TP2×DP2": (4, {"tensor_model_parallel_size": 2}),
    "DP2 ZeRO-1": (2, {"ddp": SHARDED}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=["DDP", "ZeRO-1"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps at TP2, saved, and the losses of the three steps after it in the same layout."""
    ddp = {"ddp": SHARDED} if request.param == "ZeRO-1" else {}
    directory = str(tmp_path_factory.mktemp("trained"))
    ranks, options = SAVED
    run_ranks(ranks, run, directory, options | ddp, 4, load=False, save=True)
    return ddp, directory, run_ranks(ranks, run, directory, options | ddp, 3, load=True, save=False)[0]


@pytest.mark.parametrize("layout", RESHARDED)
def test_loads_into_another_layout(trained: Any, tmp_path: Path, layout: str) -> None:
    ddp, directory, expected = trained
    ranks, options = RESHARDED[layout]
    options = ddp | options
    run_ranks(ranks, load_and_save, directory, str(tmp_path), options)
    ((count, differing),) = run_ranks(1, differing_tensors, [directory, str(tmp_path)])
    assert count > 20
    assert not differing
    history = run_ranks(ranks, run, directory, options, 3, load=True, save=False)[0]
    assert max(abs(a[0] - b[0]) for a, b in zip(history, expected, strict=True)) <= rounding(1e-6)


def test_zero1_loads_into_ddp(tmp_path: Path) -> None:
    run_ranks(2, run, str(tmp_path), {"ddp": SHARDED}, 4, load=False, save=True)
    expected = run_ranks(2, run, str(tmp_path), {"ddp": SHARDED}, 3, load=True, save=False)[0]
    history = run_ranks(2, run, str(tmp_path), {}, 3, load=True, save=False)[0]
    assert max(abs(a[0] - b[0]) for a, b in zip(history, expected, strict=True)) <= rounding(1e-6)


@pytest.mark.parametrize("kinds", [({"ddp": SHARDED}, {}), ({}, {"ddp": SHARDED})], ids=["to DDP", "to ZeRO-1"])
def test_bf16_master_weights_change_kind(tmp_path: Path, kinds: tuple[dict[str, Any], dict[str, Any]]) -> None:
    saved, loaded = ({"bf16": True} | kind for kind in kinds)
    run_ranks(2, run, str(tmp_path / "saved"), saved, 4, load=False, save=True)
    run_ranks(2, load_and_save, str(tmp_path / "saved"), str(tmp_path / "loaded"), loaded)
    ((count, differing),) = run_ranks(1, differing_tensors, [str(tmp_path / "saved"), str(tmp_path / "loaded")])
    assert count > 60
    assert not differing
    # both kinds then compute the next loss from equal weights
    expected = run_ranks(2, run, str(tmp_path / "saved"), saved, 1, load=True, save=False)[0]
    history = run_ranks(2, run, str(tmp_path / "saved"), loaded, 1, load=True, save=False)[0]
    assert history[0][0] == expected[0][0]


def weight_sums(directory: str, options: dict[str, Any]) -> float:
    state = small_state(seed=77, **options)
    minloop.load_checkpoint(directory, state)
    total = sum(float(p.detach().double().abs().sum()) for p in state.chunks[0].parameters())
    minloop.shutdown_distributed()
    return total


def test_fp32_weights_come_from_saved_master_weights(tmp_path: Path) -> None:
    run_ranks(2, run, str(tmp_path), {"bf16": True, "ddp": SHARDED}, 4, load=False, save=True)
    ddp, sharded = (run_ranks(2, weight_sums, str(tmp_path), options)[0] for options in ({}, {"ddp": SHARDED}))
    rounded = run_ranks(2, weight_sums, str(tmp_path), {"bf16": True})[0]
    assert ddp == sharded != rounded


class StepInGroupAdam(torch.optim.Optimizer):
    """AdamW that counts steps in its parameter groups and knows settings of its own, as Transformer Engine's does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        torchs = ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay")
        own = [{key: value for key, value in group.items() if key not in torchs} for group in groups]
        super().__init__([group | {"bias_correction": True} for group in own], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            assert group["bias_correction"]
            for parameter in group["params"]:
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))


def run_with(directory: str, adam: str, steps: int, load: bool) -> list[float]:
    state = small_state(seed=77 if load else 1)
    (inner,) = state.optimizer.chained_optimizers  # pyright: ignore[reportAttributeAccessIssue]
    if adam == "step in group":
        inner.optimizer = StepInGroupAdam(inner.optimizer.param_groups)
        prepare_optimizer_state(state.optimizer)
    loader = text_loader(state)
    if load:
        minloop.load_checkpoint(directory, state, loader)
    history = train(state, loader, steps)
    if not load:
        minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()
    return [loss for loss, _ in history]


@pytest.mark.parametrize("saved", ["torch's", "step in group"])
def test_adams_of_either_kind_read_each_others_checkpoints(tmp_path: Path, saved: str) -> None:
    straight = run_ranks(1, run_with, str(tmp_path / "straight"), "torch's", 7, load=False)[0]
    first = run_ranks(1, run_with, str(tmp_path / "saved"), saved, 4, load=False)[0]
    for loaded in ("torch's", "step in group"):
        second = run_ranks(1, run_with, str(tmp_path / "saved"), loaded, 3, load=True)[0]
        assert first + second == pytest.approx(straight, rel=rounding(1e-6))


MOE: dict[str, Any] = {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}


@pytest.mark.parametrize("ddp", [{}, {"ddp": SHARDED}], ids=["DDP", "ZeRO-1"])
def test_experts_reshard_with_their_optimizer(tmp_path: Path, ddp: dict[str, Any]) -> None:
    whole, split = MOE | ddp, MOE | ddp | {"expert_model_parallel_size": 2}
    run_ranks(2, run, str(tmp_path / "whole"), whole, 3, load=False, save=True)
    expected = run_ranks(2, run, str(tmp_path / "whole"), whole, 3, load=True, save=False)[0]
    history = run_ranks(2, run, str(tmp_path / "whole"), split, 3, load=True, save=False)[0]
    assert max(abs(a[0] - b[0]) for a, b in zip(history, expected, strict=True)) <= rounding(1e-6)
    run_ranks(2, load_and_save, str(tmp_path / "whole"), str(tmp_path / "split"), split)
    run_ranks(2, load_and_save, str(tmp_path / "split"), str(tmp_path / "back"), whole)
    ((count, differing),) = run_ranks(1, differing_tensors, [str(tmp_path / "whole"), str(tmp_path / "back")])
    assert count > 20
    assert not differing


EXPERTS = {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 32, "sequence_parallel": True}


class LikeTransformerEngines(torch.nn.GELU):
    """An activation that is a module with extra state, as Transformer Engine's are."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.numel() == 0


def with_such_activations(*args: Any, **options: Any) -> list[Any]:
    chunks = minloop.build_gpt_model(*args, **options)
    for mlp in (module for chunk in chunks for module in chunk.modules() if isinstance(module, MLP)):
        mlp.activation_func = LikeTransformerEngines()
    return chunks


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_activations_with_extra_state_are_saved_by_tensor_parallel_ranks(
    tmp_path: Path, experts: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"tensor_model_parallel_size": 2, "num_layers": 2, "add_bias_linear": False, **experts}
    options |= {"bias_activation_fusion": False, "build": with_such_activations}
    run_ranks(4, train_and_save, str(tmp_path), options)
    run_ranks(2, load_and_save, str(tmp_path), str(tmp_path / "again"), options)


@pytest.mark.parametrize(("ranks", "kept"), [(2, True), (4, False), (1, False)])
def test_scales_of_grouped_experts_belong_to_their_number(ranks: int, kept: bool) -> None:
    record = {"architecture": {"num_moe_experts": 4}, "layout": {"ep": ranks}}
    saved: Any = SimpleNamespace(common={"minloop": record})
    layer, other = "decoder.layers.0.mlp.experts.linear_fc1", "decoder.layers.0.mlp.router._extra_state"
    state = torch.ones(3, dtype=torch.uint8)
    content = {f"{layer}.weight0": state, f"{layer}._extra_state": state, f"{layer}._extra_state1": state, other: state}
    leave_out_other_scales(saved, content)
    assert (f"{layer}._extra_state1" in content, f"{layer}._extra_state" in content) == (kept, kept)
    assert {f"{layer}.weight0", other} <= content.keys()


@pytest.mark.parametrize("kind", [{"ddp": SHARDED}, {"bf16": True}, {}], ids=["ZeRO-1", "bf16", "fp32"])
def test_a_stage_may_have_no_experts(tmp_path: Path, kind: dict[str, Any]) -> None:
    whole = MOE | kind | {"moe_layer_freq": [0, 1]}
    split = whole | {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    straight = run_ranks(4, run, str(tmp_path / "straight"), split, 5, load=False, save=False)[0]
    first = run_ranks(4, run, str(tmp_path / "split"), split, 3, load=False, save=True)[0]
    second = run_ranks(4, run, str(tmp_path / "split"), split, 2, load=True, save=False)[0]
    assert first + second == straight
    elsewhere = run_ranks(1, run, str(tmp_path / "split"), whole, 2, load=True, save=False)[0]
    assert elsewhere[0] == pytest.approx(straight[3], rel=1e-4 if "bf16" in kind else rounding(1e-6))


def rates(directory: str, options: dict[str, Any], load: bool) -> list[float]:
    state = small_state(seed=3, **options)
    loader = text_loader(state)
    if load:
        minloop.load_checkpoint(directory, state, loader)
    steps = [minloop.train_step(state, loader, num_microbatches=4).learning_rate for _ in range(3)]
    if not load:
        minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()
    return steps


def test_the_schedule_built_here_goes_on_from_the_saved_position(tmp_path: Path) -> None:
    def linear(iterations: int) -> dict[str, Any]:
        return {"scheduler": {"train_iters": iterations, "lr_decay_style": "linear"}}

    run_ranks(1, rates, str(tmp_path / "linear"), linear(3), load=False)
    run_ranks(1, rates, str(tmp_path / "constant"), {}, load=False)
    extended = pytest.approx([5e-3 * (1 - step / 6) for step in (3, 4, 5)])
    assert run_ranks(1, rates, str(tmp_path / "linear"), linear(6), load=True)[0] == extended
    assert run_ranks(1, rates, str(tmp_path / "constant"), linear(6), load=True)[0] == extended
    assert run_ranks(1, rates, str(tmp_path / "linear"), {}, load=True)[0] == [5e-3] * 3
    assert run_ranks(1, rates, str(tmp_path / "linear"), {"lr": 1e-4}, load=True)[0] == [1e-4] * 3


def save_at_step_zero(directory: str) -> tuple[int, list[str]]:
    state = small_state(ddp=SHARDED)
    minloop.save_checkpoint(directory, state)
    fresh = small_state(seed=9, ddp=SHARDED)
    minloop.load_checkpoint(directory, fresh)
    pairs = zip(state.chunks[0].named_parameters(), fresh.chunks[0].parameters(), strict=True)
    differing = [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)]
    minloop.shutdown_distributed()
    return fresh.iteration, differing


def test_saves_before_the_first_step(tmp_path: Path) -> None:
    assert run_ranks(2, save_at_step_zero, str(tmp_path)) == [(0, [])] * 2


def load_weights_only(directory: str) -> tuple[int, float, float]:
    state = small_state(seed=77, bf16=True)
    minloop.load_checkpoint(directory, state, weights_only=True)
    chained: Any = state.optimizer
    adam = chained.chained_optimizers[0].optimizer
    moments = sum(float(s["exp_avg"].abs().sum()) for s in adam.state.values())
    history = train(state, text_loader(state), 1)
    minloop.shutdown_distributed()
    return state.iteration, moments, history[0][0]


def test_weights_only_begins_anew(tmp_path: Path) -> None:
    before = run_ranks(1, run, str(tmp_path), {"bf16": True}, 6, load=False, save=True)[0]
    ((iteration, moments, loss),) = run_ranks(1, load_weights_only, str(tmp_path))
    assert (iteration, moments) == (1, 0.0)
    assert loss < before[0][0] - 0.5


def test_the_latest_complete_checkpoint_counts(tmp_path: Path) -> None:
    assert minloop.latest_checkpoint(tmp_path / "absent") is None
    run_ranks(1, run, str(tmp_path), {}, 1, load=False, save=True)
    complete = tmp_path / "iter_0000001"
    assert minloop.latest_checkpoint(tmp_path) == complete
    damaged = tmp_path / "iter_0000002"
    shutil.copytree(complete, damaged)
    (damaged / "metadata.json").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert minloop.latest_checkpoint(tmp_path) == complete
    (tmp_path / "iter_0000003.unfinished").mkdir()
    assert minloop.latest_checkpoint(tmp_path) == complete
    being_replaced = complete.rename(tmp_path / "iter_0000001.replaced")
    assert minloop.latest_checkpoint(tmp_path) == being_replaced


def load_only(path: str, options: dict[str, Any]) -> None:
    minloop.load_checkpoint(path, small_state(**options))


def test_bad_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, run, str(tmp_path), {}, 1, load=False, save=True)
    complete = tmp_path / "iter_0000001"
    with pytest.raises(RankError, match=r"another architecture \(hidden_size: 32 saved, 64 here"):
        run_ranks(1, load_only, str(tmp_path), {"hidden_size": 64})
    with pytest.raises(RankError, match=r"not a directory"):
        run_ranks(1, load_only, str(tmp_path / "absent"), {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(RankError, match=r"holds no complete checkpoint"):
        run_ranks(1, load_only, str(tmp_path / "empty"), {})
    (complete / "metadata.json").unlink()
    with pytest.raises(RankError, match=r"is incomplete, it lacks metadata\.json"):
        run_ranks(1, load_only, str(complete), {})


def save_twice(directory: str) -> list[str]:
    state = small_state()
    loader = text_loader(state)
    train(state, loader, 1)
    minloop.save_checkpoint(directory, state, loader)
    minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()
    return sorted(path.name for path in Path(directory).iterdir())


def test_saving_the_same_iteration_replaces_it(tmp_path: Path) -> None:
    (names,) = run_ranks(1, save_twice, str(tmp_path))
    assert names == [".lock", "iter_0000001", "latest_checkpointed_iteration.txt"]
