"""ZeRO-1's state as rectangles of full tensors: each rank saves and loads its own part, and nothing is gathered.

mcore's distributed optimizer cuts its buffers among data parallel ranks without regard to parameters. Its form
`fully_reshardable` has every rank gather them whole, through pageable memory, before a save, and read them whole in a
load. But a range of a parameter's elements is a few rectangles (the end of a row, whole rows, the beginning of a row),
and a checkpoint may hold rectangles of any size: stored are the same full tensors under the same names, which mcore
reads as its own, and whose parts, however stored, are read here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from minloop.master_weights import MASTER, is_on_host, joined, make_missing_state, split

FULLY_RESHARDABLE = "fully_reshardable"
FLAT = "flat"
"""In the state of a parameter: this rank's range of each tensor, of which the rectangles are views."""


def sharded_content(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """What the optimizer saves, or a place to load it into: as of its own `sharded_state_dict`, fully reshardable.

    That one also collects garbage, for a fifth of a second in which training waits.

    Args:
        model: mcore's sharded state dict of the model.
    """
    made_by_mcore = is_loading and is_on_host(optimizer)
    if optimizer.config.use_precision_aware_optimizer and not made_by_mcore:
        make_missing_state(optimizer.optimizer)
    if is_loading:
        optimizer.load_state_dict(optimizer.state_dict())  # which makes moments where there are none yet
    state = {
        "param_state": _sharded_state(optimizer, model, is_loading),
        "param_state_sharding_type": FULLY_RESHARDABLE,
    }
    own = optimizer.state_dict()
    for group in own["optimizer"]["param_groups"]:  # in which mcore's optimizer on the CPU has classes
        for name in [name for name, value in group.items() if callable(value)]:
            del group[name]
    return own | state


def _sharded_state(optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool) -> dict[int, Any]:
    """The state of the parameters that this rank has a range of, under mcore's names and in float32."""
    leaves = {id(leaf.data): leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    content: dict[int, Any] = {}
    for number, (parameter, start, _) in enumerate(_ranges(optimizer)):
        leaf, tensors = leaves[id(parameter)], _tensors(optimizer, parameter)
        if is_loading and parameter.dtype == torch.float32:  # of which the master weights are views: both are read
            tensors["param"] = tensors["param"].clone()
        replica = (*leaf.replica_id[:2], optimizer.distributed_optimizer_instance_id)
        content[number] = {FLAT: LocalNonpersistentObject(tensors)}
        for name, flat in tensors.items():
            named = replace(leaf, key=f"optimizer.state.{name}.{leaf.key}", replica_id=replica)
            content[number][name] = dict(enumerate(sharded_range(named, flat, start)))
    return content


def load_state(optimizer: DistributedOptimizer, loaded: dict[int, Any], *, from_weights: bool) -> None:
    """Hand the optimizer what was read into its `sharded_content`.

    Args:
        from_weights: take the master weights from the weights, which were read before.
    """
    on_host = is_on_host(optimizer)
    for number, (parameter, start, stop) in enumerate(_ranges(optimizer)):
        tensors = loaded[number][FLAT]
        if from_weights:
            tensors["param"].copy_(parameter.detach().reshape(-1)[start:stop])
        # mcore's HybridDeviceOptimizer moves them to where each is wanted
        device = "cpu" if on_host else parameter.device
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        if (found := _remainders(optimizer, parameter)) is not None:
            weight, on_device["param"] = split(on_device["param"])
            found[0].copy_(weight)
        optimizer._set_main_param_and_optimizer_states(parameter, on_device)  # pyright: ignore[reportPrivateUsage]
    if on_host:
        cast(Any, optimizer.optimizer)._sync_hdo_state_to_sub_optimizers()


def rectangles(
    shape: Sequence[int], strides: Sequence[int], first: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut what a block of memory has in common with a range of memory into rectangles, in order.

    Args:
        shape, strides, first: the block's: element (i, j) lies at first + i × strides[0] + j × strides[1]. Strides
            fall, as in a contiguous tensor or in columns of one: no row reaches into the next.
        start, stop: the range.
    Yields:
        Each rectangle's place in the block and its shape.
    """
    if not shape:
        if start <= first < stop:
            yield (), ()
        return
    step, rest = strides[0], shape[1:]
    length = 1 + sum((size - 1) * stride for size, stride in zip(rest, strides[1:], strict=True))  # of a row

    def cut(rows: range) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for row in rows:
            for place, size in rectangles(rest, strides[1:], first + row * step, start, stop):
                yield (row, *place), (1, *size)

    # rows from `above` to `below` have elements in the range, those from `top` to `bottom` no others
    above = max(0, (start - length - first) // step + 1)
    below = min(shape[0], -((first - stop) // step))
    top = max(above, -((first - start) // step))
    bottom = min(shape[0], (stop - length - first) // step + 1)
    yield from cut(range(above, min(top, below)))
    if top < bottom:
        yield (top, *(0 for _ in rest)), (bottom - top, *rest)
    yield from cut(range(max(top, bottom), below))


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """The parameters of which this rank has a range, with its start and stop among the parameter's elements."""
    for of_buffer in optimizer.gbuf_ranges:
        for of_buckets in of_buffer.values():
            for bucket in of_buckets:
                for parameter, places in bucket["param_map"].items():
                    yield parameter, places["param"].start, places["param"].end


def _tensors(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """This rank's range of the parameter's master weights and moments, flat and in float32.

    The optimizer's own tensors, or copies on the CPU if it holds them in another precision.
    """
    held = optimizer._get_main_param_and_optimizer_states(parameter)  # pyright: ignore[reportPrivateUsage]
    tensors = {name: held[name].detach() for name in ("param", *optimizer.optimizer_state_keys)}
    if (found := _remainders(optimizer, parameter)) is not None:
        tensors["param"] = joined(*found)
    if optimizer.config.use_precision_aware_optimizer:
        if (weight := _own_weight(optimizer, parameter)).dtype == torch.float32 and not is_on_host(optimizer):
            tensors["param"] = weight.detach()  # Transformer Engine updates it, and not the copy that it keeps
        return {name: tensor.float().cpu() for name, tensor in tensors.items()}
    return tensors


def _own_weight(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's range of the parameter, as the optimizer inside mcore's has it."""
    group, place = optimizer.model_param_group_index_map[parameter]
    return optimizer.optimizer.param_groups[group]["params"][place]


def _remainders(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter) -> tuple[Any, Any] | None:
    """This rank's range of bf16 weights, and what they lack of their master weights, where that alone is kept."""
    weight = _own_weight(optimizer, parameter)
    remainder = optimizer.optimizer.state.get(weight, {}).get(MASTER)
    return (weight, remainder) if remainder is not None and remainder.dtype == torch.int16 else None


def sharded_range(leaf: Any, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """mcore's description of the elements of a parameter from `start` on, which are `flat`."""
    for block in blocks(leaf):
        strides, first, stacked = block.data.stride(), block.data.storage_offset(), block.prepend_axis_num
        for place, size in rectangles(block.data.shape, strides, first, start, start + flat.numel()):
            begin = first - start + sum(index * stride for index, stride in zip(place, strides, strict=True))
            data = flat.as_strided(size, strides, flat.storage_offset() + begin)[(None,) * stacked]
            offset = map(sum, zip(block.global_offset, (0,) * stacked + place, strict=True))
            yield ShardedTensor(
                block.key,
                data,
                data.dtype,
                tuple(data.shape),
                block.global_shape,
                tuple(offset),
                axis_fragmentations=None,
                replica_id=leaf.replica_id,
                allow_shape_mismatch=block.allow_shape_mismatch,
            )


def blocks(leaf: Any) -> Iterator[Any]:
    """The blocks of full tensors that a parameter is, as views of one tensor of its shape without data.

    Raises:
        ValueError: mcore does more than cut this parameter.
    """
    whole = torch.empty(leaf.data.shape, dtype=torch.float32, device="meta")
    if not isinstance(leaf, ShardedTensorFactory):
        yield replace(leaf, data=whole, dtype=whole.dtype)
        return
    for block in nested_values(replace(leaf, data=whole).build()):
        if block.data is not whole and block.data._base is not whole:
            raise ValueError(
                f"{leaf.key}: its form in checkpoints is no view of the parameter, so that a shard of it has no place "
                "there; use wrap_ddp with use_distributed_optimizer=False"
            )
        yield block
