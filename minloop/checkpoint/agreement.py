"""Errors that all ranks learn of: a fault of one rank's file must not leave the others in a collective."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from minloop.checkpoint.reading import CheckpointError

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointError, FileNotFoundError, ValueError, RuntimeError)
}
"""Errors that keep their type on the other ranks; any other becomes a RuntimeError there."""


@contextmanager
def agreed() -> Generator[None]:
    """Run a block without collectives; if it fails on any rank, raise one error, naming that rank, on every rank.

    Every rank of the default group must come here. The error of the first rank that has one stands for all.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    report = None if error is None else (type(error).__name__, str(error))
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    if error is not None and reports == [report] * len(reports):
        raise error
    name, text = reports[failed[0]]
    ranks = (
        f"rank {failed[0]}" if len(failed) == 1 else f"{len(failed)} of {len(reports)} ranks, first rank {failed[0]}"
    )
    text = text if name in KINDS else f"{name}: {text}"
    raise KINDS.get(name, RuntimeError)(f"on {ranks}: {text}") from error


def from_first_rank[T](action: Callable[[], T]) -> T:
    """Return on every rank what `action`, without collectives, returns on global rank 0, or raise what it raises."""
    outcome: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = (None, action())
        except Exception as caught:
            error = caught
            outcome[0] = ((type(error).__name__, str(error)), None)
    dist.broadcast_object_list(outcome, src=0)
    report: Any
    value: Any
    report, value = outcome[0]
    if report is None:
        return value
    if error is not None:
        raise error
    name, text = report
    raise KINDS.get(name, RuntimeError)(text if name in KINDS else f"{name}: {text}")
