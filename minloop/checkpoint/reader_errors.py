"""Errors of the process that reads: they tell nothing of the file, which may be sound.

Taken for damage, they would let a run go on from an older checkpoint, or begin anew, because a limit was too low.
"""

import errno
from pathlib import Path

import torch

OF_THE_READER = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Missing rights, too many open files, no memory; a file that is missing or a broken disk is none of them."""


def is_of_the_reader(error: Exception) -> bool:
    """Whether an error says that a file cannot be read here and now, and nothing of the file."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, OSError) and error.errno in OF_THE_READER
    )


def name_file(error: Exception, file: Path) -> None:
    """Put the file's name into an error of the reader's, unless it has one."""
    if isinstance(error, OSError):
        error.filename = error.filename or str(file)
    elif str(file) not in str(error):
        error.args = (f"no memory to read {file}" + (f": {error}" if str(error) else ""),)
