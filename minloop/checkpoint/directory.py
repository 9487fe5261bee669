"""The checkpoint tree: names as in Megatron-LM, which of them are complete, and which one is opened by all ranks.

checkpoints/latest_checkpointed_iteration.txt     "5", written last
checkpoints/iter_0000005/.metadata, __0_0.distcp, metadata.json, integrity.json
checkpoints/iter_0000006.unfinished               being written
checkpoints/iter_0000005.replaced                 while a newer save of iteration 5 takes its name
checkpoints/iter_0000004.deleted                  being deleted
checkpoints/.lock                                 who writes here
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from minloop.checkpoint.agreement import agreed, from_first_rank
from minloop.checkpoint.foreign import refuse_foreign
from minloop.checkpoint.integrity import content_faults, files_to_verify, structural_faults
from minloop.checkpoint.reading import EARLIER, CheckpointError, SavedCheckpoint, read_checkpoint
from minloop.checkpoint.shared import require_same_checkpoint, require_seen_by_first
from minloop.disk import mark_in_use
from minloop.messages import say_once

TRACKER = "latest_checkpointed_iteration.txt"
UNFINISHED, REPLACED = ".unfinished", ".replaced"
NAME = re.compile(rf"iter_([0-9]{{7}}|[1-9][0-9]{{7,}})({re.escape(REPLACED)})?")
NEEDED = (".metadata", "metadata.json")
"""Files that mcore writes after all data: `.metadata` names every shard, `metadata.json` comes last of all."""


def iteration_directory(directory: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies under `directory`."""
    return Path(directory) / f"iter_{iteration:07d}"


def missing_parts(checkpoint: Path) -> list[str]:
    """What a checkpoint directory lacks to be complete; empty for a complete one."""
    return [name for name in NEEDED if not (checkpoint / name).is_file()]


def complete_checkpoints(directory: str | Path) -> dict[int, Path]:
    """Checkpoints under `directory` that have all parts by name, by iteration, newest first.

    The one that the tracker names is the newest: what a save left behind before it wrote the tracker does not count.
    """
    root = Path(directory)
    if not root.is_dir():
        return {}
    # A save over an existing iteration was cut short in mid-exchange if only the one being replaced has a name.
    names = sorted(root.iterdir(), key=lambda path: not path.name.endswith(REPLACED))
    named = [(int(match[1]), path) for path in names if (match := NAME.fullmatch(path.name))]
    found = {iteration: path for iteration, path in named if not missing_parts(path)}
    newest = _tracked(root)
    return {number: found[number] for number in sorted(found, reverse=True) if newest is None or number <= newest}


def _tracked(root: Path) -> int | None:
    """The iteration that the tracker names; None if it names none."""
    tracker = root / TRACKER
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _checkpoints_of(root: Path) -> list[Path]:
    """Complete checkpoints, newest first; if that is not the one the tracker names, which is taken is said.

    Raises:
        CheckpointError: what lies there is of a format that is not read here; or none is left of what the tracker,
            which is written last, names.
    """
    complete, newest = complete_checkpoints(root), _tracked(root)
    if newest is not None and newest not in complete:  # it may have come while the directory was read
        complete, newest = complete_checkpoints(root), _tracked(root)
    if newest is not None and newest not in complete:
        path = iteration_directory(root, newest)
        refuse_foreign(path)
        if not complete:
            raise _lost(root, newest)
        _say_passed_over(path, [f"it lacks {', '.join(missing_parts(path))}"], [*complete.values()])
    if not complete:
        refuse_foreign(root)
        refuse_foreign(root / "release")  # where Megatron-LM's tools put weights that they convert
    return [*complete.values()]


def _lost(root: Path, newest: int) -> CheckpointError:
    return CheckpointError(
        f"{root / TRACKER} names iteration {newest}, and {root} holds no complete checkpoint of it or an earlier one: "
        "bring them back, or delete that file to begin anew"
    )


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest complete checkpoint under `directory`, `directory` itself if it is one, or None.

    That is the one the tracker names, or, if that one is gone or incomplete, the newest complete one before it. One
    whose files are cut short or unreadable is passed over, which is said; contents are not compared (see
    `verify_checkpoint`).

    Raises:
        CheckpointError: there are complete checkpoints, and each has such faults; or what lies there, or what the
            tracker names, is of a format that is not read here; or none is left of those that it names.
    """
    try:
        return resolve(directory)
    except FileNotFoundError:
        return None


def newest_sound(given: str | Path, find: Callable[[], list[Path]], faults_of: Callable[[Path], list[str]]) -> Path:
    """Return the first of the checkpoints that `find` returns in which `faults_of` finds no faults.

    Those passed over for it are said. A run may delete what it has replaced: they are looked for until none is new.

    Raises:
        CheckpointError: there is none; the message names the faults.
    """
    seen, faults = list[Path](), list[str]()
    while seen != (found := find()):
        for number, path in enumerate(found):
            if not (faults := faults_of(path)):
                return path
            if len(found) > 1 and path.exists():
                _say_passed_over(path, faults, found[number + 1 :])
        seen = found
    raise _all_damaged(given, seen, faults)


def _say_passed_over(path: Path, faults: list[str], earlier: list[Path]) -> None:
    """Say that the newest checkpoint is damaged, and which one is tried in its place."""
    instead = f"{earlier[0]} is tried in its place" if earlier else "there is none before it"
    say_once(f"{path} is damaged ({'; '.join(faults[:3])}); {instead}")


def candidates(path: str | Path) -> list[Path]:
    """Return the checkpoints that `path` may mean: itself, or those under it that have all parts, newest first.

    Raises:
        FileNotFoundError: there is none, or it is incomplete; the message says which part is missing.
        CheckpointError: what lies there, or what the tracker names, is of a format that is not read here; or none is
            left of what it names.
    """
    path = Path(path)
    if path.is_file():
        raise CheckpointError(f"{path} is a file: give the directory of a checkpoint, or of a run's")
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory: nothing to load")
    missing = missing_parts(path)
    if not missing:
        return [path]
    found = _checkpoints_of(path)
    if not found and re.match(r"iter_\d{7}", path.name):
        raise FileNotFoundError(
            f"{path} is incomplete, it lacks {', '.join(missing)}: the save was cut short; load an earlier checkpoint"
        )
    if not found:
        raise FileNotFoundError(f"{path} holds no complete checkpoint (iter_0000001, …)")
    return found


def _holds_one(path: str | Path) -> bool:
    try:
        return bool(candidates(path))
    except FileNotFoundError:
        return False
    except CheckpointError:  # one that cannot be read, which is not none
        return True


def holds_one_for_all(path: str | Path) -> bool:
    """Whether the first rank sees a checkpoint in a run's directory; every rank calls it.

    Raises:
        RuntimeError: it does not, and another rank does.
    """
    found = from_first_rank(lambda: _holds_one(path) or bool(NAME.fullmatch(Path(path).name)))
    if not found:
        require_seen_by_first(Path(path), found=_holds_one(path))
    return found


def resolve(path: str | Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest undamaged one under it.

    Raises:
        FileNotFoundError, CheckpointError: as `candidates`; or all under it are damaged.
    """
    path = Path(path)
    if path.is_dir() and not missing_parts(path):
        return path
    return newest_sound(path, lambda: candidates(path), structural_faults)


def open_checkpoint(checkpoint: str | Path, verify: bool | None) -> SavedCheckpoint:
    """Find, verify and read all but the tensors of the checkpoint that `checkpoint` means; every rank calls it.

    If it means a run's directory, a damaged newest one is passed over for the one before it, which is said.

    Args:
        verify: compare contents: True all files, None those with a digest, False none. The ranks share the work.
    Raises:
        FileNotFoundError: nothing complete there.
        CheckpointError: damaged, the message names each file; or as `candidates`.
        RuntimeError: not the same on all ranks; the message names those that do not see what rank 0 does.
    """

    def faults_of(path: Path) -> list[str]:
        mark_in_use(path)
        faults = from_first_rank(functools.partial(structural_faults, path))
        if not faults:
            require_same_checkpoint(path)
        if not faults and verify is not False:
            faults = _shared_content_faults(path, without_digest=verify is True)
        return faults

    try:
        path = newest_sound(checkpoint, lambda: from_first_rank(lambda: candidates(checkpoint)), faults_of)
    except FileNotFoundError:
        require_seen_by_first(Path(checkpoint), found=_holds_one(checkpoint))
        raise
    with agreed():
        return read_checkpoint(path)


def _all_damaged(given: str | Path, found: list[Path], faults: list[str]) -> CheckpointError:
    """The error for a checkpoint with faults, or for a run's directory with none but such, of the last of which."""
    shown = "; ".join(fault.removesuffix(f"; {EARLIER}") for fault in faults[:5])
    if found == [Path(given)]:
        return CheckpointError(f"{shown}; {EARLIER}, or {Path(given).parent}, of which the newest sound one is taken")
    return CheckpointError(f"none of {len(found)} checkpoints in {given} is sound; of the oldest: {shown}")


def _shared_content_faults(path: Path, *, without_digest: bool) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    faults: list[str] = []
    with agreed():
        faults = content_faults(path, files_to_verify(path, without_digest=without_digest)[rank::size])
    gathered: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, faults)
    return [fault for part in gathered for fault in part]
