"""Faults: found before a weight changes, named, skipped or rolled back; and which rank is slow."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hosted import state_on
from ranks import run_ranks
from small import DEVICE, SEQUENCE_LENGTH, small_config, small_state, text_loader

import minloop
from minloop.checkpoint import content
from minloop.messages import logger

COUNT = 2  # microbatches of 2 samples on each of 2 data parallel ranks


def weights(state: minloop.TrainState) -> torch.Tensor:
    """And buffers: the experts' bias changes with the gradients, and not with the update."""
    with minloop.gathered_parameters(state.chunks):
        modules: list[Any] = [chunk.module for chunk in state.chunks]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def partly_frozen(*args: Any, **options: Any) -> list[Any]:
    chunks: list[Any] = minloop.build_gpt_model(*args, **options)
    chunks[0].embedding.position_embeddings.weight.requires_grad = False
    return chunks


def with_second_loss(data: Any, model: Any) -> Any:
    output, loss_function = minloop.gpt_forward_step(data, model)
    other = [math.nan if dist.get_rank() == 1 else 1.0, 1.0]

    def with_other(output: torch.Tensor) -> Any:
        total, tokens, report = loss_function(output)
        return total, tokens, {**report, "other": output.new_tensor(other)}

    return output, with_other


def step(state: minloop.TrainState, loader: Any, guard: minloop.FaultGuard | None, **fault: Any) -> minloop.StepMetrics:
    options: dict[str, Any] = {"iteration": 0, **fault}
    forward_step = minloop.inject_fault(minloop.gpt_forward_step, state, **options)
    return minloop.train_step(state, loader, num_microbatches=COUNT, forward_step=forward_step, guard=guard)


def caught(state: minloop.TrainState, loader: Any, guard: minloop.FaultGuard, **fault: Any) -> minloop.FaultError:
    before = weights(state)
    with pytest.raises(minloop.FaultError) as error:
        step(state, loader, guard, **fault)
    assert torch.equal(weights(state), before)
    return error.value


def train_with_faults(directory: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    state = small_state(
        ddp={"use_distributed_optimizer": True}, hidden_dropout=0.1, build=partly_frozen, num_layers=2,
        num_moe_experts=2, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, add_bias_linear=False,
    )  # fmt: skip
    loader = text_loader(state)
    plain = minloop.FaultGuard()
    step(state, loader, plain)
    seen["loss"] = str(caught(state, loader, plain, iteration=2, rank=1, times=1))
    seen["gradient"] = str(caught(state, loader, plain, iteration=2, where="gradient", factor=math.inf))
    before = weights(state)
    skipped = step(state, loader, minloop.FaultGuard("skip"), iteration=2, times=None)
    assert skipped.skipped
    assert (state.iteration, state.skipped_iterations) == (2, 1)
    assert torch.equal(weights(state), before)

    minloop.save_checkpoint(directory, state, loader)
    rerun = minloop.FaultGuard(rerun=True)
    unharmed = step(state, loader, rerun).losses, weights(state)
    minloop.load_checkpoint(directory, state, loader)
    with minloop.expert_load(state.chunks, state.groups) as load:
        again = step(state, loader, rerun, iteration=3, rank=1, times=1)
    assert load().sum(dim=1).tolist() == [2 * 2 * COUNT * 2 * SEQUENCE_LENGTH] * 2  # two experts for each token, once
    assert rerun.transient_faults == [3]
    assert again.losses == unharmed[0]
    assert again.losses.keys() == {"lm loss", "load_balancing_loss"}
    assert torch.equal(weights(state), unharmed[1])
    seen["persistent"] = str(caught(state, loader, rerun, iteration=4, rank=1, times=None))
    with pytest.raises(minloop.FaultError, match=r"nan; on rank 1 on .*, microbatch 0 .*; rank 1 on .* 1 "):
        minloop.train_step(state, loader, num_microbatches=COUNT, forward_step=with_second_loss, guard=plain)

    minloop.save_checkpoint(directory, state)
    assert step(state, loader, None, iteration=4, rank=1, times=None).loss.isnan()  # without a guard weights are ruined
    with mock.patch.object(logger, "warning") as warning:
        minloop.save_checkpoint(directory, state, keep_newest=1)
    assert warning.call_count == (dist.get_rank() == 0)
    assert "pass guard=FaultGuard() to train_step" in str(warning.call_args) or dist.get_rank()
    seen["checkpoints"] = sorted(path.name for path in Path(directory).glob("iter_*"))
    return seen


def test_a_fault_is_found_before_a_weight_changes(tmp_path: Path) -> None:
    seen, others = run_ranks(2, train_with_faults, str(tmp_path))
    assert seen == others
    assert seen["loss"].startswith("iteration 2: the loss is nan; on rank 1 on ")
    assert "microbatch 0 (samples 10 to 11 of the run). No weight has changed" in seen["loss"]
    assert "iteration 2: the loss is 5." in seen["gradient"]
    assert "but the gradient is not finite, at " in seen["gradient"]
    assert "embedding.word_embeddings.weight" in seen["gradient"]
    assert "microbatch 0" in seen["persistent"]
    assert "microbatch 1" in seen["persistent"]
    assert "Computed again it came out so again" in seen["persistent"]
    assert seen["checkpoints"] == [f"iter_000000{number}" for number in (2, 3, 4)], "the last good one was deleted"


def train_in_stages() -> list[str]:
    """A fault that one of two copies of the loss has, on the last of two stages."""
    state = small_state(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )  # fmt: skip
    loader, guard = text_loader(state), minloop.FaultGuard(loss_spike=2.0, window=1)
    step(state, loader, guard)
    faults: list[dict[str, Any]] = [
        {"iteration": 2, "rank": 3, "factor": math.inf},
        {"iteration": 2, "rank": 2, "factor": 1000.0},
        {"iteration": 2, "rank": 1, "where": "gradient"},
    ]
    return [str(caught(state, loader, guard, **fault)) for fault in faults]


def test_all_stages_learn_of_it() -> None:
    seen = run_ranks(4, train_in_stages)
    assert seen == [seen[0]] * 4
    loss, spike, gradient = seen[0]
    assert loss.startswith("iteration 2: the loss is inf; on rank 3 on ")
    assert spike.startswith("iteration 2: the loss leaps to ")
    assert "; on rank 2 on " in spike
    assert "the gradient is not finite, at " in gradient


def fault_in_a_layout_of_some_ranks() -> list[tuple[Any, ...]]:
    """What each rank of a layout on the last two of three ranks logs, and records of it."""
    config = small_config(tensor_model_parallel_size=2)
    minloop.init_distributed(minloop.replace_layout(config, tensor_model_parallel_size=1), seed=1)
    if dist.get_rank() == 0:
        return []
    groups = minloop.build_groups(config, [1, 2])
    state = state_on(groups, config)
    record = minloop.record_layout(state, text_loader(state), num_microbatches=1)
    with mock.patch.object(logger, "log") as log:
        metrics = step(state, text_loader(state), minloop.FaultGuard("skip"), iteration=1, rank=1, factor=math.nan)
    assert metrics.skipped
    return [(minloop.is_first_rank(groups), log.call_count, len(record.outputs), len(record.losses))]


def test_the_first_rank_of_a_layout_of_some_ranks_reports() -> None:
    _, first, second = run_ranks(3, fault_in_a_layout_of_some_ranks)
    assert first == [(True, 1, 5, 1)]  # four layers and the loss
    assert second == [(False, 0, 0, 0)]


def roll_back(directory: str) -> tuple[list[float], list[int], str]:
    """Spike in iteration 5 of 6, checkpoint at 3; returns the losses of the last steps."""
    state = small_state(scheduler={"train_iters": 9, "lr_warmup_iters": 1})
    loader = text_loader(state)
    guard = minloop.FaultGuard(loss_spike=3.0, window=2)
    losses: dict[int, float] = {}
    rates: dict[int, float] = {}
    seen = ""
    while state.iteration < 6:
        try:
            metrics = step(state, loader, guard, iteration=5, rank=1, factor=100.0, times=None)
        except minloop.FaultError as error:
            seen = f"{guard.roll_back(error, directory, state, loader).name}: {error}"
            continue
        # what is trained a second time is trained as the first time, from its own place in the schedule
        assert losses.setdefault(state.iteration, metrics.loss.item()) == metrics.loss.item()
        assert rates.setdefault(state.iteration, metrics.learning_rate) == metrics.learning_rate
        if state.iteration == 3:
            minloop.save_checkpoint(directory, state, {"train": loader, "guard": guard})
    other = minloop.FaultGuard(loss_spike=3.0, window=2)
    minloop.load_checkpoint(directory, state, {"train": loader, "guard": other})
    assert other.state_dict()["losses"] == [losses[2], losses[3]]
    assert state.skipped_iterations == 0  # as saved at 3
    return [*losses.values()], sorted(guard.iterations_to_skip), seen


def test_a_spike_is_rolled_back_and_skipped(tmp_path: Path) -> None:
    losses, skipped, seen = run_ranks(2, roll_back, str(tmp_path))[0]
    assert skipped == [5]
    assert len(losses) == 6
    assert max(losses[:4]) < 6 < losses[4] / 10
    assert losses[5] < 6
    assert seen.startswith("iter_0000003: iteration 5: the loss leaps to ")
    assert "rank 1 on " in seen


def slow_rank() -> tuple[list[int], list[float]]:
    state = small_state()
    loader = text_loader(state)
    if dist.get_rank() == 2:
        state.chunks[0].module.register_forward_hook(lambda *_: time.sleep(0.1 if DEVICE == "cpu" else 1.0))
    with minloop.forward_times(state) as times:
        minloop.train_step(state, loader, num_microbatches=2)
        times.gather(state.groups)
        minloop.train_step(state, loader, num_microbatches=2)
        seconds = times.gather(state.groups)
    return times.stragglers(seconds), seconds


def test_the_slow_rank_is_found() -> None:
    for slow, seconds in run_ranks(4, slow_rank):
        assert slow[0] == 2, seconds


def test_passes_that_are_mixed_are_not_measured() -> None:
    state: Any = SimpleNamespace(config=SimpleNamespace(cuda_graph_impl="none", overlap_moe_expert_parallel_comm=True))
    with pytest.raises(ValueError, match="forward_times with overlap_moe_expert_parallel_comm=True"):
        minloop.forward_times(state).__enter__()


def test_a_report_may_be_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    report = {"other": torch.ones(2, device="meta")}

    def forward_step(data: Any, model: Any) -> Any:
        return torch.ones((), requires_grad=True), lambda output: (output, torch.ones(()), report)

    state: Any = SimpleNamespace(iteration=0)
    output, loss = minloop.inject_fault(forward_step, state, iteration=1)(iter(()), torch.nn.Module())
    total, _, multiplied = loss(output)
    assert total.isnan()
    assert multiplied["other"].device.type == "meta"


def test_streams_are_set_back_where_captured_graphs_draw_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.Generator().manual_seed(1)
    tracker = SimpleNamespace(get_states=lambda: {"model-parallel-rng": held}, set_states=mock.Mock())
    monkeypatch.setattr(content.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(content, "is_graph_safe_cuda_rng_tracker", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    streams = content.rng_streams()
    drawn = torch.rand(3, generator=held)
    content.restore_rng_state(streams)
    tracker.set_states.assert_called_once_with({"model-parallel-rng": held})
    assert torch.equal(torch.rand(3, generator=held), drawn)


class Scales(torch.nn.Module):
    """What a module of Transformer Engine's has of FP8 with delayed scaling; every pass moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.passes = 0

    def get_fp8_meta_tensors(self) -> int:
        return self.passes

    def reset_fp8_meta_tensors(self, before: int) -> None:
        self.passes = before


def scales_after_passes() -> list[int]:
    state = small_state()
    chunk, scales, loader = state.chunks[0], Scales(), text_loader(state)
    chunk.module.scales = scales
    chunk.register_forward_hook(lambda *_: setattr(scales, "passes", scales.passes + 1))
    state.config.fp8 = "hybrid"
    found: list[int] = []
    step(state, loader, minloop.FaultGuard())
    found.append(scales.passes)
    minloop.eval_step(state, loader, num_microbatches=COUNT)
    minloop.evaluate(state, {"text": loader}, num_microbatches=COUNT)
    found.append(scales.passes)
    assert step(state, loader, minloop.FaultGuard("skip"), iteration=2).skipped
    found.append(scales.passes)
    assert not step(state, loader, minloop.FaultGuard(rerun=True), iteration=3).skipped
    found.append(scales.passes)
    minloop.shutdown_distributed()
    return found


def test_scales_of_fp8_follow_from_the_steps_taken_alone() -> None:
    assert run_ranks(1, scales_after_passes) == [[COUNT, COUNT, COUNT, 2 * COUNT]]


def test_policies_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r'neither "raise" nor "skip"; to go back .* guard.roll_back'):
        minloop.FaultGuard("rollback")  # pyright: ignore[reportArgumentType]  # the mistake to be answered
    with pytest.raises(ValueError, match=r"loss_spike \(0.5\) must be more than 1"):
        minloop.FaultGuard(loss_spike=0.5)
    with pytest.raises(ValueError, match=r"window \(0\) must be positive"):
        minloop.FaultGuard(window=0)
