"""A step in parts, for a host that owns the loop: begin, forward and backward any number of times, finish.

Gradients add up in DDP's buffers, and nothing passes between data parallel ranks until `finish_step` reduces them.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from minloop.alive import on_usable_groups
from minloop.data import Batch
from minloop.data_parallel import require_trainable, require_unread
from minloop.fully_sharded import refuse_fully_sharded
from minloop.losses import LossFunction, Report, divide_gradients, exact_token_count, reduce_reports
from minloop.microbatches import Microbatches
from minloop.schedule import ForwardStep, check_count, run_schedule
from minloop.state import OpenStep, TrainState, require_optimizer
from minloop.step import Computed, StepMetrics, clear_gradients, gpt_forward_step, take_step


@on_usable_groups
def begin_step(state: TrainState, *, num_tokens: torch.Tensor | float | None = None) -> None:
    """Begin a step in parts: gradients are cleared, the model is put in training mode.

    ``begin_step; forward_backward; finish_step`` is `train_step`, bit for bit, whether the microbatches are given in
    one call or in several; only the reported losses of routers are then added up in another order.

    Args:
        num_tokens: tokens with loss in the global batch, if the host knows: losses are then divided by it, as
            `train_step` does with its own forward step, and not all gradients when they are there.
    Raises:
        ValueError: a fully sharded model.
        RuntimeError: as `train_step`; a CUDA graph of whole steps, cuda_graph_impl="full_iteration".
    """
    if state.config.cuda_graph_impl == "full_iteration" and torch.cuda.is_available():
        raise RuntimeError("cuda_graph_impl='full_iteration' replays whole steps, not parts: use train_step, or 'none'")
    refuse_fully_sharded(state.chunks, "begin_step: take whole steps with train_step, or")
    require_optimizer(state)
    clear_gradients(state)
    zero = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    # fp16 has no room for gradients that small, see minloop.schedule
    ahead = state.config.calculate_per_token_loss and not state.config.fp16
    tokens = None if num_tokens is None or not ahead else zero + num_tokens
    state.open_step = OpenStep(tokens, counted=zero)


@on_usable_groups
def forward_backward(
    state: TrainState,
    data: Iterable[Batch],
    *,
    num_microbatches: int,
    forward_step: ForwardStep = gpt_forward_step,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
) -> None:
    """Add the gradients of the next `num_microbatches` microbatches of this rank to those of the open step.

    All ranks call it as often, with as many microbatches. Those of one call may differ in length where the config has
    ``variable_seq_lengths=True``, or without pipeline parallelism; calls always may. An error ends the step: if
    every rank raises it, begin another. If some do, the others wait for them, in a pipeline or between tensor parallel
    ranks, until their time-out, and the groups cannot be used again, which later calls say.

    Args:
        data: a list or an iterator of batches.
        forward_step, micro_batch_size, seq_length: as in `train_step`; the loss function's number of tokens decides how
            microbatches are weighed: with ``calculate_per_token_loss`` (as `build_config` sets it) gradients are those
            of the sum of losses over the sum of tokens, without it those of the mean over microbatches of their means.
    Raises:
        RuntimeError: no step is open; the data ended before; another rank raised and left this one waiting.
        ValueError: as `train_step`.
    """
    step = _open(state, "forward_backward")
    state.open_step = None  # should it fail
    batches = Microbatches(
        data, num_microbatches, micro_batch_size, seq_length, varying=may_vary(state), iteration=state.iteration + 1
    )
    check_count(state.config, num_microbatches)
    counting = partial(_counting_step, forward_step, step.counted)
    weight = num_microbatches / (step.num_microbatches or [num_microbatches])[0]
    with (
        _without_reduction(state, 1.0 if state.config.calculate_per_token_loss else weight),
        exact_token_count(state.config, counting, step.tokens) as exact,
        state.auxiliary_losses.recording(),
        _gradients_kept(state) if step.num_microbatches else contextlib.nullcontext(),
    ):
        step.reports += run_schedule(state, batches, batches.take(), exact, forward_only=False)
    for name, total in state.auxiliary_losses.reduce(state.config, state.groups, 1).items():
        step.auxiliary[name] = step.auxiliary.get(name, 0.0) + total
    step.forward_step = step.forward_step or forward_step
    step.num_microbatches.append(num_microbatches)
    rows = (len(batch["tokens"]) if "tokens" in batch else batches.micro_batch_size for batch in batches.take())
    step.num_samples += sum(rows) * state.groups.dp.size()
    state.open_step = step


@on_usable_groups
def finish_step(state: TrainState) -> StepMetrics:
    """Reduce the gradients over data parallel ranks, update the weights, advance counters and schedule.

    Returns:
        What `train_step` returns, of all microbatches since `begin_step`.
    Raises:
        RuntimeError: no step is open, or nothing was computed in it.
    """
    step = _open(state, "finish_step")
    if step.forward_step is None:
        raise RuntimeError("finish_step without forward_backward: there are no gradients")
    state.open_step = None
    for chunk in state.chunks:
        if chunk.ddp_config.overlap_grad_reduce:  # which no backward pass has begun
            chunk.start_grad_sync()
    finalize_model_grads(state.chunks, None, pg_collection=state.groups)
    if not state.config.calculate_per_token_loss:
        calls = sum(step.num_microbatches) / step.num_microbatches[0]
        for chunk in state.chunks if calls != 1 else ():
            chunk.scale_gradients(1 / calls)
    elif step.tokens is None:
        divide_gradients(state.chunks, step.counted, state.groups)
    reports = reduce_reports(state, step.reports, step.forward_step)
    count = sum(step.num_microbatches)
    auxiliary = {name: total / count for name, total in step.auxiliary.items()}
    return take_step(state, Computed(step.reports, *reports), lambda: auxiliary, step.num_samples)


def may_vary(state: TrainState) -> bool:
    """Whether microbatches of one schedule may have different lengths: stages must then tell each other theirs."""
    return state.config.variable_seq_lengths or state.groups.pp.size() == 1


def _open(state: TrainState, caller: str) -> OpenStep:
    if state.open_step is None:
        raise RuntimeError(f"{caller} without begin_step: a step begins with begin_step(state) and ends by finish_step")
    require_trainable(state.chunks)
    require_unread(state.chunks)
    return state.open_step


@contextlib.contextmanager
def _without_reduction(state: TrainState, weight: float) -> Generator[None]:
    """While inside, gradients stay on their rank, and losses are multiplied by `weight`."""
    config, names = state.config, ("finalize_model_grads_func", "no_sync_func", "grad_scale_func")
    before = {name: getattr(config, name) for name in names}
    scale: Any = config.grad_scale_func
    config.finalize_model_grads_func = config.no_sync_func = None
    if weight != 1:
        config.grad_scale_func = lambda loss: scale(loss) * weight
    try:
        with contextlib.ExitStack() as stack:
            for chunk in state.chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextlib.contextmanager
def _gradients_kept(state: TrainState) -> Generator[None]:
    """While inside, the schedule's first microbatch is not one of a step: in FP8 Transformer Engine would cast the same
    weights again, and write `main_grad` anew (its linear.py:1576), without the gradients of the calls before."""
    for chunk in state.chunks:
        vars(chunk)["set_is_first_microbatch"] = _nothing
    try:
        yield
    finally:
        for chunk in state.chunks:
            del vars(chunk)["set_is_first_microbatch"]


def _nothing() -> None:
    """In place of `set_is_first_microbatch`."""


def _counting_step(
    forward_step: ForwardStep, counted: torch.Tensor, data: Iterator[Any], model: Any
) -> tuple[torch.Tensor, LossFunction]:
    output, loss_function = forward_step(data, model)

    def count(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        values = loss_function(output)
        if len(values) == 3:  # others are refused by who called
            counted.add_(values[1])
        return values

    return output, count
