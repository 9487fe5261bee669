"""Saving a training state."""

import operator
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minloop.checkpoint import background, content, directory, fully_sharded_state, megatron_lm
from minloop.checkpoint.agreement import agreed, from_first_rank, is_first, on_first_rank, together
from minloop.checkpoint.background import PendingSave
from minloop.checkpoint.commit import Retention, begin, commit
from minloop.checkpoint.full_names import TORCH_DIST
from minloop.checkpoint.fully_sharded_state import is_fully_sharded
from minloop.checkpoint.integrity import write_manifest
from minloop.checkpoint.loaders import Loaders, Positioned, named_loaders
from minloop.checkpoint.megatron_bridge import files_beside
from minloop.checkpoint.plain import check_same, made_plain
from minloop.checkpoint.shared import put_token, require_token
from minloop.checkpoint.validation import check_parts
from minloop.checkpoint.writing import Plan, Written
from minloop.data_parallel import gathered_parameters
from minloop.fully_sharded import refuse_fully_sharded
from minloop.groups import as_the_world
from minloop.messages import logger
from minloop.state import TrainState, require_between_steps, require_optimizer, require_whole


def save_checkpoint(
    checkpoints: str | Path,
    state: TrainState,
    loader: Loaders = None,
    *,
    keep_newest: int | None = None,
    keep_every: int | None = None,
    checksums: bool = True,
    weights_only: bool = False,
) -> Path:
    """Save all that is needed to go on as if nothing had happened, into a new directory of `checkpoints`.

    Weights, optimizer state, schedule, counters, every rank's random streams, and the position of the loader or loaders
    go into ``iter_0000005`` after iteration 5. Every rank calls it. All files are on the disk before the directory gets
    its name, and the tracker is written last: killed at any instant, a save leaves earlier checkpoints as they were.
    The format is "torch_dist"; of Megatron FSDP "fsdp_dtensor", of torch FSDP2 "torch_dcp". Each loads into each kind.

    From its first save, or `shared_directory`, until `shutdown_distributed` or its end however it comes, a run keeps
    `checkpoints` for itself. Beside the state, a rank holds in host memory a copy of the part that it writes if that
    lies on a GPU; the memory is pinned in the first save and kept for the next.

    Args:
        checkpoints: the directory that holds all checkpoints of the run, seen by every rank.
        loader: a loader, or several by name.
        keep_newest: then delete complete older checkpoints but for the newest of this number; None keeps all. One that
            a running process loaded last stays, and so do those of later iterations. If loss or gradient norm of the
            last update were not finite, nothing is deleted, which is said.
        keep_every: with `keep_newest`, keep also those whose iteration is a multiple of this number.
        checksums: store the SHA-256 of every file in ``integrity.json``, beside the sizes. They are computed by the
            threads that write, at about 2 GB/s each.
        weights_only: leave the optimizer's state out, as for merged adapters; `load_checkpoint(weights_only=True)` and
            `load_weights` read it. Not of fully sharded models.
    Returns:
        The new checkpoint's directory.
    Raises:
        RuntimeError: on every rank: the directory cannot be written, is full, was removed, is not the same on all
            machines, or another run writes there; or the save that `start_save` began before this one failed. Or, first
            of all, a step is under way, a stream of the weights is open, `offload` holds memory, adapters are merged.
        ValueError: mcore cannot save this optimizer; a loader's position is no plain data or differs between ranks;
            `keep_newest` or `keep_every` make no sense.
    """
    with as_the_world(state.groups):
        retention = Retention(keep_newest, keep_every)
        save = _prepare(
            checkpoints, state, loader, retention, checksums, in_background=False, weights_only=weights_only
        )
        save.finish(None)
    return save.final


def start_save(
    checkpoints: str | Path,
    state: TrainState,
    loader: Loaders = None,
    *,
    keep_newest: int | None = None,
    keep_every: int | None = None,
    checksums: bool = True,
    weights_only: bool = False,
) -> PendingSave:
    """Do what `save_checkpoint` does in the background: return once the state is copied, and training may go on.

    What is saved is the state at the moment of the call. One save is in flight at a time: `start_save` and
    `save_checkpoint` first wait for the one before, and raise its error if it failed and ``wait()`` has not raised it.
    Host memory: one copy of what this rank writes, kept for the next save. Needs no further package.

    After the last one call its ``wait()`` or `shutdown_distributed`, inside `stop_signals` where that is used. Without
    it a process that ends, or raises an exception, ends after the save, but with the same exit code if that has failed;
    and a signal that comes meanwhile ends it, and loses the save: earlier checkpoints stay as they were.

    Args:
        checkpoints: these and the others as in `save_checkpoint`.
    Returns:
        A handle with ``done()`` and ``wait()``.
    Raises:
        RuntimeError, ValueError: on every rank, as `save_checkpoint`; what fails later is raised by ``wait()``.
    """
    with as_the_world(state.groups):
        retention = Retention(keep_newest, keep_every)
        save = _prepare(checkpoints, state, loader, retention, checksums, in_background=True, weights_only=weights_only)
    return PendingSave(save.final, partial(save.finish, background.group_of_threads(state.groups)))


@dataclass
class _Save:
    """A save whose content is settled: this rank's part is being written."""

    unfinished: Path
    final: Path
    iteration: int
    plan: Plan
    files: list[Future[Written]]
    beside: dict[str, bytes]
    checksums: bool
    retention: Retention

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Wait for all ranks, commit, and delete old checkpoints; on failure leave nothing behind but an error."""
        try:
            wait(self.files)  # those of a save that fails, too, before its directory goes
            written = together(lambda: [file.result() for file in self.files], group)
            on_first_rank(lambda: self._commit([file for files in written for file in files]), group)
        except Exception as error:
            if is_first(group):
                shutil.rmtree(self.unfinished, ignore_errors=True)
                if group is not None:  # behind training, where it may be that nobody asks
                    logger.error("%s was not saved: %s", self.final, error)
            raise

    def _commit(self, written: list[Written]) -> None:
        self.plan.finish(self.unfinished, written)
        for name, data in self.beside.items():
            (self.unfinished / name).write_bytes(data)
        write_manifest(self.unfinished, [file.record for file in written], self.checksums)
        commit(self.unfinished, self.final, self.iteration)
        self.retention.apply(self.final.parent, self.iteration)


def _prepare(
    checkpoints: str | Path,
    state: TrainState,
    loader: Loaders,
    retention: Retention,
    checksums: bool,
    *,
    in_background: bool,
    weights_only: bool = False,
) -> _Save:
    """Copy this rank's part and start to write it."""
    require_whole(state)
    if weights_only:
        require_between_steps(state)
        other = "give the weights to a new state by load_full_parameters and save that, or"
        refuse_fully_sharded(state.chunks, f"save_checkpoint(weights_only=True): {other}")
    else:
        require_optimizer(state)
    background.wait_for_pending()
    iteration = operator.index(state.iteration)
    if is_first():
        retention = retention.after_update(iteration, *state.last_update)
    final = directory.iteration_directory(Path(checkpoints).absolute(), iteration)  # the process may go elsewhere
    unfinished = final.with_name(final.name + directory.UNFINISHED)
    metadata = content.save_metadata(state)
    with gathered_parameters(state.chunks, whole=False):
        own = _agreed_record(state, named_loaders(loader))
        sharded = made_plain(_sharded_state(state, own, metadata, weights_only))
        beside: dict[str, bytes] = {}
        on_first_rank(lambda: beside.update(files_beside(state)))
        check_parts(sharded)
        _begin_for_all(final)
        format = sharded["minloop"].get("names", {}).get("format", TORCH_DIST)
        plan = Plan(sharded, unfinished, metadata, state.groups.dp_cp, format)
        del sharded
        files = plan.start_writing(detached=in_background, checksums=checksums)
    return _Save(unfinished, final, iteration, plan, files, beside, checksums, retention)


def _begin_for_all(final: Path) -> None:
    unfinished = final.with_name(final.name + directory.UNFINISHED)
    name = from_first_rank(lambda: put_token(begin(final)), kinds={})
    try:
        require_token(unfinished / name)
    except RuntimeError:
        if is_first():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _agreed_record(state: TrainState, loaders: Mapping[str, Positioned]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    with agreed():
        own = content.record(state, loaders)
    own = made_plain(own)
    check_same({"iteration": operator.index(state.iteration)} | own)
    return own


def _sharded_state(
    state: TrainState, own: dict[str, Any], metadata: dict[str, Any], weights_only: bool
) -> dict[str, Any]:
    """mcore's sharded state dict of everything that is saved."""
    if is_fully_sharded(state):
        tensors, names = fully_sharded_state.content_to_save(state, metadata)
        own |= {"names": names.stored()}
    else:
        tensors = content.model_state(state, metadata)
    if not (weights_only or is_fully_sharded(state)):
        tensors |= {"optimizer": content.optimizer_state(state, tensors, metadata, is_loading=False)}
    sharded: dict[str, Any] = {
        **tensors,
        "rng_state": content.rng_state(state),
        **megatron_lm.common_content(state),
        "checkpoint_version": 3.0,
        "iteration": operator.index(state.iteration),
        "minloop": own,
    }
    if "names" in own:
        sharded["args"].ckpt_format = own["names"]["format"]
    if state.scheduler is not None:
        sharded["opt_param_scheduler"] = state.scheduler.state_dict()
    return sharded
