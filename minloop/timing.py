"""How fast a run is, what memory it holds and what energy it takes, measured between the steps that are logged."""

import contextlib
import time
from collections.abc import Callable, Generator
from statistics import median
from typing import Any

import psutil
import torch

from minloop.everyone import from_all_ranks
from minloop.metrics import MEMORY, SPREAD, Record
from minloop.state import TrainState


class StepTimer:
    """Measures from one `lap` to the next; the steps between are left alone: no clock, no wait for the GPU."""

    def __init__(
        self,
        state: TrainState,
        *,
        sequence_length: int,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        """Start measuring.

        Args:
            sequence_length: tokens of a whole sequence; all of them count as throughput, those without loss, too.
            flops_per_token: from `minloop.flops_per_token`, for TFLOP/s.
            peak_tflops: of one GPU, from `minloop.peak_tflops`, for MFU.
        """
        self._state, self._sequence_length = state, sequence_length
        self._flops_per_token, self._peak_tflops = flops_per_token, peak_tflops
        self._energy = _energy_meter()
        self._begin()

    def _begin(self) -> None:
        _wait()
        self._start, self._start_joules = time.perf_counter(), self._energy()
        self._iteration, self._samples = self._state.iteration, self._state.consumed_samples

    def lap(self) -> Record:
        """Return the means per step since the last lap, and begin the next. All ranks call it, after the same step.

        The names are those of Megatron-LM's TensorBoard where it has one: seconds ("iteration-time", the slowest
        rank's, and min, median and max over ranks), TFLOP/s ("throughput") and tokens/s per GPU, "mfu", bytes of memory
        (the largest of any rank; "mem-rss-bytes" is the process's on the host), and where NVML tells it the mean energy
        ("iter-energy/gpu", joules) and power (watts). As ranks wait for each other in every step, their times differ
        only by what they do beside it: `forward_times` tells which rank computes slowly.

        Raises:
            RuntimeError: no step was taken since the last lap.
        """
        _wait()
        steps, samples = self._state.iteration - self._iteration, self._state.consumed_samples - self._samples
        if steps < 1:
            raise RuntimeError(
                f"no step was taken since the last lap, from iteration {self._iteration} to {self._state.iteration}: "
                "call lap after a step, and make a new StepTimer when the run has gone back to a checkpoint"
            )
        seconds = (time.perf_counter() - self._start) / steps
        joules = (self._energy() - self._start_joules) / steps
        ranks = from_all_ranks((seconds, joules, *_memory()), self._state.groups)
        times, energies, *memory = zip(*ranks, strict=True)
        slowest = max(times)
        tokens = samples / steps * self._sequence_length / slowest
        record: Record = {"iteration-time": slowest}
        if len(ranks) > 1:
            record |= zip(SPREAD, (min(times), median(times), slowest), strict=True)
        record |= {"tokens-per-second": tokens, "tokens-per-second/gpu": tokens / len(ranks)}
        if self._flops_per_token is not None:
            record["throughput"] = self._flops_per_token * tokens / len(ranks) / 1e12
            if self._peak_tflops is not None:
                record["mfu"] = record["throughput"] / self._peak_tflops
        if min(energies) > 0:
            energy = sum(energies) / len(ranks)
            record |= {"iter-energy/gpu": energy, "power/gpu": energy / slowest}
        record |= zip(MEMORY, map(max, memory), strict=False)
        self._begin()
        return record

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """What happens inside, evaluation or a checkpoint, does not count. Waits for the GPU."""
        _wait()
        seconds, joules = time.perf_counter() - self._start, self._energy() - self._start_joules
        try:
            yield
        finally:
            _wait()
            self._start, self._start_joules = time.perf_counter() - seconds, self._energy() - joules


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory() -> list[int]:
    """This rank's, in bytes, in the order of `MEMORY`; the GPU's where there is one."""
    values = [psutil.Process().memory_info().rss]
    if torch.cuda.is_available():
        values += [torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    return values


def _energy_meter() -> Callable[[], float]:
    """A function that returns the joules this rank's GPU has taken so far; 0 where NVML does not tell.

    mcore's `EnergyMonitor` sums over the default process group, and asks NVML by an index that CUDA_VISIBLE_DEVICES
    changes.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return lambda: 0.0
    if not torch.cuda.is_available():
        return lambda: 0.0
    try:
        nvml.nvmlInit()
        uuid: Any = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:  # a part of a chip (MIG), or one that does not count
        return lambda: 0.0
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
