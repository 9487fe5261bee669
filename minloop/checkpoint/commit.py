"""How a checkpoint comes to its name and old ones go: at every instant `latest_checkpoint` finds a complete one."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from minloop.checkpoint.directory import REPLACED, TRACKER, UNFINISHED, complete_checkpoints, missing_parts
from minloop.checkpoint.foreign import foreign_format
from minloop.checkpoint.megatron_bridge import LATEST_TRAIN_STATE, TRAIN_STATE
from minloop.disk import DELETED, delete, hold, is_in_use, remove, sync, write_durably
from minloop.messages import logger


def begin(final: Path) -> Path:
    """Create, empty, and return the directory that is written before it becomes `final`. On one rank.

    What earlier saves that were cut short left in the same place is removed.

    Raises:
        OSError: the place cannot be written.
        RuntimeError: another run writes there, or the directory was removed since this one did; a checkpoint of
            another format has the name.
    """
    hold(final.parent)
    if final.is_dir() and missing_parts(final) and (said := foreign_format(final)):
        raise RuntimeError(f"{final} {said}, and would be lost: save into another directory")
    for leftover in final.parent.glob("iter_*"):
        if leftover.name.endswith((UNFINISHED, DELETED)):
            remove(leftover)
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
    if os.path.lexists(final):
        if missing_parts(final):
            delete(final)
        else:
            if os.path.lexists(replaced):
                delete(replaced)
            final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    write_durably(final.parent / TRACKER, str(iteration))
    if (latest := final.parent / LATEST_TRAIN_STATE).is_file():  # of a run that Megatron-Bridge began
        write_durably(latest, (final / TRAIN_STATE).read_bytes())
    if os.path.lexists(replaced):
        _try_to_delete(replaced)


def _try_to_delete(checkpoint: Path) -> None:
    """Delete an old checkpoint; if that fails, say so: the new one is there all the same."""
    try:
        delete(checkpoint)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", checkpoint, error)


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_newest` checkpoints, and those whose iteration is a multiple of `keep_every`.

    Raises:
        ValueError: no whole numbers of at least 1, or `keep_every` alone.
    """

    keep_newest: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: a whole number of at least 1, or None to keep all")
        if self.keep_every is not None and self.keep_newest is None:
            raise ValueError(f"keep_every={self.keep_every} without keep_newest: nothing would be deleted; set both")

    def after_update(self, iteration: int, *values: torch.Tensor) -> Self:
        """What holds after an update whose loss and gradient norm were `values`: if one is NaN or Inf, keep all.

        Weights that it has ruined are no reason to delete good ones. Waits for the GPU, as the save does anyway.
        """
        if all(math.isfinite(value) for value in values):
            return self
        logger.warning(
            "iteration %d: loss and gradient norm of the last update were %s: weights saved now may be ruined, and no "
            "earlier checkpoint is deleted. Go back to one, and pass guard=FaultGuard() to train_step: it stops before "
            "a weight changes",
            iteration,
            ", ".join(f"{float(value):g}" for value in values),
        )
        return type(self)()

    def apply(self, checkpoints: Path, iteration: int) -> None:
        """After the checkpoint of `iteration` is committed, delete complete older ones beyond what is to be kept.

        What is later than `iteration` (of a run that was taken up again from an earlier one), incomplete, or in use is
        left alone. A checkpoint that cannot be deleted is named in a warning: the new one is there all the same.
        """
        if self.keep_newest is None:
            return
        complete = complete_checkpoints(checkpoints)
        older = [(number, path) for number, path in complete.items() if number < iteration]
        for number, path in older[self.keep_newest - 1 :]:
            if (self.keep_every and number % self.keep_every == 0) or is_in_use(path):
                continue
            _try_to_delete(path)
