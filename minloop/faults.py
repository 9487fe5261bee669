"""A loss or gradient that is not a number, or a loss that leaps: found before the weights change, named, dealt with.

mcore's own `RerunStateMachine` tells transient from persistent faults, too, but is one per process, waits for the GPU
at every microbatch, leaves a loop by exit codes, and stores pickled objects in checkpoints. `FaultGuard(rerun=True)`
does its first part, the step computed again on the same device; for the second, the same step on another device, start
the run there from its last checkpoint: the same data come in the same order.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from minloop.checkpoint import load_checkpoint
from minloop.checkpoint.background import wait_for_pending
from minloop.checkpoint.content import restore_rng_state, rng_streams
from minloop.checkpoint.loaders import Loaders
from minloop.distributed import is_first_rank
from minloop.everyone import from_all_ranks, over_all_ranks
from minloop.fault_places import any_wrong_gradient, look
from minloop.messages import logger
from minloop.microbatches import Microbatches
from minloop.state import TrainState
from minloop.step import Computed
from minloop.traces import remember_traces

Policy = Literal["raise", "skip"]


@dataclass(frozen=True)
class Fault:
    """What a `FaultGuard` found, equal on every rank.

    Attributes:
        kind: "loss" or "gradient", one that is NaN or infinite, or "spike".
        iteration: the step's number as it is logged, from 1.
        loss: mean over the global batch.
        places: where, each "rank 1 on HOST", of a loss "rank 1 on HOST, microbatch 0 (samples 8 to 11 of the run)".
        parameters: of a gradient, the names of up to 3 parameters on each rank.
    """

    kind: Literal["loss", "gradient", "spike"]
    iteration: int
    loss: float
    places: tuple[str, ...]
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = {
            "loss": f"the loss is {self.loss}",
            "gradient": f"the loss is {self.loss:.6g} but the gradient is not finite, at {', '.join(self.parameters)}",
            "spike": f"the loss leaps to {self.loss:.6g}",
        }[self.kind]
        return f"iteration {self.iteration}: {what}; on {'; '.join(self.places[:4])}"


class FaultError(RuntimeError):
    """A step with a fault, raised on every rank before any weight changed.

    Attributes:
        fault: what and where.
    """

    def __init__(self, fault: Fault, explanation: str) -> None:
        super().__init__(f"{fault}. {explanation}")
        self.fault = fault


class FaultGuard:
    """Looks at each step's losses and gradients before the weights change: ``train_step(..., guard=guard)``.

    All ranks decide alike. It costs a pass over the gradients, one small reduction and a wait for the GPU per step.
    fp16's gradients are left to its loss scaler. A gradient that ranks have summed is wrong on all of them. Give the
    guard to `save_checkpoint` beside the loader, ``{"train": loader, "guard": guard}``, and its memory, losses for
    `loss_spike` and the iterations to skip, is that of the run.

    Args:
        on_fault: "raise" a `FaultError`, after which `roll_back` can go back to a checkpoint; or "skip" the update,
            which is logged: the step then counts in ``state.skipped_iterations``.
        loss_spike: a loss of more than this many times the median of the last `window` steps is a fault, too, where
            that median is positive.
        rerun: compute a faulty step again from the same data and random streams: if the fault is gone, it was the
            device's, which is logged as an error, and training goes on with the second result. Not with
            cuda_graph_impl="full_iteration".
    Attributes:
        iterations_to_skip: these steps are computed and not taken.
        transient_faults: steps that came out well the second time.
    """

    def __init__(
        self, on_fault: Policy = "raise", *, loss_spike: float | None = None, window: int = 50, rerun: bool = False
    ) -> None:
        if on_fault not in ("raise", "skip"):
            raise ValueError(
                f'on_fault {on_fault!r} is neither "raise" nor "skip"; to go back to a checkpoint use "raise", catch '
                "FaultError and call guard.roll_back(error, checkpoints, state, loader)"
            )
        if loss_spike is not None and not loss_spike > 1:
            raise ValueError(f"loss_spike ({loss_spike}) must be more than 1: it is a multiple of the median loss")
        if window < 1:
            raise ValueError(f"window ({window}) must be positive: the median is of so many losses")
        self.on_fault, self.loss_spike, self.rerun = on_fault, loss_spike, rerun
        self.iterations_to_skip: set[int] = set()
        self.transient_faults: list[int] = []
        self._losses: deque[float] = deque(maxlen=window)

    def watch(self, state: TrainState, batches: Microbatches, compute: Callable[[], Computed]) -> tuple[Computed, bool]:
        """Compute a step; return it, and whether the weights may change by it. `train_step` calls this.

        Raises:
            FaultError: on every rank.
        """
        if self.rerun and state.config.cuda_graph_impl == "full_iteration":
            raise ValueError(
                "FaultGuard(rerun=True) with cuda_graph_impl='full_iteration', whose random streams cannot be set "
                "back: use rerun=False or another cuda_graph_impl"
            )
        iteration = state.iteration + 1
        streams = rng_streams() if self.rerun else {}
        put_back = remember_traces(state.chunks, state.config)
        computed = compute()
        if iteration in self.iterations_to_skip:
            put_back()
            return computed, False
        if (fault := self._find(state, batches, computed)) is None:
            return computed, True
        put_back()
        explanation = "No weight has changed."
        if self.rerun:
            restore_rng_state(streams)
            computed = compute()
            if self._find(state, batches, computed) is None:
                self.transient_faults.append(iteration)
                _say(state, f"{fault}. Computed again it came out well: a transient fault of a device", logging.ERROR)
                return computed, True
            put_back()
            explanation += " Computed again it came out so again: the data, the model, or a device that always errs."
        if self.on_fault == "skip":
            _say(state, f"{fault}. {explanation} The step is skipped", logging.WARNING)
            return computed, False
        raise FaultError(fault, explanation)

    def roll_back(
        self, error: FaultError, checkpoints: str | Path, state: TrainState, loader: Loaders = None, *, limit: int = 10
    ) -> Path:
        """Load the newest checkpoint and train again from there, but for the step of `error`; every rank calls it.

        What reads ahead of `loader` without being it, a `StepTimer` and a `jsonl_sink` are to be made anew.

        Args:
            checkpoints, loader: as in `load_checkpoint`; without this guard, which keeps its memory.
            limit: so many times in a run; then it raises `error`.
        Returns:
            The checkpoint loaded.
        Raises:
            FaultError: `error`, after `limit` times.
            FileNotFoundError: there is no checkpoint yet.
        """
        wait_for_pending()
        if len(self.iterations_to_skip) >= limit:
            raise error
        path = load_checkpoint(checkpoints, state, loader)
        self.iterations_to_skip.add(error.fault.iteration)
        _say(state, f"{error} Back at {path.name}; iteration {error.fault.iteration} will be skipped", logging.WARNING)
        return path

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain numbers, equal on every rank."""
        return {"losses": [*self._losses], "iterations_to_skip": sorted(self.iterations_to_skip)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the memory that `state_dict` returned."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self.iterations_to_skip.update(state["iterations_to_skip"])

    def _find(self, state: TrainState, batches: Microbatches, computed: Computed) -> Fault | None:
        losses = torch.stack([*computed.losses.values()])
        mine = [~losses.isfinite().all(), any_wrong_gradient(state), losses[0].nan_to_num(0.0, 0.0, 0.0)]
        # Copies of one loss may differ by the very fault that is looked for: the largest is that of all ranks.
        agreed = over_all_ranks(torch.stack([value.double() for value in mine]), state.groups)
        wrong_loss, wrong_gradient, loss = agreed.tolist()
        if not (wrong_loss or wrong_gradient or self._leaps(loss)):
            self._losses.append(loss)
            return None
        kind = "loss" if wrong_loss else "gradient" if wrong_gradient else "spike"
        found = from_all_ranks(look(kind, state, batches, computed), state.groups)
        if kind == "spike":
            found = [max(found, key=lambda entry: entry[2])]
        places, parameters, _, own_losses = zip(*found, strict=True)
        if kind == "loss":
            loss = next(own for own in own_losses if not math.isfinite(own))
        return Fault(
            kind,
            state.iteration + 1,
            loss,
            tuple(place for part in places for place in part),
            tuple(dict.fromkeys(name for part in parameters for name in part)),
        )

    def _leaps(self, loss: float) -> bool:
        if self.loss_spike is None or len(self._losses) < (self._losses.maxlen or 0):
            return False
        return loss > self.loss_spike * statistics.median(self._losses) > 0


def _say(state: TrainState, message: str, level: int) -> None:
    if is_first_rank(state.groups):
        logger.log(level, message)
