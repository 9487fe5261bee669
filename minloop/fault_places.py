"""Where a fault is: ranks, microbatches and samples, or parameters."""

import math
import re
import socket

import torch
import torch.distributed as dist

from minloop.data_parallel import named_gradients, reduced_gradients
from minloop.microbatches import Microbatches
from minloop.state import TrainState
from minloop.step import Computed


def any_wrong_gradient(state: TrainState) -> torch.Tensor:
    """Whether this rank holds a gradient that is not finite, 0-d bool; any such element shows in a buffer's sum."""
    gradients = reduced_gradients(state.chunks)
    if state.config.fp16 or not gradients:
        return torch.zeros((), dtype=torch.bool, device=torch.cuda.current_device())
    return ~torch.stack([gradient.sum(dtype=torch.float32) for gradient in gradients]).isfinite().all()


def look(
    kind: str, state: TrainState, batches: Microbatches, computed: Computed
) -> tuple[list[str], list[str], float, float]:
    """Where this rank has the fault: places, parameters, its largest loss of a microbatch, one that is not finite."""
    loss = min((float(loss) for loss in computed.losses.values()), key=math.isfinite)
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    if kind == "gradient":
        named = [pair for chunk in state.chunks for pair in named_gradients(chunk)]
        wrong = [re.sub(r"^(module\.)+", "", name) for name, gradient in named if not gradient.isfinite().all()]
        return ([here] if wrong else []), wrong[:3], 0.0, loss
    # [microbatches, losses]
    values = [[float(value[0] / value[1].clamp(min=1)) for value in report.values()] for report in computed.reports]
    means = [first for first, *_ in values]
    indices = [index for index, row in enumerate(values) if not all(map(math.isfinite, row))]
    if kind == "spike":
        indices = [means.index(max(means))] if means else []
    places = [f"{here}, microbatch {index} ({_samples(state, batches, index)})" for index in indices]
    return places, [], max(means, default=-math.inf), loss


def _samples(state: TrainState, batches: Microbatches, microbatch: int) -> str:
    """The samples of a microbatch: the batch's own "sample_ids", or the places in the order of minloop's loaders."""
    if (ids := batches.take()[microbatch].get("sample_ids")) is not None:
        return f"sample_ids {ids.tolist()}"
    size, dp = batches.micro_batch_size, state.groups.dp
    first = state.consumed_samples + (microbatch * dp.size() + dp.rank()) * size
    return f"samples {first} to {first + size - 1} of the run"
