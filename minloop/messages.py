"""Saying a thing once, on one rank; and keeping quiet what mcore says about choices minloop makes for the user."""

import contextlib
import logging
import warnings
from collections.abc import Generator

import torch.distributed

logger = logging.getLogger("minloop")
_said: set[str] = set()


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log `message` by the logger "minloop": on global rank 0 only, once a process."""
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if first_rank and message not in _said:
        _said.add(message)
        logger.log(level, message)


@contextlib.contextmanager
def without_log_lines(logger_name: str, phrase: str) -> Generator[None]:
    """While inside, drop the log records of one logger whose message contains `phrase`."""

    def keep(record: logging.LogRecord) -> bool:
        return phrase not in record.getMessage()

    target = logging.getLogger(logger_name)
    target.addFilter(keep)
    try:
        yield
    finally:
        target.removeFilter(keep)


@contextlib.contextmanager
def without_warnings() -> Generator[None]:
    """While inside, drop Python warnings: for calls into mcore and torch whose warnings no user can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
