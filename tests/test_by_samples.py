"""Runs that are counted in samples while their batch grows: killed and gone on with, they are the straight run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks
from small import small_state, text_loader

import minloop

TRAIN_SAMPLES = 70
SCHEDULE = {"train_samples": TRAIN_SAMPLES, "lr_warmup_samples": 16}
BATCHES = [4, 4, 4, 4, 8, 8, 12, 12, 16]
"""Samples of each step: the last one begins after 56, and goes beyond 70."""

Steps = list[tuple[int, float, float, float]]


def train_by_samples(directory: str, killed_at: int, **layout: Any) -> tuple[Steps, list[torch.Tensor]]:
    """Go on from the newest checkpoint; (consumed samples, loss, norm, learning rate) of each step, and the weights."""
    state = small_state(hidden_dropout=0.1, scheduler=SCHEDULE, **layout)
    loader, steps = text_loader(state), Steps()
    minloop.load_checkpoint(directory, state, loader, missing_ok=True)
    while state.consumed_samples < TRAIN_SAMPLES:
        size = minloop.ramped_batch_size(16, state.consumed_samples, start=4, increment=4, ramp_samples=48)
        metrics = minloop.train_step(state, loader, num_microbatches=minloop.num_microbatches(size, 2, state.groups))
        assert metrics.grad_norm is not None
        numbers = metrics.loss.item(), metrics.grad_norm.item(), metrics.learning_rate
        steps.append((state.consumed_samples, *numbers))
        if state.iteration == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.iteration % 2 == 0:
            minloop.save_checkpoint(directory, state, loader)
    with minloop.gathered_parameters(state.chunks):
        weights = [parameter.detach().clone() for chunk in state.chunks for parameter in chunk.parameters()]
    minloop.shutdown_distributed()
    return steps, weights


@pytest.mark.parametrize("layout", [{"ddp": {"use_distributed_optimizer": True}}, {"tensor_model_parallel_size": 2}])
def test_a_killed_run_by_samples_is_the_straight_one(layout: dict[str, Any], tmp_path: Path):
    straight = run_ranks(2, train_by_samples, str(tmp_path / "straight"), 0, **layout)
    consumed = [step[0] for step in straight[0][0]]
    assert [after - before for before, after in zip([0, *consumed], consumed, strict=False)] == BATCHES
    assert len({step[3] for step in straight[0][0]}) == len(BATCHES), "the schedule goes by samples, too"

    directory = str(tmp_path / "killed")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, train_by_samples, directory, 5, **layout)
    resumed = run_ranks(2, train_by_samples, directory, 0, **layout)
    for (steps, weights), (steps_then, weights_then) in zip(straight, resumed, strict=True):
        assert steps_then == steps[4:]  # bit for bit, from the save after iteration 4 on
        assert all(map(torch.equal, weights, weights_then))
