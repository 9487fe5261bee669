"""The checkpoint tree: names as in Megatron-LM, which of them are complete, and what only the first rank does.

checkpoints/latest_checkpointed_iteration.txt     "5", written last
checkpoints/iter_0000005/.metadata, __0_0.distcp, metadata.json
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

TRACKER = "latest_checkpointed_iteration.txt"
NEEDED = (".metadata", "metadata.json")
"""Files that mcore writes after all data: `.metadata` names every shard, `metadata.json` comes last of all."""


def iteration_directory(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies under `directory`."""
    return Path(directory) / f"iter_{iteration:07d}"


def missing_parts(checkpoint: Path) -> list[str]:
    """What a checkpoint directory lacks to be complete; empty for a complete one."""
    return [name for name in NEEDED if not (checkpoint / name).is_file()]


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest complete checkpoint under `directory`, or None.

    That is the one the tracker names, or, if that one is gone or incomplete, the newest complete one before it.
    """
    root = Path(directory)
    if not root.is_dir():
        return None
    # A save over an existing iteration was cut short in mid-exchange if only the one being replaced has a name.
    names = sorted(root.iterdir(), key=lambda path: not path.name.endswith(".replaced"))
    found = {int(m[1]): path for path in names if (m := re.fullmatch(r"iter_(\d{7,})(\.replaced)?", path.name))}
    tracker = root / TRACKER
    newest = None
    if tracker.is_file() and re.fullmatch("[0-9]+", text := tracker.read_text(errors="replace").strip()):
        newest = int(text)
    for iteration in sorted(found, reverse=True):
        if (newest is None or iteration <= newest) and not missing_parts(found[iteration]):
            return found[iteration]
    return None


def resolve(path: str | Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest complete one under it.

    Raises:
        FileNotFoundError: there is none, or it is incomplete; the message says which part is missing.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: nothing to load")
    if re.match(r"iter_\d{7}", path.name) or not missing_parts(path):
        if missing := missing_parts(path):
            raise FileNotFoundError(
                f"{path} is incomplete, it lacks {', '.join(missing)}: the save was cut short; "
                "load an earlier checkpoint"
            )
        return path
    newest = latest_checkpoint(path)
    if newest is None:
        raise FileNotFoundError(f"{path} holds no complete checkpoint (iter_0000001, …)")
    return newest


def on_first_rank(action: Callable[[], Any]) -> None:
    """Run `action` on global rank 0 while the others wait; if it fails, it fails on every rank."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise RuntimeError(f"on rank 0: {type(outcome[0]).__name__}: {outcome[0]}") from outcome[0]


def begin(final: Path) -> Path:
    """Create, empty, and return the directory that a save writes before it becomes `final`."""
    unfinished = final.with_name(final.name + ".unfinished")

    def create() -> None:
        if unfinished.exists():  # left by a save that was cut short
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)

    on_first_rank(create)
    return unfinished


def commit(unfinished: Path, final: Path, iteration: int) -> None:
    """Give a finished save its final name, then point the tracker at it.

    At every moment one complete checkpoint exists.
    """

    def rename() -> None:
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            final.rename(replaced)
        unfinished.rename(final)
        _write_durably(final.parent / TRACKER, str(iteration))
        if replaced.exists():
            shutil.rmtree(replaced)

    on_first_rank(rename)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".unfinished")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
