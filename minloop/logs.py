"""Where records go: the console, a JSONL file, TensorBoard, Weights & Biases, a progress bar.

Each of these is a plain function of one record, `step_record(...)`, `evaluation_record(...)` or a dict of your own with
"iteration" and "consumed-samples". Make and call them on one rank, the first (`is_first_rank`). Without them nothing is
said.
"""

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from minloop.disk import Lock, lock, write_durably
from minloop.messages import logger
from minloop.metrics import OF_THE_MACHINE, OF_THE_RUN, Record, record_line

Sink = Callable[[Record], None]

_locks: WeakKeyDictionary[Sink, Lock] = WeakKeyDictionary()
"""Sink → the lock that is kept as long as it lives."""

_print = partial(print, flush=True)  # a killed run's last lines are to be in its file


def console_sink(
    *, train_iters: int | None = None, train_samples: int | None = None, write: Callable[[str], object] = _print
) -> Sink:
    """Return a sink that writes one line in Megatron-LM's form.

    Args:
        train_iters, train_samples: of the whole run; the one that is known, by samples while the batch size grows.
        write: takes the line: `print`, at once also into a file, or such as ``logging.getLogger("run").info``.
    """

    def sink(record: Record) -> None:
        _require_numbers(record, "console_sink")
        write(record_line(record, train_iters=train_iters, train_samples=train_samples))

    return sink


def _require_numbers(record: Record, sink: str) -> None:
    for name, value in record.items():
        if not hasattr(value, "__float__"):
            raise ValueError(f"{sink}: {name!r} of the record is {value!r}, but records hold numbers: leave it out")


def jsonl_sink(path: str | os.PathLike[str], *, iteration: int = 0) -> Sink:
    """Return a sink that appends one JSON object per record to a file, which is up to date after every one.

    Each has the "time" in seconds since 1970 besides the record's numbers; nan and inf, which JSON lacks, are null.
    As long as a sink lives, other processes are refused the same file, by a lock PATH.lock that ends with this process.

    Args:
        iteration: how far the run has come, `state.iteration` once its checkpoint is loaded. What an earlier process
            logged of later iterations will be logged again: its lines move to a file PATH.superseded. So does a line
            that is no record, such as one half written to a full disk, with a warning.
    Raises:
        ValueError: the file holds something else than such records; or, by the sink, a record has no "iteration".
        RuntimeError: another process logs to the file.
    """
    path = Path(path).absolute()  # the process may go elsewhere
    path.parent.mkdir(parents=True, exist_ok=True)
    held = lock(path.with_name(f"{path.name}.lock"), path, instead="log to another file, on one rank")
    if path.exists():
        _supersede(path, iteration)

    def sink(record: Record) -> None:
        _require_numbers(record, "jsonl_sink")
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        if values.get("iteration") is None:
            raise ValueError(f"jsonl_sink: the record {record} has no finite 'iteration', by which a run goes on")
        _append(path, json.dumps({"time": time.time(), **values}, default=float).encode() + b"\n")

    _locks[sink] = held
    return sink


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:  # of a full disk: leave no half of a line for the next one to follow
            os.truncate(path, before)
            raise


def _supersede(path: Path, iteration: int) -> None:
    """Move what is later than `iteration`, and what is no record, aside."""
    lines = io.BytesIO(path.read_bytes()).readlines()
    there = [_iteration_of(line) for line in lines]
    if not any(number is not None for number in there) and any(line.endswith(b"\n") for line in lines):
        raise ValueError(f"{path}, line 1 is no record with an iteration, nor is any other: choose another file")
    end = next((place for place, number in enumerate(there) if number is not None and number > iteration), len(lines))
    broken = [place for place in range(end) if there[place] is None]
    kept = [line for line, number in zip(lines[:end], there, strict=False) if number is not None]
    rest = [*(lines[place] for place in broken), *lines[end:]]
    if not rest:
        return
    if in_midst := [place + 1 for place in broken if lines[place].endswith(b"\n")]:
        named = ", ".join(map(str, in_midst[:8])) + (", ..." if len(in_midst) > 8 else "")
        logger.warning("%s, line %s: no record with an iteration, moved to %s.superseded", path, named, path.name)
    with path.with_name(f"{path.name}.superseded").open("ab") as file:
        file.writelines(line.removesuffix(b"\n") + b"\n" for line in rest)
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
    else:
        write_durably(path.resolve(), b"".join(kept))


def _iteration_of(line: bytes) -> float | None:
    """The iteration of a record; None of what is none, such as a line that a killed process was writing."""
    try:
        number = json.loads(line)["iteration"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int | float) else None


def tensorboard_sink(directory: str | os.PathLike[str]) -> Sink:
    """Return a sink that writes TensorBoard's event files, with Megatron-LM's tags.

    What says how training does is drawn over iterations, and as "... vs samples" over samples. A run that goes on
    writes another file into the directory, and where both have an iteration TensorBoard draws the later one's.

    Raises:
        RuntimeError: the package tensorboard is missing.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(f"tensorboard_sink needs tensorboard ({error}): pip install minloop[logs]") from error
    writer: Any = SummaryWriter(os.fspath(directory))

    def sink(record: Record) -> None:
        _require_numbers(record, "tensorboard_sink")
        iteration, samples = int(record["iteration"]), int(record["consumed-samples"])
        for name, value in record.items():
            if name not in OF_THE_RUN:
                writer.add_scalar(name, value, iteration)
                if name not in OF_THE_MACHINE:
                    writer.add_scalar(f"{name} vs samples", value, samples)
        writer.flush()

    return sink


def wandb_sink(run: Any) -> Sink:
    """Return a sink that logs to a run of Weights & Biases, with Megatron-LM's names and the iteration as step.

    Args:
        run: what ``wandb.init(...)`` returned; ``mode="offline"`` needs no network. W&B keeps the first of what is
            logged twice of a step: ``wandb.init(resume_from=f"{run_id}?_step={state.iteration}")`` drops it instead.
    Raises:
        ValueError: `run` is no run.
    """
    if not callable(getattr(run, "log", None)):
        raise ValueError(f"wandb_sink({run!r}): give it the run that wandb.init(...) returned")

    def sink(record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "iteration"}
        run.log(values, step=int(record["iteration"]))

    return sink


@contextlib.contextmanager
def progress_bar(*, train_iters: int | None = None, train_samples: int | None = None) -> Generator[Sink]:
    """Yield a sink that draws how far the run is, by rich; it does nothing where stderr is no terminal.

    Args:
        train_iters, train_samples: length of the run, one of the two, by which the bar is drawn.
    Raises:
        RuntimeError: the package rich is missing, on a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda record: None
        return
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError as error:
        raise RuntimeError(f"progress_bar needs rich ({error}): pip install minloop[logs]") from error
    columns = (
        rich.TextColumn("training"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[said]}"),
    )  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        counter = "consumed-samples" if train_samples else "iteration"
        task = bar.add_task("training", total=train_samples or train_iters, said="")

        def sink(record: Record) -> None:
            said = [f"{name} {record[name]:.4g}" for name in ("lm loss", "tokens-per-second") if name in record]
            bar.update(task, completed=int(record[counter]), said=", ".join(said))

        yield sink
