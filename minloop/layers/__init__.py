"""Torch-only parts for mcore's local layers, where mcore's own need Transformer Engine or Apex."""

import dataclasses
import functools
from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from minloop.layers.attention import TorchDotProductAttention
from minloop.layers.gated_delta_net import TorchGatedDeltaNet
from minloop.layers.gathered_linear import TorchColumnParallelLinearGathered
from minloop.layers.hybrid_stack import OwnStreamHybridStack, TorchHybridStack
from minloop.layers.latent_attention import TorchMLASelfAttention
from minloop.layers.mamba import TorchMambaMixer
from minloop.layers.norm import TorchNorm

__all__ = [
    "OwnStreamHybridStack",
    "TorchColumnParallelLinearGathered",
    "TorchDotProductAttention",
    "TorchGatedDeltaNet",
    "TorchHybridStack",
    "TorchMLASelfAttention",
    "TorchMambaMixer",
    "TorchNorm",
    "with_torch_parts",
]

_PARTS: dict[type, type] = {
    WrappedTorchNorm: TorchNorm,
    FusedLayerNorm: TorchNorm,
    DotProductAttention: TorchDotProductAttention,
    MLASelfAttention: TorchMLASelfAttention,
    ColumnParallelLinearGathered: TorchColumnParallelLinearGathered,
    GatedDeltaNet: TorchGatedDeltaNet,
    MambaMixer: TorchMambaMixer,
    HybridStack: TorchHybridStack,
}


def with_torch_parts[Spec](spec: Spec) -> Spec:
    """Return a copy of one of mcore's local layer specs with torch-only parts, at any depth; `spec` stays as it is.

    mcore's `WrappedTorchNorm` and Apex's `FusedLayerNorm` become `TorchNorm`, which allows sequence parallelism;
    `DotProductAttention` becomes `TorchDotProductAttention`, which also allows context parallelism and multi-latent
    attention; `MLASelfAttention` and `ColumnParallelLinearGathered` those that are right with tensor and sequence
    parallelism; `GatedDeltaNet`, `MambaMixer` and `HybridStack` become those that need no kernels.

    Args:
        spec: what `get_gpt_decoder_block_spec`, `get_gpt_mtp_block_spec` and their like return: a `ModuleSpec`, a
            dataclass of submodules, a partial, a class, or a list, tuple or dict of them. Where mcore is given the spec
            of a layer, not of a block, it adds a final norm of its own choice, which is out of reach here.
    """
    return _replace(spec)


def _replace(spec: Any) -> Any:
    if isinstance(spec, type):
        return _PARTS.get(spec, spec)
    if isinstance(spec, ModuleSpec) and (module := get_module(spec)) in _PARTS:  # it may be given by its path
        spec = dataclasses.replace(spec, module=_PARTS[module])
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        return dataclasses.replace(spec, **_replace(values))
    if isinstance(spec, functools.partial):
        return functools.partial(_replace(spec.func), *_replace(spec.args), **_replace(spec.keywords))
    if isinstance(spec, dict):
        return {key: _replace(value) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(_replace(value) for value in spec)
    return spec
