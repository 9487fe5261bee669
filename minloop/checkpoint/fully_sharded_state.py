"""What a rank of a fully sharded state saves and loads: its own shards, as rectangles; nothing is gathered.

Megatron FSDP's optimizer works on fp32 master weights, of which the model's are copies; torch FSDP2's on the weights
themselves or, with bf16 weights, on copies in fp32. Both, and the moments, are ranges of a parameter's elements, and
such a range is a few rectangles (see `flat_ranges`). They load from, and into, any kind of data parallelism.
"""

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from minloop.architecture import unwrapped
from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.extra_state import EXTRA_STATE, is_extra_state, letting_checked_states_in
from minloop.checkpoint.flat_ranges import blocks
from minloop.checkpoint.full_names import FSDP_DTENSOR, OPTIMIZER_STATE, TORCH_DCP, FileNames, Place
from minloop.checkpoint.optimizer_state import MASTER_WEIGHT_PREFIX, saved_progress
from minloop.checkpoint.optimizer_steps import steps_taken
from minloop.checkpoint.shards import FP32_PARAM, Shard, flat, own_shards
from minloop.fully_sharded import FullySharded
from minloop.master_weights import follow_weights
from minloop.optimizer import inner_optimizers, is_torch_adam
from minloop.state import TrainState


def is_fully_sharded(state: TrainState) -> bool:
    """Whether the model is wrapped in Megatron FSDP or torch FSDP2."""
    return isinstance(state.chunks[0], FullySharded)


def content_to_save(state: TrainState, metadata: dict[str, Any]) -> tuple[dict[str, Any], FileNames]:
    """This rank's part of what is saved, under the names of the files; every rank calls it.

    Args:
        metadata: mcore's switches for the form of a checkpoint.
    Returns:
        mcore's sharded state dict of weights, and of the optimizer; and the names.
    Raises:
        ValueError: moments in a form that only Transformer Engine's optimizer can read.
        RuntimeError: the optimizer holds nothing for a weight that it trains.
    """
    shards, model = own_shards(state, metadata)
    with agreed():
        _check(state, shards)
    names = _file_names(state, shards)
    tensors: dict[str, Any] = {}
    for shard in shards:
        for kind, tensor in {"": shard.weight, **shard.state}.items():
            for piece in shard.pieces(shard.leaf.key, tensor) if tensor.numel() else ():
                name, place, shape = shard.in_files(piece, names.format == FSDP_DTENSOR)
                name = names.state(name, kind) if kind else names.weight(name)
                tensors[f"{name} {len(tensors)}"] = _unstacked(piece, name, place, shape)
    groups = [group for optimizer in inner_optimizers(state.optimizer) for group in optimizer.param_groups]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    progress = {"param_groups": settings, "step": steps_taken(state)}
    return {"model": model, "tensors": tensors, "optimizer": progress}, names


def _unstacked(piece: ShardedTensor, name: str, place: Place, shape: tuple[int, ...]) -> ShardedTensor:
    """The same piece, of the full tensor that files call `name`."""
    stacked = len(place.numbers)
    first, *rest = piece.global_offset[stacked:] or (0,)
    return dataclasses.replace(
        piece,
        key=name,
        data=cast(torch.Tensor, piece.data)[(0,) * stacked],
        local_shape=tuple(piece.local_shape[stacked:]),
        global_shape=shape,
        global_offset=(first - place.row, *rest)[: len(shape)],
    )


def _file_names(state: TrainState, shards: list[Shard]) -> FileNames:
    """The names of all weights of the model; every rank calls it."""
    chunk: Any = state.chunks[0]
    own, wrapped = (next(module.named_parameters())[0] for module in (unwrapped(chunk), chunk))
    if isinstance(chunk, FullyShardedDataParallel):
        names = FileNames(FSDP_DTENSOR, "model.module.", OPTIMIZER_STATE + wrapped.removesuffix(own), {})
    else:
        names = FileNames(TORCH_DCP, "model.", OPTIMIZER_STATE, {})
    for shard in shards:
        for block in blocks(shard.leaf):
            name, place, _ = shard.in_files(block, names.format == FSDP_DTENSOR)
            names.places[name] = place
    everyones: list[Any] = [None] * state.groups.ep.size()  # experts lie on other ranks
    dist.all_gather_object(everyones, names.places, group=state.groups.ep)
    return names._replace(places={name: place for places in everyones for name, place in places.items()})


def _check(state: TrainState, shards: list[Shard]) -> None:
    config = state.optimizer.config
    if any(isinstance(optimizer.optimizer, HybridDeviceOptimizer) for optimizer in inner_optimizers(state.optimizer)):
        raise ValueError(
            "optimizer_cpu_offload=True with a fully sharded model: no checkpoint of it can be made or loaded; set it "
            "to False, or use wrap_ddp with use_distributed_optimizer=True"
        )
    for shard in shards:
        if not shard.is_trained or not shard.weight.numel():
            continue
        moments = {kind: tensor for kind, tensor in shard.state.items() if kind != FP32_PARAM}
        if config.optimizer == "adam" and not moments:
            raise RuntimeError(
                f"the optimizer holds no moments of {shard.name} (use_precision_aware_optimizer="
                f"{config.use_precision_aware_optimizer}): save after the first step"
            )
        for kind, tensor in moments.items():
            if tensor.numel() != shard.weight.numel():
                raise RuntimeError(f"{kind} of {shard.name} has {tensor.numel()} elements, not {shard.weight.numel()}")
            if tensor.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"{kind}_dtype={tensor.dtype} of a fully sharded model holds scaled values, which no checkpoint "
                    "of it takes: set it to torch.float32 or torch.bfloat16"
                )


def template(state: TrainState, metadata: dict[str, Any], saved_kind: str | None, known: Any) -> dict[str, Any]:
    """What to read, straight into this rank's shards; every rank calls it.

    Args:
        saved_kind: the optimizer's form as saved, see `content.optimizer_kind`; None to read weights alone.
        known: the names of the checkpoint's tensors.
    """
    shards, model = own_shards(state, metadata)
    if saved_kind is not None:
        if state.optimizer.config.use_precision_aware_optimizer and not all(shard.state for shard in shards):
            for optimizer in inner_optimizers(state.optimizer):  # Transformer Engine makes moments in its first step
                cast(Any, optimizer)._init_optimizer_states_with_dummy_values()
            shards, model = own_shards(state, metadata)
        with agreed():
            _check(state, shards)
    content = {str(number): _pieces(shard, saved_kind, known) for number, shard in enumerate(shards)}
    return {"model": model, "tensors": content}


def _pieces(shard: Shard, saved_kind: str | None, known: Any) -> dict[str, dict[int, ShardedTensor]]:
    tensors = {f"{OPTIMIZER_STATE}{kind}.": tensor for kind, tensor in shard.state.items()}
    finest = tensors.pop(f"{OPTIMIZER_STATE}{FP32_PARAM}.", shard.weight)  # of which coarser weights are copies
    if saved_kind is None:
        tensors, prefix = {}, ""
    else:
        prefix = MASTER_WEIGHT_PREFIX[saved_kind]
        if not shard.is_trained or any(prefix + block.key not in known for block in blocks(shard.leaf)):
            prefix = ""
    tensors[prefix] = finest
    return {
        prefix: dict(enumerate(shard.pieces(prefix + shard.leaf.key, tensor)))
        for prefix, tensor in tensors.items()
        if tensor.numel()
    }


@torch.no_grad()
def take_over(state: TrainState, loaded: dict[str, Any]) -> None:
    """After the shards were read: let the model's weights follow the master weights; every rank calls it."""
    chunk: Any = state.chunks[0]
    if isinstance(chunk, FullyShardedDataParallel):
        fsdp: Any = chunk.module
        fsdp.install_optimized_model_weights()
        if chunk.ddp_config.data_parallel_sharding_strategy in ("optim", "optim_grads"):
            fsdp.start_param_sync(force_sync=True)  # each rank has written its own part of the weights
        fsdp.synchronize_param_gather()
    else:
        for parameter in chunk.parameters():
            if (main := getattr(parameter, "main_param", None)) is not None:
                flat(parameter).copy_(flat(main))
    follow_weights(state.optimizer)
    with agreed(), letting_checked_states_in():
        put_the_rest(unwrapped(chunk), loaded["model"])


def set_step(state: TrainState, saved_optimizer: Any) -> None:
    """Let the optimizer count from where a checkpoint of any kind was saved; settings stay as they are."""
    step = saved_progress(saved_optimizer)["step"]
    for optimizer in inner_optimizers(state.optimizer):
        if is_torch_adam(optimizer.optimizer):
            for own in optimizer.optimizer.state.values():
                own["step"] = torch.full_like(own["step"], step)
        else:
            for group in optimizer.param_groups:
                if step or "step" in group:
                    group["step"] = int(step)


def put_the_rest(model: torch.nn.Module, loaded: dict[str, Any]) -> None:
    """Buffers, and what layers save beside weights."""
    buffers = dict(model.named_buffers())
    extra: dict[str, dict[str, Any]] = {}
    for name, value in loaded.items():
        if is_extra_state(name):
            layer, _, number = name.rpartition(EXTRA_STATE)
            extra.setdefault(layer.rstrip("."), {})[EXTRA_STATE + number] = value
        elif isinstance(value, torch.Tensor):
            buffers[name].copy_(value)
    for layer, states in extra.items():  # a grouped layer makes one of those of its experts as it loads them
        model.get_submodule(layer).load_state_dict(states, strict=False)
