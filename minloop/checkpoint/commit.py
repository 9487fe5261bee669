"""How a checkpoint comes to its name: at every instant a complete one has one, and `latest_checkpoint` finds it."""

import shutil
from pathlib import Path

from minloop.checkpoint import lock
from minloop.checkpoint.directory import REPLACED, TRACKER, UNFINISHED, missing_parts
from minloop.checkpoint.durable import DELETED, delete, sync, write_durably
from minloop.checkpoint.megatron_bridge import LATEST_TRAIN_STATE, TRAIN_STATE


def begin(final: Path) -> Path:
    """Create, empty, and return the directory that is written before it becomes `final`. On one rank.

    What earlier saves that were cut short left in the same place is removed.

    Raises:
        OSError: the place cannot be written.
        RuntimeError: another run writes there.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    lock.hold(final.parent)
    for leftover in final.parent.glob("iter_*"):
        if leftover.name.endswith((UNFINISHED, DELETED)):
            shutil.rmtree(leftover)
    unfinished = final.with_name(final.name + UNFINISHED)
    unfinished.mkdir()
    return unfinished


def commit(unfinished: Path, final: Path, iteration: int) -> None:
    """Give a finished save its final name, then point the tracker at it. On one rank.

    All files are on the disk before the rename, the rename before the tracker, and a checkpoint of the same iteration
    keeps a name that `latest_checkpoint` knows until the new one has its own.
    """
    sync(unfinished)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        if missing_parts(final):
            delete(final)
        else:
            if replaced.exists():
                delete(replaced)
            final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    write_durably(final.parent / TRACKER, str(iteration))
    if (latest := final.parent / LATEST_TRAIN_STATE).is_file():  # of a run that Megatron-Bridge began
        write_durably(latest, (final / TRAIN_STATE).read_bytes())
    if replaced.exists():
        delete(replaced)
