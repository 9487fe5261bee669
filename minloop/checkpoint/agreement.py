"""What ranks do together: a fault of one, its file's or its disk's, is one error on all, and leaves none waiting.

Every function here is called by every rank of a group, by default the default group, and runs a block or an action that
has no collectives of its own.
"""

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
def agreed(group: dist.ProcessGroup | None = None, kinds: dict[str, type[Exception]] = KINDS) -> Generator[None]:
    """Run a block; if it fails on any rank, raise one error, naming that rank, on every rank.

    The error of the first rank that has one stands for all.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    report = None if error is None else (type(error).__name__, str(error))
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    if error is not None and kinds and reports == [report] * len(reports):
        raise error
    ranks = (
        f"rank {failed[0]}" if len(failed) == 1 else f"{len(failed)} of {len(reports)} ranks, first rank {failed[0]}"
    )
    raise _error(reports[failed[0]], kinds, f"on {ranks}: ") from error


def is_first(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is the group's first rank; threads may ask, too, while `as_the_world` numbers ranks anew."""
    return (dist.get_rank() if group is None else group.rank()) == 0


def together[T](action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `action` on every rank; return all ranks' results on the group's first rank, an empty list on the others.

    Raises:
        RuntimeError: on every rank, if `action` failed on any.
    """
    result: Any = None
    with agreed(group, kinds={}):
        result = action()
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if is_first(group) else None
    dist.gather_object(result, gathered, group_dst=0, group=group)
    return gathered or []


def from_first_rank[T](
    action: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    kinds: dict[str, type[Exception]] = KINDS,
) -> T:
    """Return on every rank what `action` returns on the group's first rank, or raise what it raises."""
    outcome: list[Any] = [None]
    error: Exception | None = None
    if is_first(group):
        try:
            outcome[0] = (None, action())
        except Exception as caught:
            error = caught
            outcome[0] = ((type(error).__name__, str(error)), None)
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    report: Any
    value: Any
    report, value = outcome[0]
    if report is None:
        return value
    if error is not None and kinds:
        raise error
    raise _error(report, kinds, "" if kinds else "on rank 0: ") from error


def on_first_rank(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on the group's first rank while the others wait.

    Raises:
        RuntimeError: on every rank, if `action` failed.
    """

    def without_result() -> None:
        action()

    from_first_rank(without_result, group, kinds={})


def _error(report: tuple[str, str], kinds: dict[str, type[Exception]], where: str) -> Exception:
    name, text = report
    return kinds.get(name, RuntimeError)(where + (text if name in kinds else f"{name}: {text}"))
