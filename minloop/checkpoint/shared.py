"""Whether all ranks see one directory: asked before anything is written there or read, and answered within seconds.

A checkpoint is written by all ranks and read by others than wrote it, so a directory of each machine's own holds none.
"""

import hashlib
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from minloop.checkpoint.agreement import from_first_rank, is_first
from minloop.disk import hold, know_held

PATIENCE = 5.0  # seconds for what one machine has made to show on another
FOR_ALL = ("metadata.json", ".metadata", "integrity.json")  # files of a checkpoint that name all others and their bytes


def shared_directory(directory: str | Path) -> Path:
    """Make a directory, be sure that all ranks see the same one, keep it for this run, and return its path.

    Every rank of a run that will save there calls it, before it looks for a checkpoint: a run that finds its first save
    refused has trained for nothing, and one that asks `latest_checkpoint` on machines of which only some see the
    checkpoints would begin anew on the others. From here on, as from a first save, other runs are refused there until
    `shutdown_distributed` or the end of the process, however it comes; to call it again is nothing. A program that
    only reads needs no call, and is not hindered.

    Raises:
        RuntimeError: on every rank: rank 0 cannot write there, another run does, or some ranks see another directory,
            which are named.
    """
    path = Path(directory).absolute()

    def make() -> str:
        hold(path)
        return put_token(path)

    require_token(path / from_first_rank(make, kinds={}))
    know_held(path)
    return path


def put_token(directory: Path) -> str:
    """Make a file that can be seen where `directory` is this one alone; return its name. On one rank."""
    token = directory / f".seen-{secrets.token_hex(8)}"
    token.touch(exist_ok=False)
    return token.name


def require_token(token: Path) -> None:
    """Raise RuntimeError on every rank unless all see `token`; it is gone afterwards."""
    try:
        _require_same(
            token.parent,
            _is_seen(token),
            "do not see what rank 0 wrote there: ranks read parts of a checkpoint that others wrote, so save into a "
            "directory on a file system that all machines share",
        )
    finally:
        if is_first():
            token.unlink(missing_ok=True)


def require_same_checkpoint(path: Path) -> None:
    """Raise RuntimeError on every rank unless all see the same checkpoint, in one place or in copies, by its names."""
    _require_same(
        path,
        _fingerprint(path),
        "do not have it as rank 0 has: load from a directory on a file system that all machines share, or copy all of "
        "the checkpoint to each",
    )


def _fingerprint(path: Path) -> str | None:
    if not _is_seen(path):
        return None
    digest = hashlib.sha256(repr(sorted(file.name for file in path.glob("*.distcp"))).encode())
    for name in FOR_ALL:
        with suppress(OSError):  # what is missing everywhere is another's to say
            digest.update(name.encode() + (path / name).read_bytes())
    return digest.hexdigest()


def _is_seen(path: Path) -> bool:
    end = time.monotonic() + PATIENCE
    while not os.access(path, os.F_OK):
        if time.monotonic() > end:
            return False
        for folder in reversed(path.parents):  # opened, a network file system asks its server what is new in it
            with suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        time.sleep(0.1)
    return True


def _require_same(path: Path, seen: object, complaint: str) -> None:
    everyones: list[tuple[object, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(everyones, (seen, socket.gethostname()))
    others = [rank for rank, (view, _) in enumerate(everyones) if view != everyones[0][0]]
    if not others:
        return
    hosts = sorted({everyones[rank][1] for rank in others})
    shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    raise RuntimeError(
        f"{path} is not the same directory on all ranks: {len(others)} of {len(everyones)} (rank {shown} on "
        f"{', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}) {complaint}"
    )


def require_seen_by_first(path: Path, *, found: bool) -> None:
    """Where rank 0 found no checkpoint: raise RuntimeError on every rank if another rank found one."""
    _require_same(
        path,
        found,
        "see a checkpoint there, and rank 0 does not: load from a directory on a file system that all machines share",
    )
