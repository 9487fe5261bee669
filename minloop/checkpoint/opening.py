"""Finding a checkpoint to load, together: every rank comes to the same one, or to the same error."""

import functools
from pathlib import Path

import torch.distributed as dist

from minloop.checkpoint import directory
from minloop.checkpoint.agreement import agreed, from_first_rank
from minloop.checkpoint.integrity import content_faults, files_to_verify, structural_faults
from minloop.checkpoint.lock import mark_in_use
from minloop.checkpoint.reading import CheckpointError, SavedCheckpoint, read_checkpoint


def open_checkpoint(checkpoint: str | Path, verify: bool | None) -> SavedCheckpoint:
    """Find, verify and read all but the tensors of the checkpoint that `checkpoint` means; every rank calls it.

    If it means a run's directory, a damaged newest one is passed over for the one before it, which is said.

    Args:
        verify: compare contents: True all files, None those with a digest, False none. The ranks share the work.
    Raises:
        FileNotFoundError: nothing complete there.
        CheckpointError: damaged; the message names each file.
    """
    candidates = from_first_rank(lambda: directory.candidates(checkpoint))
    faults: list[str] = []
    for number, path in enumerate(candidates):
        mark_in_use(path)
        faults = from_first_rank(functools.partial(structural_faults, path))
        if not faults and verify is not False:
            faults = _shared_content_faults(path, without_digest=verify is True)
        if not faults:
            with agreed():
                return read_checkpoint(path)
        if len(candidates) > 1:
            directory.say_passed_over(path, faults, candidates[number + 1 :])
    raise CheckpointError("; ".join([*faults[:5], "load an earlier checkpoint"]))


def _shared_content_faults(path: Path, *, without_digest: bool) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    faults: list[str] = []
    with agreed():
        faults = content_faults(path, files_to_verify(path, without_digest=without_digest)[rank::size])
    gathered: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, faults)
    return [fault for part in gathered for fault in part]
