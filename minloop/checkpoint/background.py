"""A save that goes on beside training: a thread of every rank, and a process group for these threads alone."""

import atexit
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop import distributed
from minloop.alive import destroy
from minloop.groups import new_group, spans_the_world

TIMEOUT = timedelta(hours=1)
"""How long one rank's thread waits for another that still writes, in a group that a host made; else the time-out given
to `init_distributed` holds. A rank that died is noticed at once."""

_groups: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()
_in_flight: "list[PendingSave]" = []


class PendingSave:
    """A save under way in the background, from `start_save`; at most one in a process.

    It commits itself when all ranks have written, without any of them asking; a process that ends normally ends after
    it. If it fails, one rank logs an ERROR at once, and `wait`, the next save or `shutdown_distributed` raises: a
    process that calls none of them ends with exit code 0 all the same, as no thread can change that. On the CPU or with
    a GPU it is a thread of this process, which runs no CUDA, and whose collectives are on a gloo group of their own.

    Attributes:
        directory: where the checkpoint will be.
    """

    def __init__(self, directory: Path, finish: Callable[[], None]) -> None:
        self.directory = directory
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"minloop save of {directory.name}")
        _in_flight.append(self)
        self._thread.start()

    def _run(self) -> None:
        assert self._finish is not None
        try:
            self._finish()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # of the plan and the group
            self._error = error
        self._finish = None  # and with it the plan

    def done(self) -> bool:
        """Whether the save has ended on this rank, well or not. Other ranks may see that a little later or earlier."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end of the save; return its directory. Every rank calls it.

        Raises:
            RuntimeError: on every rank, if the save failed on any; earlier checkpoints are as they were.
        """
        self._thread.join()
        if self in _in_flight:
            _in_flight.remove(self)
        if self._error is not None:
            raise RuntimeError(f"{self.directory} was not saved: {self._error}") from self._error
        return self.directory


def wait_for_pending() -> None:
    """Wait for the save in flight, if any; raise its error, unless `wait` has."""
    for pending in [*_in_flight]:
        pending.wait()


def group_of_threads(groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """A gloo group of all ranks of the layout that training never uses; made on the first call, by all of them."""
    whole: Any = dist.group.WORLD if spans_the_world(groups) else groups.intra_dist_opt
    if whole not in _groups:
        timeout = distributed.timeouts.get(whole, TIMEOUT)
        if whole is dist.group.WORLD:
            _groups[whole] = cast("Any", dist.new_group(backend="gloo", timeout=timeout))
        else:
            _groups[whole] = new_group(tuple(dist.get_process_group_ranks(whole)), timeout, "gloo")
        distributed.created.callback(wait_for_pending)  # before `shutdown_distributed` destroys the group
        atexit.register(_destroy_groups)
    return _groups[whole]


def _destroy_groups() -> None:
    """Join gloo's threads while Python is whole, of a process that ends without `shutdown_distributed`.

    In PyTorch 2.11 one that lets go of its last collective's tensors later aborts the process.
    """
    while _groups:
        destroy(_groups.popitem()[1])
