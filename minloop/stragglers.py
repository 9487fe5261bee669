"""Which rank is slow: how long each one computes, without the waiting that makes all steps equally long."""

import contextlib
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.everyone import from_all_ranks
from minloop.state import TrainState


class StepTimes:
    """Seconds that this rank has spent in forward passes since the last `gather`; from `forward_times`."""

    def __init__(self) -> None:
        self._spans: list[tuple[Any, Any]] = []

    def gather(self, groups: ProcessGroupCollection) -> list[float]:
        """Return the seconds of every rank by global rank, and begin anew; all ranks call it. Waits for the GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            seconds = sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        else:
            seconds = sum(end - start for start, end in self._spans)
        self._spans.clear()
        return from_all_ranks(seconds, groups)

    @staticmethod
    def stragglers(seconds: list[float], factor: float = 1.2) -> list[int]:
        """Return the ranks whose seconds are more than `factor` times the median, slowest first."""
        limit = factor * statistics.median(seconds)
        return sorted((rank for rank, own in enumerate(seconds) if own > limit), key=lambda rank: -seconds[rank])


@contextlib.contextmanager
def forward_times(state: TrainState) -> Generator[StepTimes]:
    """While inside, measure this rank's forward passes, on a GPU by its events, without waiting for it.

    A step takes equally long on all ranks, since all wait for the slowest in its collectives. A forward pass waits for
    tensor, context and expert parallel peers only: of these all appear slow together, and stages with more layers do.

    Raises:
        ValueError: cuda_graph_impl="full_iteration", in which nothing is launched that could be measured, or
            overlap_moe_expert_parallel_comm, which mixes forward passes with backward ones.
    """
    if state.config.cuda_graph_impl == "full_iteration" and torch.cuda.is_available():
        raise ValueError(
            "forward_times with cuda_graph_impl='full_iteration', whose graph has no events: measure with 'none'"
        )
    if state.config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "forward_times with overlap_moe_expert_parallel_comm=True, which mixes forward passes with backward ones: "
            "set it to False to measure"
        )
    times, started = StepTimes(), list[Any]()

    def now() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def before(*_: Any) -> None:
        started.append(now())

    def after(*_: Any) -> None:
        times._spans.append((started.pop(), now()))  # pyright: ignore[reportPrivateUsage]

    with contextlib.ExitStack() as hooks:
        for chunk in state.chunks:
            hooks.callback(chunk.register_forward_pre_hook(before).remove)
            hooks.callback(chunk.register_forward_hook(after).remove)
        yield times
