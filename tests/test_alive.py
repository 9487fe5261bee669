"""Groups end with what made them, and say so; ranks that lost each other say that, too, and begin anew."""

import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks
from small import DEVICE, small_config, small_state, text_loader

import minloop

PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
PATIENCE = timedelta(seconds=10 if DEVICE == "cuda" else 2)  # more than a rank's first kernels keep others waiting


def _step(state: minloop.TrainState, **options: Any) -> float:
    return minloop.train_step(state, text_loader(state), num_microbatches=2, **options).loss.item()


def _again_and_again() -> None:
    """A host's default group stays; nothing else does."""
    held: list[tuple[int, int]] = []
    for _ in range(6):
        state = small_state(**PIPELINE)
        _step(state)
        del state
        minloop.shutdown_distributed()
        gc.collect()
        process = psutil.Process()
        held.append((process.num_fds(), process.num_threads()))
    torch.distributed.barrier()
    assert held[-1] <= held[3], held


def _broken_loss(data: Iterator[minloop.Batch], model: torch.nn.Module) -> Any:
    output, _ = minloop.gpt_forward_step(data, model)

    def loss(output: torch.Tensor) -> Any:
        raise ZeroDivisionError("the host's own")

    return output, loss


def _one_leaves(directory: str) -> None:
    state = small_state(**PIPELINE, init={"timeout": PATIENCE})
    is_last = torch.distributed.get_rank() == 1  # the one stage that has a loss
    first: Any = pytest.raises(ZeroDivisionError) if is_last else pytest.raises(RuntimeError, match="rank 0 lost other")
    with first as error:
        _step(state, forward_step=_broken_loss)
    assert any("left a step midway" in note for note in getattr(error.value, "__notes__", [])) == is_last
    with pytest.raises(RuntimeError, match=f"rank {int(is_last)} lost other ranks .*call shutdown_distributed"):
        _step(state)
    calls = [lambda: _step(state), lambda: minloop.begin_step(state), lambda: minloop.save_checkpoint(directory, state)]
    calls += [lambda: list(minloop.named_full_parameters(state)), lambda: minloop.load_weights(directory, state)]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"rank {int(is_last)} lost other ranks"):
            call()
    minloop.shutdown_distributed()
    calls += [lambda: minloop.token_logprobs(state, [next(text_loader(state))]), lambda: minloop.finish_step(state)]
    for call in calls:
        with pytest.raises(RuntimeError, match="the process groups were destroyed"):
            call()
    assert _step(small_state(**PIPELINE)) > 0
    minloop.shutdown_distributed()


def _disagree() -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises((RuntimeError, ValueError), match="disagree") as error:
        minloop.build_groups(small_config(**PIPELINE), [rank, 1 - rank], timeout=PATIENCE)
    kinds: list[Any] = [None, None]
    torch.distributed.all_gather_object(kinds, error.type)
    assert set(kinds) == {RuntimeError, ValueError}  # of the one that came first, and waited; of the other
    minloop.shutdown_distributed()


def _other_batches() -> None:
    state = small_state(init={"timeout": PATIENCE})
    for count in (2, 2, 3):
        minloop.train_step(state, text_loader(state), num_microbatches=count)
    with pytest.raises((RuntimeError, ValueError), match=r"× 2 at iteration 4 on another|lost other") as error:
        minloop.train_step(state, text_loader(state), num_microbatches=4 + torch.distributed.get_rank())
    kinds: list[Any] = [None, None]
    torch.distributed.all_gather_object(kinds, error.type)
    assert set(kinds) == {RuntimeError, ValueError}  # of the one that came first, and waited; of the other
    assert state.iteration == 3
    minloop.shutdown_distributed()


def _all(directory: str) -> None:
    _again_and_again()
    _one_leaves(directory)
    _disagree()
    _other_batches()


def test_groups_end_and_say_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # NCCL otherwise ends a process that has waited too long
    run_ranks(2, _all, str(tmp_path), init="any", timeout=240)
