"""The shards that a rank of a fully sharded model holds, each with the place of its parameter in the whole model."""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minloop.architecture import unwrapped
from minloop.checkpoint.extra_state import tell_copies_apart
from minloop.checkpoint.flat_ranges import sharded_range
from minloop.checkpoint.full_names import Place
from minloop.master_weights import MASTER
from minloop.optimizer import inner_optimizers
from minloop.state import TrainState

FP32_PARAM = "fp32_param"
"""mcore's name for the master weights of bf16 weights."""


LEFT = ("step", MASTER)
"""What is not read of an optimizer's state: the master weights in it are those of Megatron FSDP once more."""


class Range(NamedTuple):
    """Which of a parameter's elements this rank holds: from `start` on. `shape` is this tensor parallel rank's."""

    shape: tuple[int, ...]
    start: int
    replica: int


@dataclasses.dataclass
class Shard:
    """This rank's part of a parameter.

    Attributes:
        name: in the model, the same on all ranks.
        leaf: mcore's place of the whole parameter in `torch_dist`.
        range: this part of it.
        weight: the model's values, or Megatron FSDP's master weights; flat, like the next.
        state: what the optimizer holds: moments, and master weights of torch FSDP2.
    """

    name: str
    leaf: Any
    range: Range
    weight: torch.Tensor
    state: dict[str, torch.Tensor]

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterator[ShardedTensor]:
        """The rectangles of the full tensor `key` that `tensor`, of this shard, is."""
        replica = (*self.leaf.replica_id[:2], self.range.replica)
        return sharded_range(dataclasses.replace(self.leaf, key=key, replica_id=replica), tensor, self.range.start)

    def in_files(self, block: ShardedTensor, halves: bool) -> tuple[str, Place, tuple[int, ...]]:
        """The name in files of the full tensor that a block of the weight belongs to, its place, and its shape.

        Args:
            halves: the two halves of a gated linear layer are tensors of their own.
        """
        stacked = len(block.global_shape) - len(self.range.shape)
        name, shape = self.name + block.key.removeprefix(self.leaf.key), tuple(block.global_shape)
        rows, row = shape[stacked:][:1], 0
        if halves and isinstance(self.leaf, ShardedTensorFactory) and ".linear_fc1." in self.name:
            rows = (rows[0] // 2,)
            row = rows[0] if block.global_offset[stacked] >= rows[0] else 0
            name += "_v" if row else "_w"
        place = Place(block.key, tuple(block.global_offset[:stacked]), row, shape)
        return name, place, (*rows, *shape[stacked + 1 :])

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer changes it."""
        return self.leaf.data.requires_grad


def own_shards(state: TrainState, metadata: dict[str, Any]) -> tuple[list[Shard], dict[str, Any]]:
    """This rank's shards of all parameters, empty ones too; and the rest of the model's sharded state dict."""
    chunk: Any = state.chunks[0]  # the only one: there are no pipeline stages
    megatron = isinstance(chunk, FullyShardedDataParallel)
    ranges = _megatron_ranges(chunk, state) if megatron else _torch_ranges(chunk)
    states = {
        id(parameter): own
        for optimizer in inner_optimizers(state.optimizer)
        for parameter, own in optimizer.optimizer.state.items()
    }
    model, shards, rest = unwrapped(chunk), list[Shard](), dict[str, Any]()
    parameters = dict(model.named_parameters())
    with _without_data(model, parameters, ranges) as stand_ins:
        content = model.sharded_state_dict(metadata=metadata | {"dp_cp_group": state.groups.dp_cp})
    tell_copies_apart(content, state.groups)
    for key, leaf in content.items():
        name = stand_ins.get(id(getattr(leaf, "data", None)))
        if name is None:
            rest[key] = leaf
            continue
        parameter = parameters[name]
        main = getattr(parameter, "main_param", None)
        own = states.get(id(parameter if main is None else main), {})
        held = {kind: flat(tensor) for kind, tensor in own.items() if kind not in LEFT and torch.is_tensor(tensor)}
        if main is not None:
            held[FP32_PARAM] = flat(main)
        everywhere = next(iter(handle_experts_in_state_dict({name: None}, state.config.num_moe_experts)))
        shards.append(Shard(everywhere, leaf, ranges[id(parameter)], flat(parameter), held))
    return shards, rest


@contextlib.contextmanager
def _without_data(
    model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter], ranges: dict[int, Range]
) -> Generator[dict[int, str]]:
    """While inside, the model's parameters are of the shapes that one rank without FSDP has, without data.

    Yields:
        Their names, by their ids.
    """
    stand_ins: list[torch.nn.Parameter] = []

    def put(name: str, parameter: torch.nn.Parameter) -> None:
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, parameter)

    try:
        for name, parameter in parameters.items():
            stand_in = torch.nn.Parameter(
                torch.empty(ranges[id(parameter)].shape, device="meta"), requires_grad=parameter.requires_grad
            )
            vars(stand_in).update(vars(parameter))  # mcore's marks
            stand_ins.append(stand_in)
            put(name, stand_in)
        yield {id(stand_in): name for stand_in, name in zip(stand_ins, parameters, strict=True)}
    finally:
        for name, parameter in parameters.items():
            put(name, parameter)


def _megatron_ranges(chunk: Any, state: TrainState) -> dict[int, Range]:
    chunk.synchronize_param_gather()  # from here on, the module's parameters are the optimizer's
    config, buffer = chunk.ddp_config, chunk.param_and_grad_buffer
    whole = config.data_parallel_sharding_strategy == "no_shard"
    replica = 0
    if whole:
        replica = state.groups.dp_cp.rank()
    elif config.num_distributed_optimizer_instances > 1 and config.outer_dp_sharding_strategy == "no_shard":
        replica = state.groups.inter_dist_opt.rank()
    by_name, ranges = dict(buffer.optimizer_named_parameters), dict[int, Range]()
    for group in buffer.parameter_groups:
        weights = group.main_weight_buffer or group.model_weight_buffer
        for item, parameter in enumerate(group.params):
            start = 0 if whole else weights._get_item_slice_in_shard(item)[0]
            ranges[id(by_name[buffer.param_to_name[parameter]])] = Range(tuple(parameter.shape), start, replica)
    return ranges


def _torch_ranges(chunk: torch.nn.Module) -> dict[int, Range]:
    for unit in chunk.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    ranges: dict[int, Range] = {}
    for parameter in cast(Any, chunk.parameters()):
        mesh, placements = parameter.device_mesh, parameter.placements
        _, (row, *_) = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        ranges[id(parameter)] = Range(tuple(parameter.shape), row * math.prod(parameter.shape[1:]), 0)
    return ranges


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it: the same memory, [elements]."""
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).view(-1)
