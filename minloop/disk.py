"""What holds of files whatever ends the process: writes that are whole or not there, and locks that are never stale.

Locks are the system's own on open files, and go with the process: one run writes into a directory, and a checkpoint
that a living run loaded last is not deleted.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import weakref
from pathlib import Path
from typing import IO

import torch.distributed as dist

from minloop.messages import say_once

DELETED = ".deleted"
"""Ends the name of what is being deleted: it is renamed first, so that no half of it can be taken for the whole."""
LOCK = ".lock"
"""In a directory of checkpoints: who writes there. The file itself stays; deleting it would let two runs in."""

_held: dict[Path, IO[str]] = {}
_in_use: list[IO[bytes]] = []


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


def remove(path: Path) -> None:
    """Remove a directory with all in it, a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def delete(directory: Path) -> None:
    """Delete a directory or a link to one; cut short, what is left of it has another name."""
    condemned = directory.with_name(directory.name + DELETED)
    if os.path.lexists(condemned):
        remove(condemned)
    directory.rename(condemned)
    remove(condemned)


def hold(directory: Path) -> None:
    """Keep `directory` for this run until its process group is destroyed or its process ends. On one rank only.

    Locks of this kind (`fcntl.lockf`) belong to the process, so worker processes forked from it do not prolong them.

    Raises:
        RuntimeError: another run holds it.
    """
    path = (directory / LOCK).resolve()
    if path in _held and path.exists() and os.path.samestat(path.stat(), os.fstat(_held[path].fileno())):
        return
    file = path.open("a+")
    file.seek(0)
    owner, me = file.read(), f"process {os.getpid()} on {socket.gethostname()}"
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise RuntimeError(
            f"another run writes into {directory}: {owner or 'a process'} holds its lock; wait until it ends, stop it, "
            "or save into another directory"
        ) from None
    except OSError as error:
        say_once(f"{directory} lies on a file system without locks ({error}): let no two runs save into it")
    if owner and not owner.endswith(f" on {socket.gethostname()}"):
        say_once(
            f"{directory} was being written by {owner}, which did not end in order: if it still runs, this file "
            "system's locks do not reach other machines, and the two must not save into one directory"
        )
    file.truncate(0)
    file.write(me)
    file.flush()
    _held[path] = file
    weakref.finalize(dist.group.WORLD, _release, path, os.getpid())


def _release(path: Path, process: int) -> None:
    if process == os.getpid() and (file := _held.pop(path, None)):
        with contextlib.suppress(OSError), file:
            file.truncate(0)


def mark_in_use(checkpoint: Path) -> None:
    """Keep other runs and this one from deleting `checkpoint`, until another is marked or the process ends."""
    with contextlib.suppress(OSError):
        file = (checkpoint / "metadata.json").open("rb")
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _in_use[:] = [file]


def is_in_use(checkpoint: Path) -> bool:
    """Whether a process has marked `checkpoint`. Machines that share a file system without locks do not see it."""
    try:
        with (checkpoint / "metadata.json").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
