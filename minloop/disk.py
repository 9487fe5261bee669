"""What holds of files whatever ends the process: writes that are whole or not there, and locks that are never stale.

Locks are the system's own on open files, and go with the process: one run writes into a directory or a log, and a
checkpoint that a living run loaded last is not deleted.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import weakref
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from minloop.messages import say_once

DELETED = ".deleted"
"""Ends the name of what is being deleted: it is renamed first, so that no half of it can be taken for the whole."""
LOCK = ".lock"
"""In a directory of checkpoints: who writes there. The file itself stays; deleting it would let two runs in."""

_locks: "WeakValueDictionary[Path, Lock]" = WeakValueDictionary()
_of_runs: "WeakKeyDictionary[Any, dict[Path, Lock | None]]" = WeakKeyDictionary()
"""Default group → the lock files of directories that are held for it; None where another of its ranks holds one."""
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


class Lock:
    """A lock file of this process's, until this object goes or the process ends.

    Locks of this kind (`fcntl.lockf`) belong to the process, so worker processes forked from it do not prolong them.
    Within a process they exclude nobody, and go with the first descriptor of the file that is closed: see `lock`.
    """

    def __init__(self, path: Path, what: Path, instead: str) -> None:
        self.path, self.file = path, path.open("a+")
        self.file.seek(0)
        owner, me = self.file.read(), f"process {os.getpid()} on {socket.gethostname()}"
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.file.close()
            raise RuntimeError(
                f"another run writes into {what}: {owner or 'a process'} holds its lock; wait until it ends, stop it, "
                f"or {instead}"
            ) from None
        except OSError as error:
            say_once(f"{what} lies on a file system without locks ({error}): let no two runs write into it")
        if owner and not owner.endswith(f" on {socket.gethostname()}"):
            say_once(
                f"{what} was being written by {owner}, which did not end in order: if it still runs, this file "
                "system's locks do not reach other machines, and the two must not both write into it"
            )
        self.file.truncate(0)
        self.file.write(me)
        self.file.flush()
        weakref.finalize(self, _release, self.file, os.getpid())

    def is_there(self) -> bool:
        """Whether its path still leads to the file that is held; a removed one is of no use to others."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _release(file: IO[str], process: int) -> None:
    with contextlib.suppress(OSError), file:
        if process == os.getpid():
            file.truncate(0)


def lock(path: Path, what: Path, *, instead: str) -> Lock:
    """Keep other processes from writing into `what`, by the lock file `path`, as long as any answer for it lives.

    Raises:
        RuntimeError: another process holds it; the message names both, and what to do `instead`.
    """
    path = path.resolve()
    held = _locks.get(path)
    if held is None or not held.is_there():
        held = _locks[path] = Lock(path, what, instead)
    return held


def hold(directory: Path) -> None:
    """Make `directory`; keep it for this run until its process group is destroyed or its process ends. On one rank.

    Raises:
        RuntimeError: another run holds it, or what this run held was removed since.
    """
    path = (directory / LOCK).resolve()
    for locks in _of_runs.values():
        if path in locks:
            if (held := locks[path]) and not held.is_there():
                raise RuntimeError(
                    f"{directory} was removed or replaced while this run used it (its {LOCK} is not the one that this "
                    "run holds): checkpoints that it held are gone; save into another directory, or start again"
                )
            return
    directory.mkdir(parents=True, exist_ok=True)
    _of_runs.setdefault(dist.group.WORLD, {})[path] = lock(path, directory, instead="save into another directory")


def know_held(directory: Path) -> None:
    """Note on every rank that the first one holds `directory`: a save of others of the run alone is let in."""
    _of_runs.setdefault(dist.group.WORLD, {}).setdefault((directory / LOCK).resolve(), None)


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
