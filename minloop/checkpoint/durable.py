"""Writing and deleting such that a crash at any instant leaves the old state or the new one, on the disk itself."""

import os
import shutil
from pathlib import Path

DELETED = ".deleted"
"""Ends the name of what is being deleted: it is renamed first, so that no half of it can be taken for the whole."""


def sync(path: Path) -> None:
    """Have the content of a file, or the names in a directory, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str | bytes) -> None:
    """Write or replace a small file; a reader sees the old content or the new."""
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def delete(directory: Path) -> None:
    """Delete a directory; cut short, what is left of it has another name."""
    condemned = directory.with_name(directory.name + DELETED)
    if condemned.exists():
        shutil.rmtree(condemned)
    directory.rename(condemned)
    shutil.rmtree(condemned)
