"""Where records go: the console, a JSONL file, TensorBoard, Weights & Biases, a progress bar.

Each of these is a plain function of one record, `step_record(...)`, `evaluation_record(...)` or a dict of your own with
"iteration" and "consumed-samples". Make and call them on one rank, the first (`is_first_rank`). Without them nothing is
said.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from minloop.metrics import OF_THE_MACHINE, OF_THE_RUN, Record, record_line

Sink = Callable[[Record], None]


_print = partial(print, flush=True)  # a killed run's last lines are to be in its file


def console_sink(*, train_iters: int, write: Callable[[str], object] = _print) -> Sink:
    """Return a sink that writes one line in Megatron-LM's form.

    Args:
        train_iters: iterations of the whole run.
        write: takes the line: `print`, at once also into a file, or such as ``logging.getLogger("run").info``.
    """

    def sink(record: Record) -> None:
        write(record_line(record, train_iters=train_iters))

    return sink


def jsonl_sink(path: str | os.PathLike[str], *, iteration: int = 0) -> Sink:
    """Return a sink that appends one JSON object per record to a file, which is up to date after every one.

    Each has the "time" in seconds since 1970 besides the record's numbers; nan and inf, which JSON lacks, are null.

    Args:
        iteration: how far the run has come, `state.iteration` once its checkpoint is loaded. What an earlier process
            logged of later iterations will be logged again: its lines move to a file PATH.superseded.
    Raises:
        ValueError: the file holds something else than such records.
    """
    path = Path(path)
    if path.exists():
        _supersede(path, iteration)
    path.parent.mkdir(parents=True, exist_ok=True)

    def sink(record: Record) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        with path.open("a") as file:
            file.write(json.dumps({"time": time.time(), **values}, default=float) + "\n")

    return sink


def _supersede(path: Path, iteration: int) -> None:
    data, kept = path.read_bytes(), 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):  # the process was killed while writing
            break
        try:
            later = json.loads(line)["iteration"] > iteration
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number} is no record with an iteration: choose another file") from None
        if later:
            break
        kept += len(line)
    if rest := data[kept:]:
        with path.with_name(f"{path.name}.superseded").open("ab") as file:
            file.write(rest.removesuffix(b"\n") + b"\n")
        os.truncate(path, kept)


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
    """

    def sink(record: Record) -> None:
        values = {name: value for name, value in record.items() if name != "iteration"}
        run.log(values, step=int(record["iteration"]))

    return sink


@contextlib.contextmanager
def progress_bar(*, train_iters: int) -> Generator[Sink]:
    """Yield a sink that draws how far the run is, by rich; it does nothing where stderr is no terminal.

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
        task = bar.add_task("training", total=train_iters, said="")

        def sink(record: Record) -> None:
            said = [f"{name} {record[name]:.4g}" for name in ("lm loss", "tokens-per-second") if name in record]
            bar.update(task, completed=int(record["iteration"]), said=", ".join(said))

        yield sink
