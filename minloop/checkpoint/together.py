"""What all ranks do together: if it fails on one, it fails on every one, with one message that names the rank."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

MOST_NAMED = 3
"""Ranks whose errors a message gives in full: a full disk fails on all of them."""


def together[T](action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `action` on every rank; return all ranks' results on global rank 0, and an empty list on the others.

    Args:
        group: a group of all ranks, by default the default group.
    Raises:
        RuntimeError: on every rank, if `action` failed on any.
    """
    result = cause = None
    try:
        result = action()
    except Exception as error:
        cause = error
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((result, _named(cause)), gathered, dst=0, group=group)
    failures = [f"on rank {rank}: {error}" for rank, (_, error) in enumerate(gathered or []) if error]
    _raise_everywhere(failures, cause, group)
    return [value for value, _ in gathered or []]


def on_first_rank(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on global rank 0 while the others wait; if it fails, it fails on every rank."""
    cause = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            cause = error
    _raise_everywhere([f"on rank 0: {_named(cause)}"] if cause else [], cause, group)


def _named(error: Exception | None) -> str | None:
    return f"{type(error).__name__}: {error}" if error else None


def _raise_everywhere(failures: list[str], cause: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise what global rank 0 knows of, if anything, on every rank."""
    if more := failures[MOST_NAMED:]:
        failures = [*failures[:MOST_NAMED], f"and on {len(more)} other ranks"]
    verdict: list[Any] = ["; ".join(failures)]
    dist.broadcast_object_list(verdict, src=0, group=group)
    if verdict[0]:
        raise RuntimeError(verdict[0]) from cause
