"""Fully sharded data parallelism: mcore's Megatron FSDP and its wrapper of torch FSDP2 around the chunks."""

import contextlib
import copy
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from minloop.advice import say_choices
from minloop.checks import check_ddp_config
from minloop.distributed import created
from minloop.fsdp_checks import check_tied_weights, is_torch_fsdp
from minloop.meta_device import data_parallel_group, fill_shards, whole_when_reset
from minloop.wrapping_checks import check_wrapping

FullySharded = FullyShardedDataParallel | TorchFullyShardedDataParallel


def wrap_fsdp(
    chunks: Sequence[MegatronModule],
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroupCollection,
    *,
    fsdp_unit_modules: Sequence[type[torch.nn.Module]] | None = None,
) -> list[FullySharded]:
    """Shard optimizer states, gradients and weights over the data and context parallel ranks, as `ddp_config` says.

    Megatron FSDP, with `use_megatron_fsdp`: `data_parallel_sharding_strategy` "no_shard", "optim" (ZeRO-1),
    "optim_grads" (ZeRO-2) or "optim_grads_params" (ZeRO-3). `num_distributed_optimizer_instances` > 1 shards within
    groups of ranks that are each other's replicas (HSDP), and `outer_dp_sharding_strategy` "optim" shards optimizer
    states over all of them. Torch FSDP2, with a `TorchFullyShardedDataParallelConfig`: weights stay gathered between
    forward and backward pass with `reshard_after_forward=False`.
    All data parallel ranks get the weights of their group's first.
    With `fsdp_double_buffer`, which has room for two layers, weights cannot be read or loaded in full (`full_weights`,
    `load_weights`, `export_weights`, …); checkpoints can be saved and loaded.

    Args:
        fsdp_unit_modules: what is gathered at a time; by default mcore's, its layers.
    Raises:
        ValueError: a layout or option that this kind cannot train, see `minloop.fsdp_checks`; chunks or groups that do
            not go with it, see `minloop.wrapping_checks`; no module of `fsdp_unit_modules` in a model; with
            Megatron FSDP, ranks of the default group that are not in the layout.
    """
    config = get_model_config(chunks[0])
    if not (is_torch_fsdp(ddp_config) or ddp_config.use_megatron_fsdp):
        raise ValueError(
            "use_megatron_fsdp is False: set it to True for Megatron FSDP, give a TorchFullyShardedDataParallelConfig "
            "for torch FSDP2, or use wrap_ddp"
        )
    check_ddp_config(config, ddp_config)
    check_wrapping(chunks, ddp_config, groups)
    _check_model(chunks[0], ddp_config, groups, fsdp_unit_modules)
    say_choices(config, ddp_config, groups.dp_cp.size())
    wrapped: list[FullySharded] = []
    for chunk in chunks:
        _broadcast(chunk, groups)
        if isinstance(ddp_config, TorchFullyShardedDataParallelConfig):
            wrapped.append(_wrap_torch(chunk, ddp_config, groups, fsdp_unit_modules))
        else:
            wrapped.append(_wrap_megatron(chunk, ddp_config, groups, fsdp_unit_modules))
    return wrapped


def _check_model(
    chunk: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroupCollection,
    units: Sequence[type[torch.nn.Module]] | None,
) -> None:
    if units is not None and not any(isinstance(module, tuple(units)) for module in chunk.modules()):
        raise ValueError(f"{type(chunk).__name__} has no module of fsdp_unit_modules ({units}): name its layers' class")
    check_tied_weights(ddp_config, getattr(chunk, "share_embeddings_and_output_weights", False))
    if not is_torch_fsdp(ddp_config) and groups.tp.size() * groups.dp_cp.size() != dist.get_world_size():
        raise ValueError(
            f"Megatron FSDP divides all {dist.get_world_size()} ranks of the default group, but tensor parallel "
            f"({groups.tp.size()}) × data and context parallel ({groups.dp_cp.size()}) ranks are fewer: use wrap_ddp"
        )


def _broadcast(chunk: torch.nn.Module, groups: ProcessGroupCollection) -> None:
    for parameter in chunk.parameters():
        if not parameter.is_meta:
            dist.broadcast(parameter.detach(), group=data_parallel_group(parameter, groups), group_src=0)


def _wrap_megatron(
    chunk: MegatronModule,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroupCollection,
    units: Sequence[type[torch.nn.Module]] | None,
) -> FullyShardedDataParallel:
    more: dict[str, Any] = {} if units is None else {"fsdp_unit_modules": [*units]}
    with whole_when_reset(chunk, groups):
        wrapped = FullyShardedDataParallel(
            config=get_model_config(chunk),
            ddp_config=copy.copy(ddp_config),  # it writes into it
            module=chunk,
            pg_collection=groups,
            **more,
        )
    created.callback(_end, weakref.ref(wrapped))
    return wrapped


def _end(reference: weakref.ref[Any]) -> None:
    """Before the groups go: a gather begun for a step that never came would be left with none."""
    if (chunk := reference()) is not None:
        chunk.synchronize_param_gather()
        for hook in chunk.module.grad_acc_hooks.values():  # with them the model is never collected
            hook.remove()
    get_global_memory_buffer().buffer.clear()  # of layers, with fsdp_double_buffer: it outlives every model


def _wrap_torch(
    chunk: MegatronModule,
    ddp_config: TorchFullyShardedDataParallelConfig,
    groups: ProcessGroupCollection,
    units: Sequence[type[torch.nn.Module]] | None,
) -> TorchFullyShardedDataParallel:
    config = get_model_config(chunk)
    more: dict[str, Any] = {} if units is None else {"sub_modules_to_wrap": {*units}}
    wrapped = TorchFullyShardedDataParallel(config, ddp_config, chunk, process_group=groups.dp_cp, **more)
    fill_shards(wrapped)
    if ddp_config.grad_reduce_in_fp32:  # which mcore's wrapper does not hand on; read when training begins
        for group in _parameter_groups(wrapped):
            group.mp_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in wrapped.modules():
        if isinstance(module, MambaMixer):
            module.register_forward_pre_hook(_use_own_parameters)
        if isinstance(module, FSDPModule):
            if config.calculate_per_token_loss:  # gradients are divided by the tokens, not by the ranks
                module.set_gradient_divide_factor(1.0)
            # NCCL alone can divide
            module.set_force_sum_reduction_for_comms(config.calculate_per_token_loss or not torch.cuda.is_available())
    return wrapped


def _use_own_parameters(mixer: Any, _: Any) -> None:
    """Let the mixer's part for context parallelism use what FSDP2 gathered, not the parameters from before wrapping."""
    for name in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"):
        setattr(mixer.cp, f"{name}_cp1", getattr(mixer, name))


def local_gradients(chunk: FullySharded) -> Generator[tuple[str, torch.Tensor]]:
    """This rank's shards of the reduced gradients, by name; those it has no part of are left out."""
    buffer: Any = getattr(chunk, "param_and_grad_buffer", None)
    named: Any = chunk.named_parameters() if buffer is None else buffer.optimizer_named_parameters
    for name, parameter in named:
        gradient = getattr(parameter, "decoupled_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            yield name, gradient.to_local()


@contextlib.contextmanager
def unsharded(chunk: Any) -> Generator[None]:
    """While inside, the chunk's parameters are plain tensors in full; see `keep_weights`.

    Raises:
        ValueError: fsdp_double_buffer=True, whose memory takes two layers.
    """
    with _megatron_unsharded(chunk) if isinstance(chunk, FullyShardedDataParallel) else _torch_unsharded(chunk):
        yield


@contextlib.contextmanager
def _torch_unsharded(chunk: torch.nn.Module) -> Generator[None]:
    units = [unit for unit in chunk.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.unshard()
    for group in _parameter_groups(chunk):
        group._to_sharded = lambda: None  # its hooks would shard again when a state dict is made or loaded
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param = lambda: None
            vars(parameter.unsharded_param).update(vars(parameter.sharded_param))  # mcore's marks
    try:
        yield
    finally:
        for group in _parameter_groups(chunk):
            del group._to_sharded
            for parameter in group.fsdp_params:
                del parameter.reset_sharded_param
        for unit in units:
            unit.reshard()


def _parameter_groups(chunk: torch.nn.Module) -> list[Any]:
    """FSDP2's, of all its units that have parameters of their own."""
    units: list[Any] = [unit for unit in chunk.modules() if isinstance(unit, FSDPModule)]
    states = [unit._get_fsdp_state() for unit in units]
    return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]


@contextlib.contextmanager
def _megatron_unsharded(chunk: Any) -> Generator[None]:
    if chunk.ddp_config.fsdp_double_buffer and chunk.fsdp_unit_modules:
        raise ValueError(
            "fsdp_double_buffer=True has room for two layers, so that weights cannot be read or loaded in full: do it "
            "with a state that has fsdp_double_buffer=False"
        )
    fsdp = chunk.module
    fsdp._replace_param_with_raw_if_needed()
    fsdp.all_gather_and_wait_parameters_ready([*fsdp.module.parameters()], prefetch=False)
    # Its hooks would put the shards back when a state dict is made, and master weights over one that is loaded.
    fsdp.is_param_fsdp_distributed, fsdp.install_optimized_model_weights = True, lambda: None
    try:
        yield
    finally:
        del fsdp.install_optimized_model_weights
        fsdp.is_param_fsdp_distributed = False
        chunk.synchronize_param_gather()


@torch.no_grad()
def keep_weights(chunk: Any) -> None:
    """Inside `unsharded`: take what was written into the parameters over into this rank's shards and master weights."""
    megatron: Any = getattr(chunk, "param_and_grad_buffer", None)
    for group in [] if megatron is None else megatron.parameter_groups:
        buffers: list[Any] = [group.model_weight_buffer, group.main_weight_buffer]
        for buffer in filter(None, buffers):
            for index, parameter in enumerate(group.params):
                buffer.set_item(index, parameter.detach())
    for parameter in (parameter for group in _parameter_groups(chunk) for parameter in group.fsdp_params):
        mesh, local = parameter.sharded_param.device_mesh, parameter.sharded_param.to_local()
        if local.numel():
            local.copy_(parameter.unsharded_param.chunk(mesh.size())[mesh.get_local_rank()])


def refuse_fully_sharded(chunks: Sequence[Any], caller: str) -> None:
    """Raise ValueError if chunks are fully sharded; `caller` is its name and what to do instead."""
    if isinstance(chunks[0], FullySharded):
        kind = "torch FSDP2" if is_torch_fsdp(chunks[0].ddp_config) else "Megatron FSDP"
        raise ValueError(f"{caller} use wrap_ddp: it does not know {kind}, in which this state's model is wrapped")
