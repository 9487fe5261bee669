"""Bytes of activations that a layer keeps for its backward pass, and how many microbatches are in flight.

Korthikanti et al. 2022, arXiv 2205.05198, section 4, changed for flash attention, SwiGLU, groups of keys and experts.
"""

from dataclasses import dataclass
from typing import Any

from minloop.parameter_count import stage_layers

ROUTER_BYTES = 16
"""Per token and expert: logits, probabilities, their gradient in fp32, and the map of who goes where."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one microbatch.

    Attributes:
        saved: kept from the forward pass.
        recomputed: made again in the backward pass, for the time of this layer.
        gradients: of what is inside the layer, for the time of its backward pass.
    """

    saved: int
    recomputed: int
    gradients: int


class _Sizes:
    """Bytes of one feature of all tokens of a rank, whole or divided over tensor parallel ranks."""

    def __init__(self, config: Any, tokens: int):
        tp = config.tensor_model_parallel_size
        self.tp, self.tokens = tp, tokens
        self.here = tokens // tp if config.sequence_parallel else tokens
        self.half = config.params_dtype.itemsize
        self.linear = 1 if config.fp8 else self.half  # of a product's input, kept for its weight's gradient


def layer_activations(config: Any, kind: str, tokens: int) -> LayerActivations:
    """Return what a layer keeps, with Transformer Engine's fused kernels.

    Args:
        kind: "-" for an MLP after attention, "E" for experts.
        tokens: of a microbatch, on this context parallel rank.
    """
    sizes = _Sizes(config, tokens)
    modules: list[str] = (config.recompute_modules or []) if config.recompute_granularity == "selective" else []
    parts = _attention(config, sizes) | (_experts(config, sizes) if kind == "E" else _mlp(config, sizes))
    dropped = {
        "mlp": ("fc1_input", "fc1_output", "fc2_input") if kind == "-" else (),
        "moe": ("router", "fc1_input", "fc1_output", "fc2_input", "shared"),
        "shared_experts": ("shared",),
        "moe_act": ("fc2_input",) if kind == "E" else (),
        "layernorm": ("norm_output",),  # in other layers the norm is a part of a product
    }
    gone = {part for module in modules for part in dropped.get(module, ())}
    recomputed = sum(size for name, size in parts.items() if name in gone)
    gradients = parts["fc1_output"] + parts["fc2_input"]
    return LayerActivations(sum(parts.values()) - recomputed, recomputed, gradients)


def _attention(config: Any, sizes: _Sizes) -> dict[str, int]:
    hidden = config.hidden_size * sizes.here
    query = config.num_attention_heads * config.kv_channels * sizes.tokens // sizes.tp
    mixed = query + 2 * max(config.num_query_groups, sizes.tp) * config.kv_channels * sizes.tokens // sizes.tp
    return {
        "input": sizes.half * hidden,
        "qkv_input": sizes.linear * hidden,
        "qkv": sizes.half * mixed * (2 if config.qk_layernorm else 1),  # before and after the norm
        "attended": sizes.half * query,
        "proj_input": query if config.fp8 else 0,  # otherwise what attention keeps
        "residual": sizes.half * hidden,
        "masks": 2 * hidden if config.hidden_dropout else 0,
    }


def _mlp(config: Any, sizes: _Sizes) -> dict[str, int]:
    ffn = config.ffn_hidden_size * sizes.tokens // sizes.tp
    return {
        "fc1_input": sizes.linear * config.hidden_size * sizes.here,
        "fc1_output": sizes.half * ffn * (2 if config.gated_linear_unit else 1),
        "fc2_input": sizes.linear * ffn,
    }


def _experts(config: Any, sizes: _Sizes) -> dict[str, int]:
    etp = config.expert_tensor_parallel_size or sizes.tp
    routed = config.moe_router_topk * sizes.here * etp  # by experts in balance
    ffn = config.moe_ffn_hidden_size * routed // etp
    products = 2 if config.gated_linear_unit else 1
    shared = (config.moe_shared_expert_intermediate_size or 0) * sizes.tokens // sizes.tp
    return {
        "norm_output": sizes.half * config.hidden_size * sizes.here,
        "router": ROUTER_BYTES * config.num_moe_experts * sizes.here,
        "fc1_input": sizes.linear * config.hidden_size * routed,
        "fc1_output": sizes.half * ffn * products,
        "fc2_input": sizes.linear * ffn,
        "shared": (sizes.half * products + sizes.linear) * shared,
    }


def stage_activations(config: Any, tokens: int, stage: int, num_microbatches: int | None) -> tuple[int, int]:
    """Return the bytes of a pipeline stage at its fullest: what is saved, and what one backward pass takes beside it.

    Args:
        tokens: of a microbatch, on this context parallel rank.
        num_microbatches: of a step; None if there are as many as are ever in flight.
    """
    chunks = [[layer_activations(config, kind, tokens) for kind in kinds] for kinds in stage_layers(config, stage)]
    layers = [layer for chunk in chunks for layer in chunk]
    if not layers:
        return 0, 0
    if config.recompute_granularity == "full":
        held = [_fully_recomputed(config, tokens, chunk) for chunk in chunks]
        saved, beside = sum(saved for saved, _ in held), max(beside for _, beside in held)
    else:
        saved = sum(layer.saved for layer in layers)
        beside = max(layer.recomputed + layer.gradients for layer in layers)
    return round(saved / len(chunks) * _in_flight(config, stage, num_microbatches)), beside


def _fully_recomputed(config: Any, tokens: int, chunk: list[LayerActivations]) -> tuple[int, int]:
    """Saved bytes of a chunk's layers, and those of the layers that are recomputed together."""
    if not chunk:
        return 0, 0
    sizes, size = _Sizes(config, tokens), config.recompute_num_layers
    entry = sizes.half * config.hidden_size * sizes.here
    if config.distribute_saved_activations:
        entry //= sizes.tp
    gradients = max(layer.gradients for layer in chunk)
    if config.recompute_method == "uniform":
        groups = [chunk[first : first + size] for first in range(0, len(chunk), size)]
        return entry * len(groups), max(sum(layer.saved for layer in group) for group in groups) + gradients
    first, rest = chunk[:size], chunk[size:]
    return entry * len(first) + sum(layer.saved for layer in rest), max(layer.saved for layer in first) + gradients


def _in_flight(config: Any, stage: int, num_microbatches: int | None) -> int:
    """Passes through one chunk that a stage begins before its first backward pass, in mcore's two schedules."""
    stages, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    passes = stages - stage
    if virtual > 1:
        group = config.microbatch_group_size_per_vp_stage or stages
        passes = 2 * (stages - stage - 1) + (virtual - 1) * group + 1
    return passes if num_microbatches is None else min(passes, num_microbatches * virtual)
