"""One step: forward and backward over the microbatches by mcore's schedules, one gradient finalisation, one update."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.utils import get_attr_wrapped_model

from minloop.alive import on_usable_groups, usable
from minloop.data import Batch
from minloop.data_parallel import gathered_parameters
from minloop.first_gradients import zero_gradients
from minloop.losses import LossFunction, Report, reduce_reports, token_loss
from minloop.microbatches import Microbatches, require_iterator
from minloop.placement import is_inner, place_batch
from minloop.schedule import ForwardStep, forward_backward
from minloop.state import TrainState, advance, agree_on_batch, require_memory, require_optimizer, stepped
from minloop.traces import remember_fp8_scales


@dataclass(frozen=True)
class StepMetrics:
    """What one step reports, equal on every rank. Reading a tensor (``.item()``, printing) waits for the GPU.

    Attributes:
        loss: 0-d float64 tensor, the first of `losses`.
        losses: name → 0-d float64 tensor: first what the forward step reports, each the mean over the global batch's
            tokens (loss mask respected); then, of training steps, the losses of routers and of multi-token prediction,
            see `minloop.moe.AuxiliaryLosses`.
        num_tokens: 0-d float64 tensor, tokens with loss in the global batch.
        grad_norm: 0-d float64 tensor, 2-norm of the whole gradient before clipping; None in evaluation, when the step
            was skipped, and of Megatron FSDP when `clip_grad` is 0.
        learning_rate: the rate this step's update used.
        loss_scale: by which fp16 losses were multiplied; 1.0 otherwise.
        skipped: whether the update was skipped, because of an overflow or by a guard.
        num_samples: samples in the global batch.
    """

    loss: torch.Tensor
    losses: dict[str, torch.Tensor]
    num_tokens: torch.Tensor
    num_samples: int
    grad_norm: torch.Tensor | None = None
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False


@dataclass(frozen=True)
class Computed:
    """Forward and backward of one step: gradients are in their buffers, reduced, and no weight has changed.

    Attributes:
        reports: of this rank's microbatches, {name: [sum, count]}; empty but on the last pipeline stage.
        losses: as in `StepMetrics`, without those of routers and multi-token prediction.
        num_tokens: as in `StepMetrics`.
    """

    reports: list[Report]
    losses: dict[str, torch.Tensor]
    num_tokens: torch.Tensor


class Guard(Protocol):
    """What stands between the gradients of a step and the update."""

    def watch(
        self, state: TrainState, batches: Microbatches, compute: Callable[[], Computed], /
    ) -> tuple[Computed, bool]:
        """Call `compute`, again if need be; return what holds, and whether the weights may change by it."""
        ...


def gpt_forward_step(
    data: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, LossFunction]:
    """Run one microbatch through one chunk of a GPT; returns its output and the loss function for it.

    The batch holds full sequences, [b, s]; the part of this context parallel rank is cut here. Intermediate pipeline
    stages read the batch too, so that every rank's data advances alike, but move nothing to their device unless there
    is an attention mask or ``position_embedding_type="mrope"``, with positions [b, 3, s], or [b, s] of text.
    For `overlap_moe_expert_parallel_comm` mcore asks for the plan of the pass, `return_schedule_plan`, in its place.

    Raises:
        ValueError: a token id outside the vocabulary, or a packed batch.
    """
    batch = next(data)
    chunk: Any = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    run: Any = chunk.build_schedule_plan if return_schedule_plan else model
    if is_inner(chunk):
        needed = "attention_mask" in batch or chunk.position_embedding_type == "mrope"
        placed = place_batch(batch, model) if needed else {}
        return run(None, placed.get("position_ids"), placed.get("attention_mask")), _no_loss
    if missing := {"tokens", "labels", "position_ids", "loss_mask"} - batch.keys():
        raise ValueError(f"the batch lacks {', '.join(sorted(missing))}: see minloop.Batch, or pass a forward_step")
    if batch.keys() & {"cu_seqlens", "local_cp_size"}:
        raise ValueError(
            "the batch has cu_seqlens (inter_document_masking=True), which gpt_forward_step would ignore: attention "
            "would cross documents; set inter_document_masking=False, or pass forward_step=minloop.packed_forward_step"
        )
    batch = place_batch(batch, model)
    inputs = (batch["tokens"], batch["position_ids"], batch.get("attention_mask"))
    output = run(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(token_loss, batch["loss_mask"])


def _no_loss(output: torch.Tensor) -> Any:
    raise RuntimeError("only the last pipeline stage has a loss")


@on_usable_groups
def train_step(
    state: TrainState,
    data: Iterator[Batch],
    *,
    num_microbatches: int,
    forward_step: ForwardStep = gpt_forward_step,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
    guard: Guard | None = None,
    empty_unused_memory_level: int = 0,
) -> StepMetrics:
    """Take one optimizer step on the next `num_microbatches` microbatches of this rank.

    Args:
        state: counters are advanced, the scheduler by the samples of the global batch.
        data: a `Loader` or any iterator of batches; the next `num_microbatches` are taken.
        num_microbatches: per data parallel rank, see `minloop.num_microbatches`.
        forward_step: called as ``forward_step(data_iterator, model)``, returns the model's output and a function of it
            that returns (sum of losses, number of tokens, {name: [sum, count]}), as `token_loss` does.
        micro_batch_size: samples of a microbatch; read off the first batch unless given, as is `seq_length`, the tokens
            of a full sequence.
        guard: looks at losses and gradients before the weights change, see `minloop.FaultGuard`.
        empty_unused_memory_level: 1 gives the memory that torch keeps unused back to the GPU between gradients and
            update, 2 after the update, too, as in Megatron-LM: for steps that fail by fragmentation. It costs time.
    Raises:
        ValueError: `num_microbatches` does not suit the pipeline; it or the micro batch size was another on the rank
            that came first; a token id outside the vocabulary; a report that is not [sum, count].
        TypeError: `data` is a list, a DataLoader or the like, which would begin anew at every step.
        RuntimeError: the data ended before the step; before anything is read: `offload` holds the memory, a step
            that `begin_step` opened is under way, a stream of the weights is open, or `merge_lora` ended training.
    """
    require_iterator(data)
    require_optimizer(state)
    batches = Microbatches(data, num_microbatches, micro_batch_size, seq_length, iteration=state.iteration + 1)
    agree_on_batch(state, num_microbatches, batches.micro_batch_size)
    compute = partial(_compute, state, batches, forward_step)
    computed, allowed = (compute(), True) if guard is None else guard.watch(state, batches, compute)
    num_samples = batches.micro_batch_size * num_microbatches * state.groups.dp.size()
    auxiliary = partial(state.auxiliary_losses.reduce, state.config, state.groups, num_microbatches)
    return take_step(state, computed, auxiliary, num_samples, allowed, empty_unused_memory_level)


def take_step(
    state: TrainState,
    computed: Computed,
    auxiliary: Callable[[], dict[str, torch.Tensor]],
    num_samples: int,
    allowed: bool = True,
    empty_unused_memory_level: int = 0,
) -> StepMetrics:
    """Update the weights by gradients that are there, unless that is not `allowed`, and advance the counters."""
    learning_rate = state.optimizer.param_groups[0]["lr"]
    loss_scale = float(state.optimizer.get_loss_scale()) if state.config.fp16 else 1.0
    updated, grad_norm = _update(state, allowed, empty_unused_memory_level)
    losses = computed.losses | auxiliary()
    advance(state, num_samples, updated)
    loss = next(iter(losses.values()))
    # a number, or with Transformer Engine a tensor [1] that is still on its way
    norms = () if grad_norm is None else (torch.as_tensor(grad_norm, dtype=torch.float64).reshape(()),)
    state.last_update = (loss, *norms) if updated else state.last_update
    return StepMetrics(
        loss=loss,
        losses=losses,
        num_tokens=computed.num_tokens,
        num_samples=num_samples,
        grad_norm=norms[0] if norms else None,
        learning_rate=learning_rate,
        loss_scale=loss_scale,
        skipped=not updated,
    )


def _compute(state: TrainState, batches: Microbatches, forward_step: ForwardStep) -> Computed:
    plain = forward_step is gpt_forward_step
    clear_gradients(state, spare=plain)
    reports = forward_backward(state, batches, forward_step, forward_only=False, plain=plain)
    return Computed(reports, *reduce_reports(state, reports, forward_step))


def clear_gradients(state: TrainState, *, spare: bool = False) -> None:
    """Begin a step: training mode, gradients of zero, but with `spare` for those that the first microbatch writes."""
    for chunk in [chunk for chunk in state.chunks if not chunk.training]:
        chunk.train()
    zero_gradients(state.chunks, spare=spare)
    state.optimizer.zero_grad()


def _update(state: TrainState, allowed: bool, empty_unused_memory_level: int) -> tuple[bool, Any]:
    """Whether the weights were updated, and the gradient norm."""
    if empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    outcome: Any = stepped(state) if allowed else (False, None, None)
    if empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    # an optimizer that is not chained says 0.0 where it does not clip (mcore's optimizer.py)
    unknown = not hasattr(state.optimizer, "chained_optimizers") and state.optimizer.config.clip_grad <= 0
    return outcome[0], None if unknown else outcome[1]


def eval_step(
    state: TrainState,
    data: Iterable[Batch],
    *,
    num_microbatches: int,
    forward_step: ForwardStep = gpt_forward_step,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
) -> StepMetrics:
    """Compute the losses of the next `num_microbatches` microbatches with the weights as they are; changes nothing.

    Arguments and errors are those of `train_step`, but that `data` may be a list, too, ranks are not compared, and a
    step in parts may be under way. Dropout is off, and no random stream is drawn from. mcore computes the losses of
    routers and of multi-token prediction in training only.
    """
    with evaluating(state), torch.no_grad():
        batches = Microbatches(data, num_microbatches, micro_batch_size, seq_length)
        reports = forward_backward(state, batches, forward_step, forward_only=True)
        losses, tokens = reduce_reports(state, reports, forward_step)
    num_samples = batches.micro_batch_size * num_microbatches * state.groups.dp.size()
    return StepMetrics(next(iter(losses.values())), losses, num_tokens=tokens, num_samples=num_samples)


@contextlib.contextmanager
def evaluating(state: TrainState) -> Generator[None]:
    """While inside, the model is in evaluation mode and holds the weights after the last step."""
    require_memory(state, "weights")
    training, put_back = [chunk.training for chunk in state.chunks], remember_fp8_scales(state.chunks, state.config)
    with usable(state.groups), gathered_parameters(state.chunks, whole=False):
        try:
            for chunk in state.chunks:
                chunk.eval()
            yield
        finally:
            put_back()
            for chunk, mode in zip(state.chunks, training, strict=True):
                chunk.train(mode)
