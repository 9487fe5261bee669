"""Profiles of a few steps of a run, on the ranks that were asked."""

import contextlib
import os
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ProfilerActivity, profile, record_function

from minloop.messages import logger, say_once
from minloop.state import TrainState

TABLE_ROWS = 30
SNAPSHOT_ENTRIES = 1_000_000


@contextlib.contextmanager
def profiled_steps(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    steps: range,
    ranks: Collection[int] = (0,),
    tool: Literal["torch", "nsys"] = "torch",
) -> Generator[Callable[[], None]]:
    """Yield a function to be called before every step, which profiles those of `steps`; others it leaves alone.

    With torch's profiler each rank writes into `directory` ``rankN.trace.json`` (Chrome's format, for
    ui.perfetto.dev), ``rankN.kernels.txt``, a table of what took longest, and with a GPU ``rankN.memory.pickle``, every
    allocation and its stack, for docs.pytorch.org/memory_viz. With nsys it writes nothing but marks the window and the
    names for ``nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop ...``. Each step is a range called
    "iteration N" in both. A file that cannot be written is named in a warning, and training goes on.

    Args:
        steps: of which iterations, by the value that `state.iteration` has before the step: ``range(10, 12)``.
        ranks: global ranks to be profiled.
    Raises:
        ValueError: an unknown tool, tool="nsys" without a GPU, or a rank outside the world.
    """
    if tool not in ("torch", "nsys"):
        raise ValueError(f"tool {tool!r} is neither 'torch' nor 'nsys'")
    if tool == "nsys" and not torch.cuda.is_available():
        raise ValueError("tool='nsys' profiles a GPU, and there is none: use tool='torch'")
    if wrong := [rank for rank in ranks if rank not in range(dist.get_world_size())]:
        raise ValueError(f"ranks {wrong} are none of this run's, which are 0 to {dist.get_world_size() - 1}")
    rank, window, profiled = dist.get_rank(), contextlib.ExitStack(), False
    to_come = any(step >= state.iteration for step in steps)  # in a resumed run they may lie behind
    step = contextlib.ExitStack()

    def before_step() -> None:
        nonlocal profiled
        step.close()
        if rank not in ranks or state.iteration not in steps:
            window.close()
            return
        if not profiled:
            profiled = True
            window.enter_context(_torch_window(Path(directory), rank) if tool == "torch" else _nsys_window())
        step.enter_context(record_function(f"iteration {state.iteration}"))

    try:
        yield before_step
    finally:
        step.close()
        window.close()
        if not profiled and to_come and rank in ranks:
            say_once(f"nothing was profiled: the run came by no step of {steps}")


@contextlib.contextmanager
def _torch_window(directory: Path, rank: int) -> Generator[None]:
    path = directory / f"rank{rank}"
    on_gpu = torch.cuda.is_available()
    memory: Any = torch.cuda.memory
    if on_gpu:
        memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    try:
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        _write(f"{path}.trace.json", profiler.export_chrome_trace)
        order = f"self_{'cuda' if on_gpu else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS, max_name_column_width=80)
        _write(f"{path}.kernels.txt", lambda file: Path(file).write_text(table))
        if on_gpu:
            _write(f"{path}.memory.pickle", memory._dump_snapshot)
    finally:
        if on_gpu:
            memory._record_memory_history(enabled=None)


def _write(path: str, write: Callable[[str], object]) -> None:
    """Write one file whole or not at all: a full disk is no reason to end the run."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
        write(path)
        if not Path(path).exists():  # the library below torch says nothing of a full disk
            raise OSError("torch's profiler left no file: is the disk full?")
    except (OSError, RuntimeError) as error:
        for part in (path, f"{path}.tmp"):
            with contextlib.suppress(OSError):
                Path(part).unlink()
        logger.warning("%s could not be written, training goes on without it: %s", path, error)


@contextlib.contextmanager
def _nsys_window() -> Generator[None]:
    configure_nvtx_profiling(True)  # mcore's own ranges
    try:
        with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx(record_shapes=True):
            yield
            torch.cuda.synchronize()
    finally:
        configure_nvtx_profiling(False)
