"""Weights and gradients in their full shapes, under names that no layout changes: by them two layouts are compared."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.checkpoint.parts import Part, parts, sharded_parameters
from minloop.checkpoint.streaming import Stream
from minloop.data_parallel import gathered_parameters
from minloop.fully_sharded import refuse_fully_sharded
from minloop.state import TrainState, require_memory

ValueOf = Callable[[torch.nn.Parameter], torch.Tensor | None]


def full_weights(state: TrainState) -> dict[str, torch.Tensor]:
    """Gather every weight to the first rank, on the CPU, in its full shape and fp32; other ranks get an empty dict.

    A name is the checkpoint's, with the layer (from 0) and the expert after it where the checkpoint stacks them:
    ``decoder.layers.mlp.linear_fc1.weight[3]``. Meant for small models and tests: it holds the whole model at once.
    """
    with gathered_parameters(state.chunks):
        return _gather(state, lambda parameter: parameter)


def full_gradients(state: TrainState) -> dict[str, torch.Tensor]:
    """Gather every trainable weight's gradient as `full_weights` does; call it between the backward pass and the step.

    fp16 gradients are divided by the loss scale.
    With the distributed optimizer a rank holds the sum of its own shard only: the gradient buffers are completed in
    place, from the ranks that hold the rest.
    """
    require_memory(state, "gradients")
    refuse_fully_sharded(state.chunks, "full_gradients: compare full_weights after a step, or")
    for chunk in state.chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group: Any = bucket_group.intra_distributed_optimizer_instance_group
                for bucket in bucket_group.buckets:
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    scale = float(state.optimizer.get_loss_scale()) if state.config.fp16 else 1.0
    return {name: value / scale for name, value in _gather(state, lambda p: getattr(p, "main_grad", None)).items()}


def gather_objects[T](value: T, groups: ProcessGroupCollection) -> list[T]:
    """Gather a value from every rank to the first, in no promised order; other ranks get a list without meaning."""
    values = [value]
    for group in (groups.tp_dp_cp, groups.pp):
        received: list[Any] = [None] * group.size()
        first = dist.get_process_group_ranks(group)[0]
        dist.gather_object(values, received if dist.get_rank() == first else None, dst=first, group=group)
        values = [value for part in received if part is not None for value in part]
    return values


def from_first_rank[T](value: T, groups: ProcessGroupCollection) -> T:
    """Give every rank the first one's value."""
    values = [value]
    for group in (groups.pp, groups.tp_dp_cp):
        dist.broadcast_object_list(values, src=dist.get_process_group_ranks(group)[0], group=group)
    return values[0]


def _gather(state: TrainState, value_of: ValueOf) -> dict[str, torch.Tensor]:
    stream = Stream(_named_parts(state, value_of), state.groups)
    found = stream.tensors(list(stream.known), ranks=stream.ranks[:1])
    return {name: value.to(torch.promote_types(value.dtype, torch.float32)).cpu() for name, value in found}


def _named_parts(state: TrainState, value_of: ValueOf) -> Iterator[tuple[str, Part]]:
    for leaf, parameter in sharded_parameters(state.chunks, state.groups):
        value = value_of(parameter)
        if value is not None:
            yield from ((part.full_name(), part) for part in parts(leaf, value.detach()))
