"""Faults on purpose: to see what a run does about a loss that is not a number before one comes by itself."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from minloop.losses import LossFunction, Report
from minloop.schedule import ForwardStep
from minloop.state import TrainState


def inject_fault(
    forward_step: ForwardStep,
    state: TrainState,
    *,
    iteration: int,
    rank: int = 0,
    where: Literal["loss", "gradient"] = "loss",
    factor: float = math.nan,
    times: int | None = 1,
) -> ForwardStep:
    """Return `forward_step` with a fault: on one rank, in one iteration, losses or gradients are multiplied.

    Args:
        iteration: the step's number as it is logged, from 1.
        rank: global rank, for "loss" one of the last pipeline stage.
        factor: NaN, infinity, or a number for a spike.
        times: in so many microbatches, counted over reruns: 1 is a transient fault. None, all of them, is a persistent
            one.
    """
    left = math.inf if times is None else times

    def step(data: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        nonlocal left
        output, loss_function = forward_step(data, model)
        if state.iteration + 1 != iteration or dist.get_rank() != rank or left <= 0 or not output.requires_grad:
            return output, loss_function
        if where == "gradient":
            left -= 1
            output.register_hook(lambda gradient: gradient * factor)
            return output, loss_function
        return output, partial(multiplied, loss_function)

    def multiplied(loss_function: LossFunction, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        nonlocal left
        left -= 1  # here, as chunks of the model that have no loss take part in the step, too
        total, tokens, report = loss_function(output)
        # a report may be on the CPU
        return total * factor, tokens, {name: value * value.new_tensor([factor, 1.0]) for name, value in report.items()}

    return step
