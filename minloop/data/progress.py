"""How far a long run over files is, drawn on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any


@contextlib.contextmanager
def show_progress(title: str, total_bytes: int) -> Generator[Callable[[int, int], None]]:
    """Yield a function of (bytes read, documents written) that draws a bar, by rich and on a terminal only."""
    try:
        from rich import progress as rich
    except ImportError:
        rich: Any = None
    if rich is None or not sys.stderr.isatty():
        yield lambda read, documents: None
        return
    from rich.console import Console

    columns = (
        rich.TextColumn(title), rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(),
        rich.TextColumn("{task.fields[rate]:,.0f} documents/s"), rich.TimeRemainingColumn(),
    )  # fmt: skip
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes, rate=0.0)
        first: list[int] = []  # documents of an earlier run, which this one did not write

        def update(read: int, documents: int) -> None:
            first[:] = first or [documents]
            elapsed = bar.tasks[0].elapsed or 1.0
            bar.update(task, completed=read, rate=(documents - first[0]) / elapsed)

        yield update
