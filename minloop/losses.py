"""Losses: what a GPT's output becomes, and how reports of microbatches and ranks become one number on every rank."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from minloop.data_parallel import reduced_gradients
from minloop.state import TrainState

Report = dict[str, torch.Tensor]
"""What a loss function reports of one microbatch: name → [sum, count], float32, not part of the graph."""

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Report]]
"""mcore's three-value contract: output → (sum of losses, number of tokens, report). The number may be fractional."""


def token_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Sum the losses of the tokens that count, by mcore's three-value contract.

    Args:
        loss_mask: [b, s] float32, 1 where a token counts, or the weight with which it counts.
        output: [b, s] float32, the loss of each token in nats.
    Returns:
        The sum (differentiable, 0-d), the number of tokens (0-d float32), and the report {"lm loss": [sum, tokens]}.
    """
    total = torch.sum(output.float() * loss_mask)
    tokens = loss_mask.sum()
    # stack copies: mcore's schedule divides the first value in place
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


@contextlib.contextmanager
def exact_token_count(
    config: TransformerConfig, forward_step: Callable[..., Any], known: torch.Tensor | None = None
) -> Generator[Callable[..., tuple[torch.Tensor, LossFunction]]]:
    """While inside, gradients are divided by the very number of tokens, at least 1, that the loss functions return.

    mcore's schedules add up integers. Yields the forward step to give to the schedule, whose loss functions count in
    float64.

    Args:
        known: that number for the global batch, 0-d float64, if it is known: then the losses are divided by it, which
            spares a pass over all gradients.
    """
    tokens = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    finalize, scale = config.finalize_model_grads_func, config.grad_scale_func

    def counting_step(*args: Any, **options: Any) -> tuple[torch.Tensor, LossFunction]:
        output, loss_function = forward_step(*args, **options)
        return output, partial(_counting_loss, config, tokens, loss_function)

    def finalize_by_tokens(model: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
        if finalize is not None:
            finalize(model, None, **options)
            if num_tokens is not None and known is None:
                divide_gradients(model, tokens, options["pg_collection"])

    config.finalize_model_grads_func = finalize_by_tokens
    if known is not None:
        share = known.clamp(min=1).reciprocal().float()
        config.grad_scale_func = lambda loss: (loss if scale is None else scale(loss)) * share
    try:
        yield counting_step
    finally:
        config.finalize_model_grads_func, config.grad_scale_func = finalize, scale


def divide_gradients(chunks: Sequence[Any], tokens: torch.Tensor, groups: ProcessGroupCollection) -> None:
    """Divide all gradients by the tokens of the global batch, which only the last pipeline stage has counted.

    mcore's `finalize_model_grads` would do it given the number, by a kernel that is slower for a divisor on the GPU.
    """
    dist.broadcast(tokens, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    dist.all_reduce(tokens, group=groups.dp_cp)
    multiply: Any = getattr(torch, "_foreach_mul_")  # noqa: B009  # torch gives it no type
    multiply(reduced_gradients(chunks), tokens.clamp(min=1).reciprocal().float())


def _counting_loss(
    config: TransformerConfig, tokens: torch.Tensor, loss_function: LossFunction, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    values = loss_function(output)
    if len(values) != 3:
        raise ValueError(
            f"a loss function must return (sum of losses, number of tokens, report); it returned {len(values)} values"
        )
    total, count, report = values
    tokens += count
    if not config.calculate_per_token_loss:  # the schedule divides each microbatch by its own number
        total, count = total / count.clamp(min=1), torch.ones_like(count)
    return total, count.to(torch.int32), report


def reduce_reports(
    state: TrainState, reports: list[Report], forward_step: Callable[..., Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sum [sum, count] over microbatches, data and context parallel ranks; give every pipeline stage the result.

    Returns:
        The means by name, and the count of the first, 0-d float64 tensors.
    Raises:
        ValueError: a report that is empty or not of the form {name: [sum, count]}.
    """
    groups, last = state.groups, dist.get_process_group_ranks(state.groups.pp)[-1]
    for report in reports:
        if not report or any(value.shape != (2,) for value in report.values()):
            shapes = {name: list(value.shape) for name, value in report.items()}
            raise ValueError(
                "a loss function must report {name: [sum, count]}, tensors of shape [2], for the mean over the global "
                f"batch; it reported {shapes}"
            )
    names = _report_names(state, reports, forward_step)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=torch.cuda.current_device())
    if reports:
        for report in reports:
            sums += torch.stack([report[name].detach().to(sums) for name in names])
        dist.all_reduce(sums, group=groups.dp_cp)
    if groups.pp.size() > 1:
        dist.broadcast(sums, src=last, group=groups.pp)
    return {name: row[0] / row[1].clamp(min=1) for name, row in zip(names, sums, strict=True)}, sums[0, 1]


def _report_names(state: TrainState, reports: list[Report], forward_step: Callable[..., Any]) -> list[str]:
    """The names that a forward step reports; stages without a loss learn them from the last one, once."""
    if state.groups.pp.size() == 1:
        return list(reports[0])
    if forward_step not in state.report_names:
        names: list[Any] = [list(reports[0]) if reports else None]
        dist.broadcast_object_list(names, src=dist.get_process_group_ranks(state.groups.pp)[-1], group=state.groups.pp)
        state.report_names[forward_step] = names[0]
    return state.report_names[forward_step]
