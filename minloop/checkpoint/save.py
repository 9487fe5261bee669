"""Saving a training state."""

import contextlib
import queue
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from minloop.checkpoint import content, directory
from minloop.data_parallel import gathered_parameters
from minloop.messages import without_log_lines, without_warnings
from minloop.state import TrainState


class Positioned(Protocol):
    """Anything with a position to save and restore, such as `minloop.Loader`."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain numbers and strings, equal on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a position that `state_dict` returned."""
        ...


Loaders = Positioned | Mapping[str, Positioned] | None


def named_loaders(loaders: Loaders) -> Mapping[str, Positioned]:
    """The loaders by name; a single one is called "train"."""
    if loaders is None:
        return {}
    return loaders if isinstance(loaders, Mapping) else {"train": loaders}


def save_checkpoint(checkpoints: str | Path, state: TrainState, loader: Loaders = None) -> Path:
    """Save all that is needed to go on as if nothing had happened, into a new directory of `checkpoints`.

    Weights, optimizer state, schedule, counters, every rank's random streams, and the position of the loader or loaders
    go into ``iter_0000005`` after iteration 5. Every rank calls it. The directory appears under its name when it is
    complete, and the tracker is written last; a save that is cut short leaves the earlier checkpoints as they were.

    Args:
        checkpoints: the directory that holds all checkpoints of the run, seen by every rank.
        loader: a loader, or several by name.
    Returns:
        The new checkpoint's directory.
    Raises:
        RuntimeError: on every rank, if the directory cannot be written.
        ValueError: mcore cannot save this optimizer.
    """
    if content.optimizer_kind(state) == "distributed" and state.optimizer.config.optimizer == "sgd":
        raise ValueError(
            "optimizer='sgd' with use_distributed_optimizer=True: mcore's distributed optimizer saves Adam's state "
            "only; use optimizer='adam' or use_distributed_optimizer=False"
        )
    final = directory.iteration_directory(checkpoints, state.iteration)
    metadata = content.save_metadata(state)
    unfinished = directory.begin(final)
    with gathered_parameters(state.chunks), _results_stay_in_process():
        model = content.model_state(state, metadata)
        sharded: dict[str, Any] = {
            **model,
            "optimizer": content.optimizer_state(state, model, metadata, is_loading=False),
            "rng_state": content.rng_state(state),
            "checkpoint_version": 3.0,
            "iteration": state.iteration,
            "minloop": record(state, named_loaders(loader)),
        }
        if state.scheduler is not None:
            sharded["opt_param_scheduler"] = state.scheduler.state_dict()
        with without_warnings(), without_log_lines("megatron.core.dist_checkpointing.strategies.torch", "deprecated"):
            dist_checkpointing.save(sharded, str(unfinished), content_metadata=metadata)
    directory.commit(unfinished, final, state.iteration)
    return final


def record(state: TrainState, loaders: Mapping[str, Positioned]) -> dict[str, Any]:
    """What minloop stores of itself: plain numbers and strings, equal on every rank."""
    return {
        "architecture": content.architecture(state),
        "layout": content.layout(state),
        "optimizer_kind": content.optimizer_kind(state),
        "consumed_samples": state.consumed_samples,
        "skipped_iterations": state.skipped_iterations,
        "loaders": {name: loader.state_dict() for name, loader in loaders.items()},
    }


@contextlib.contextmanager
def _results_stay_in_process() -> Generator[None]:
    """Let mcore's writer hand its results back through a plain queue.

    Its own queue belongs to a manager process that it spawns, which imports the user's script once more and outlives
    the save; a synchronous save writes in this very process and needs none.
    """
    own = filesystem_async._results_queue  # pyright: ignore[reportPrivateUsage]
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        filesystem_async._results_queue = own  # pyright: ignore[reportPrivateUsage]
