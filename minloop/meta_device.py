"""Models larger than a rank: as layers are built, a rank keeps its part of their weights, for `wrap_fsdp` to shard.

mcore's own way from the meta device calls every module's `reset_parameters`, which its local layers lack, and draws in
another order. Here every weight is drawn as it would be otherwise, one module of one layer at a time.
"""

import contextlib
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_module_registration_hook

LAYERS = (BaseTransformerLayer, MambaLayer)


def data_parallel_group(parameter: Parameter, groups: ProcessGroupCollection) -> Any:
    """The ranks that hold the same parameter."""
    is_expert = not getattr(parameter, "allreduce", True)
    return groups.expt_dp if is_expert else groups.dp_cp


@contextlib.contextmanager
def cut_as_built(config: TransformerConfig, groups: ProcessGroupCollection) -> Generator[None]:
    """While inside: of each layer's weights a rank keeps its rows, `part`, and parameters are on the meta device.

    The rows are ceil(n / ranks) a rank, as FSDP2 divides them, and those that the group's first rank drew.
    """

    def cut(parent: Module, name: str, child: Module | None) -> None:
        if child is not None and isinstance(parent, LAYERS):
            for module in child.modules():
                for key, parameter in [*module.named_parameters(recurse=False)]:
                    if not parameter.is_meta:
                        thin = _cut(parameter, data_parallel_group(parameter, groups))
                        Module.register_parameter(module, key, thin)  # Transformer Engine's own asks for more

    hook = register_module_module_registration_hook(cut)
    config.init_model_with_meta_device = False  # or Transformer Engine's layers would draw nothing
    try:
        yield
    finally:
        config.init_model_with_meta_device = True
        hook.remove()


def _cut(parameter: Parameter, group: Any) -> Parameter:
    dist.broadcast(parameter.detach(), group=group, group_src=0)
    rows = -(-len(parameter) // group.size())
    thin: Any = Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    vars(thin).update(vars(parameter))  # mcore's marks
    thin.part = parameter.detach()[group.rank() * rows :][:rows].clone()
    return thin


def _gathered(thin: Any, group: Any) -> torch.Tensor:
    """The whole weight of which each rank has a part."""
    part = thin.part
    rows = -(-len(thin) // group.size())
    padded = part.new_zeros(rows, *part.shape[1:])
    padded[: len(part)] = part
    whole = part.new_empty(rows * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return whole[: len(thin)]


@contextlib.contextmanager
def whole_when_reset(chunk: Module, groups: ProcessGroupCollection) -> Generator[None]:
    """While inside, `reset_parameters` of a module on the meta device fills it with what it was built with."""
    thin = [module for module in chunk.modules() if any(p.is_meta for p in module.parameters(recurse=False))]
    for module in thin:
        old, buffers = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
        vars(module)["reset_parameters"] = partial(_restore, module, old, buffers, groups)
    try:
        yield
    finally:
        for module in thin:
            del vars(module)["reset_parameters"]


@torch.no_grad()
def _restore(
    module: Module, old: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], groups: ProcessGroupCollection
) -> None:
    """Fill the parameters and buffers that Megatron FSDP has put in the place of the old ones, uninitialised."""
    for name, new in module.named_parameters(recurse=False):
        whole = _gathered(old[name], data_parallel_group(old[name], groups)) if old[name].is_meta else old[name]
        new.copy_(whole)
        vars(new).update({key: value for key, value in vars(old[name]).items() if key != "part"})
        vars(old[name]).pop("part", None)
    for name, buffer in module.named_buffers(recurse=False):
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill_shards(wrapped: Module) -> None:
    """Put what this rank kept into the shards of torch FSDP2, which are on the meta device."""
    for module in wrapped.modules():
        for name, thin in [*module.named_parameters(recurse=False)]:
            if thin.is_meta:
                device = torch.cuda.current_device()
                new: Any = Parameter(torch.empty_like(thin, device=device), requires_grad=thin.requires_grad)
                vars(new).update(vars(thin))
                new.to_local().copy_(vars(new).pop("part"))
                Module.register_parameter(module, name, new)
