"""What a rank holds of the whole model: each parameter's place in a full tensor whose name no layout changes."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.architecture import unwrapped

Leaf = ShardedTensor | ShardedTensorFactory


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a full tensor.

    Attributes:
        key: the checkpoint's name.
        numbers: the layer and the expert, from 0, where the checkpoint stacks them under one name.
        shape: that of the full tensor, without the stacked dimensions.
        place: which block it is.
        tensor: its values.
        is_main: whether this rank is the first of those that hold it.
    """

    key: str
    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    place: tuple[slice, ...]
    tensor: torch.Tensor
    is_main: bool

    def full_name(self) -> str:
        """The full tensor's: the key, with the layer and the expert after it where the checkpoint stacks them."""
        return self.key + "".join(f"[{number}]" for number in self.numbers)


def sharded_parameters(
    chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> Iterator[tuple[Leaf, torch.nn.Parameter]]:
    """This rank's parameters, each with its place in the whole model."""
    metadata = {"singleton_local_shards": False, "dp_cp_group": groups.dp_cp}
    for chunk in chunks:
        model: Any = unwrapped(chunk)
        for leaf in nested_values(model.sharded_state_dict(metadata=metadata)):
            if isinstance(leaf, Leaf) and isinstance(leaf.data, torch.nn.Parameter):
                yield leaf, leaf.data


def parts(leaf: Leaf, value: torch.Tensor) -> Iterator[Part]:
    """Cut a value of a parameter's shape into the blocks that it is of full tensors: views of `value`."""
    if isinstance(leaf, ShardedTensorFactory):
        built: Any = nested_values(dataclasses.replace(leaf, data=value).build())
    else:
        built = [dataclasses.replace(leaf, data=value, dtype=value.dtype)]
    for tensor in built:
        index: Any = tensor.global_slice()
        stacked = tensor.prepend_axis_num
        yield Part(
            tensor.key,
            tuple(index[:stacked]),
            tuple(tensor.global_shape[stacked:]),
            tuple(index[stacked:]),
            tensor.data,
            is_main_replica(tensor.replica_id),
        )
