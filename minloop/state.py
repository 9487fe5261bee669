"""`TrainState`: what one training run holds, carried from step to step. It has no behaviour of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from minloop.alive import left_midway
from minloop.cuda_graph import StepGraphs
from minloop.data_parallel import bind_hooks, require_trainable, require_unread
from minloop.everyone import compare_with_first
from minloop.messages import say_once
from minloop.moe import AuxiliaryLosses, mend_experts


@dataclass
class OpenStep:
    """What a step in parts has gathered since `begin_step`.

    Attributes:
        tokens: with loss in the global batch, 0-d float64; None if the host did not say.
        counted: tokens with loss of this rank's microbatches, 0-d float64.
        reports: of this rank's microbatches, {name: [sum, count]}; empty but on the last pipeline stage.
        forward_step: the first one used.
        auxiliary: losses of routers and of multi-token prediction, summed over microbatches.
        num_microbatches: of each `forward_backward`.
        num_samples: of this rank's microbatches.
    """

    tokens: torch.Tensor | None
    counted: torch.Tensor
    reports: list[dict[str, torch.Tensor]] = field(default_factory=list[dict[str, torch.Tensor]])
    forward_step: Callable[..., Any] | None = None
    auxiliary: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    num_microbatches: list[int] = field(default_factory=list[int])
    num_samples: int = 0


@dataclass
class TrainState:
    """Model, optimizer, schedule and counters of one run; creating it binds the hooks of mcore's schedules.

    Attributes:
        chunks: the wrapped model chunks of this rank, one per virtual pipeline stage.
        optimizer: from `build_optimizer`; of a model that was frozen before it was wrapped it holds nothing.
        scheduler: learning rate and weight decay schedule; None keeps both constant.
        config: the config given; replaced by the model's own copy, which carries the hooks.
        groups: the process groups.
        iteration: optimizer steps taken, skipped ones included.
        consumed_samples: samples taken from the data, over all data parallel ranks.
        skipped_iterations: steps whose update was skipped, for overflow or by a guard.
        global_batch_size: samples of the last step that changed the weights, before a load or since.
        batch: microbatches and their samples of the last `train_step`, in which the ranks did not disagree.
        report_names: names of the losses that each forward step used so far reports.
        auxiliary_losses: what mcore records of the training step under way.
        graphs: with cuda_graph_impl="full_iteration", the CUDA graphs of its steps.
        last_update: loss and, if there is one, gradient norm of the last update, on their device; empty after a load.
        open_step: of a step in parts, from `begin_step` to `finish_step`.
        is_torn: an update of the weights ended midway, by an error or Ctrl-C; until a checkpoint is loaded.
        offloaded: what `offload` moved, and its bytes in host memory.
    Raises:
        TypeError: no optimizer, or a plain torch optimizer, which would never change a weight.
        RuntimeError: the hooks are bound already.
    """

    chunks: list[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler | None
    config: TransformerConfig
    groups: ProcessGroupCollection
    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    global_batch_size: int = 0
    batch: tuple[int, int] = field(default=(0, 0), repr=False)
    report_names: WeakKeyDictionary[Callable[..., Any], list[str]] = field(
        default_factory=WeakKeyDictionary[Callable[..., Any], list[str]], repr=False
    )
    auxiliary_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses, repr=False)
    graphs: StepGraphs = field(default_factory=StepGraphs, repr=False)
    last_update: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    open_step: OpenStep | None = field(default=None, repr=False)
    is_torn: bool = field(default=False, repr=False)
    offloaded: dict[str, list[tuple[torch.UntypedStorage, torch.Tensor]]] = field(
        default_factory=dict[str, list[tuple[torch.UntypedStorage, torch.Tensor]]], repr=False
    )

    def __post_init__(self) -> None:
        optimizer: Any = self.optimizer  # most callers check no types
        if optimizer is None:
            raise TypeError(
                "TrainState needs an optimizer, for evaluation alone, too: use build_optimizer; freeze the model with "
                "requires_grad_(False) before wrapping it, and neither optimizer nor gradients take memory"
            )
        if not isinstance(optimizer, MegatronOptimizer):
            raise TypeError(
                f"{type(optimizer).__name__} sees no gradients on DDP chunks: they are in parameter.main_grad while "
                "parameter.grad stays None, so it would never change a weight; use build_optimizer"
            )
        bind_hooks(self.chunks, self.optimizer)
        self.config = get_model_config(self.chunks[0])
        mend_experts(self.chunks, self.groups)


def require_memory(state: TrainState, *kinds: str) -> None:
    """Raise RuntimeError if `offload` moved one of `kinds`, by default anything."""
    if moved := [kind for kind in state.offloaded if not kinds or kind in kinds]:
        raise RuntimeError(f"{', '.join(moved)} of this training state are in host memory: call onload(state) first")


def require_idle(state: TrainState) -> None:
    """Raise RuntimeError if a step in parts is under way or weights are being read."""
    if state.open_step is not None:
        raise RuntimeError("a step that begin_step opened is under way: call finish_step first")
    require_unread(state.chunks)


def require_between_steps(state: TrainState) -> None:
    """Raise RuntimeError as `require_idle`, or if `offload` holds memory."""
    require_idle(state)
    require_memory(state)


def require_optimizer(state: TrainState) -> None:
    """Raise RuntimeError as `require_between_steps`, or if the optimizer's weights are no longer in the model."""
    require_trainable(state.chunks)
    require_between_steps(state)


def require_whole(state: TrainState) -> None:
    """Raise RuntimeError if an update of the weights ended midway: they may be those of no iteration."""
    if state.is_torn:
        raise RuntimeError(
            f"the step after iteration {state.iteration} ended in its midst, so that weights, optimizer and counters "
            "may be of different steps: load a checkpoint, which is whole, and go on from there"
        )


def stepped(state: TrainState) -> Any:
    """What the optimizer's step returns; the state is torn until `advance` has counted it."""
    state.is_torn = True
    return state.optimizer.step()


def agree_on_batch(state: TrainState, num_microbatches: int, micro_batch_size: int) -> None:
    """Raise ValueError if another rank took another batch first, in a state's first step or one where it changes.

    Pipeline stages would wait for each other, data parallel ranks train on at different learning rates. A rank whose
    batch does not change compares nothing, so that a step costs no look-up.
    """
    if state.batch == (num_microbatches, micro_batch_size):
        return
    with left_midway(state.groups):
        value = f"{num_microbatches} × {micro_batch_size} at iteration {state.iteration + 1}"
        compare_with_first("num_microbatches × micro_batch_size of train_step", value, state.groups)
    state.batch = (num_microbatches, micro_batch_size)


def advance(state: TrainState, num_samples: int, updated: bool) -> None:
    """Count a step in the counters and the schedule; say once if a run that goes on has another global batch."""
    if not state.last_update and state.global_batch_size not in (0, num_samples):
        say_once(
            f"the run goes on with another global batch than it was saved with (saved → now, and that of now holds): "
            f"{state.global_batch_size} → {num_samples} samples"
        )
    state.iteration += 1
    state.consumed_samples += num_samples
    if not updated:
        state.skipped_iterations += 1
    else:
        state.global_batch_size = num_samples
        if state.scheduler is not None:
            state.scheduler.step(increment=num_samples)
    state.is_torn = False
