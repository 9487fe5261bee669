"""Which checkpoints are kept."""

from dataclasses import dataclass
from pathlib import Path

from minloop.checkpoint import directory
from minloop.checkpoint.durable import delete
from minloop.checkpoint.lock import is_in_use
from minloop.messages import logger


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_newest` checkpoints, and those whose iteration is a multiple of `keep_every`.

    Raises:
        ValueError: numbers below 1, or `keep_every` alone.
    """

    keep_newest: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: at least 1, or None to keep all")
        if self.keep_every is not None and self.keep_newest is None:
            raise ValueError(f"keep_every={self.keep_every} without keep_newest: nothing would be deleted; set both")

    def apply(self, checkpoints: Path, iteration: int) -> None:
        """After the checkpoint of `iteration` is committed, delete complete older ones beyond what is to be kept.

        What is later than `iteration` (of a run that was taken up again from an earlier one), incomplete, or in use is
        left alone. A checkpoint that cannot be deleted is named in a warning: the new one is there all the same.
        """
        if self.keep_newest is None:
            return
        complete = directory.complete_checkpoints(checkpoints)
        older = [(number, path) for number, path in complete.items() if number < iteration]
        for number, path in older[self.keep_newest - 1 :]:
            if (self.keep_every and number % self.keep_every == 0) or is_in_use(path):
                continue
            try:
                delete(path)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", path, error)
