"""Process groups end: destroyed by who made them, or useless once a rank has left the others midway.

Both are known on each rank by itself: no rank is asked, as one that has failed answers nobody.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

c10d: Any = dist.distributed_c10d  # which alone knows the groups there are

LOST = ("/gloo/", "Application timeout caused pair closure")
"""Words of gloo's errors, which are plain RuntimeErrors; NCCL's and the store's have types."""

lost: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""A layout's `tp_dp_cp` group → why the layout's groups cannot be used any more."""


@contextlib.contextmanager
def destroyed_by(undo: contextlib.ExitStack) -> Generator[None]:
    """Let `undo` destroy the groups that are made inside, the last one first, even if making one fails."""
    before = set(c10d._world.pg_map)
    try:
        yield
    finally:
        made = [group for group in c10d._world.pg_map if group not in before]
        for reference in map(weakref.ref, made):  # a host that ends them itself is not to be kept from it
            undo.callback(_destroy, reference)


def _destroy(reference: weakref.ref[dist.ProcessGroup]) -> None:
    if (group := reference()) is not None:
        destroy(group)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group, unless it went with the default group."""
    if group in c10d._world.pg_map:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def usable(groups: ProcessGroupCollection) -> Generator[None]:
    """Say in words that the groups are of no use: they are gone, or inside or earlier this rank lost others.

    Raises:
        RuntimeError: so it is; the cause is the error of gloo, NCCL or the store.
    """
    key: Any = groups.tp_dp_cp
    if key not in c10d._world.pg_map:
        raise RuntimeError(
            "the process groups were destroyed, by shutdown_distributed or by the host: make groups anew, build model, "
            "optimizer and training state on them, and load a checkpoint"
        )
    if key in lost:
        raise RuntimeError(lost[key])
    try:
        yield
    except RuntimeError as error:
        said = str(error) in lost.values()
        if said or not (isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)):
            raise
        what, _, _ = str(error).partition("\n")
        lost[key] = (
            f"rank {dist.get_rank()} lost other ranks ({what}): one of them raised an error of its own, was given "
            "other calls or arguments, hung or ended, while this one waited for it. These groups cannot be used again: "
            "end the processes, or on every rank call shutdown_distributed(), make groups, model and training state "
            "anew, and load a checkpoint"
        )
        raise RuntimeError(lost[key]) from error


def on_usable_groups[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Run a function, whose first argument is a training state, inside `usable`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        state: Any = args[0] if args else kwargs["state"]
        with usable(state.groups):
            return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def left_midway(groups: ProcessGroupCollection) -> Generator[None]:
    """Note on an error that this rank raises inside, while others may wait for it, what becomes of them."""
    try:
        yield
    except Exception as error:
        if groups.tp_dp_cp.size() * groups.pp.size() > 1:
            error.add_note(
                f"Rank {dist.get_rank()} left a step midway. Unless every rank raises, too, others wait for it until "
                "their time-out, and the groups cannot be used again."
            )
        raise
