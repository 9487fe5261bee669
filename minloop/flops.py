"""Model FLOPs of training, counted from the shapes that a config gives, and the peaks that chips are sold with."""

import copy
import re
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from minloop.hybrid_pattern import check_pattern

MAMBA_EXPAND, MAMBA_CONV_KERNEL = 2, 4  # defaults of mcore's MambaMixer, which no config names

# Dense TFLOP/s, (bf16 and fp16, fp8), by NVIDIA's datasheets: nvidia.com/en-us/data-center/ and there a100, h100, h200,
# grace-hopper-superchip, hgx (B200 and B300: an eighth of the board), gb200-nvl72 and gb300-nvl72 (a 72nd of the rack).
# They print twice the dense number, "with sparsity"; the A100's prints both. The first name that fits holds.
PEAKS: dict[str, tuple[float, float | None]] = {
    "GB300": (2500, 5000),
    "GB200": (2500, 5000),
    "B300": (2250, 4500),
    "B200": (2250, 4500),
    "GH200": (989, 1979),
    "H200 NVL": (835, 1671),
    "H200": (989, 1979),
    "H100 NVL": (835, 1671),
    "H100 PCIe": (756, 1513),
    "H100": (989, 1979),
    "A100": (312, None),
}


def flops_per_token(
    config: TransformerConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    causal: bool = True,
    hybrid_layer_pattern: str | None = None,
) -> float:
    """Return the model FLOPs that training costs per token, forward and backward.

    Model FLOPs utilisation is ``flops_per_token(...) * tokens_per_second_per_gpu / (peak_tflops(...) * 1e12)``.

    Each matrix product of the model counts 2 FLOPs per multiply-add, and three times: forward, for the gradient of its
    input and for that of its weight. Recomputing does not count, nor do norms, activations, the embedding's lookup,
    and what a capacity of experts drops or pads. All parameters are taken to train.

    There are two conventions for the products of queries with keys and of their weights with values. By the causal one
    a query meets half of the sequence, the part of the square below the diagonal: so counts Megatron-LM since core
    0.12 (`num_floating_point_operations` of megatron/training/training.py). By the full one it meets all of it, which
    is 6 N + 12 L H Q T of PaLM (arXiv 2204.02311, appendix B), with N the parameters in matrix products and L, H, Q, T
    the layers, heads, their size and the sequence; so count torchtitan and nanoGPT. A number in one cannot be compared
    with one in the other. In a sliding window a query meets as many keys as the window holds; by the causal convention,
    less those before the sequence's beginning.

    Unlike Megatron-LM's formula this one counts routers and Mamba's convolution, knows sliding windows, takes Mamba's
    inner size from its heads, and adds nothing for norms. Its estimates serve where no matrix product gives the number:
    forward, 7 FLOPs per element of Mamba's state and 4 multiply-adds per element of a gated delta net's.

    Args:
        vocab_size: rows of the output layer, whether tied or not; with the padding, if there is any.
        sequence_length: tokens of a whole sequence, over all context parallel ranks.
        causal: whether to count by the causal convention.
        hybrid_layer_pattern: of a hybrid model, as in `build_hybrid_model`.
    Raises:
        ValueError: the model has layers that are not counted; or `hybrid_layer_pattern` does not fit the config.
    """
    depths = config.mtp_num_layers or 0
    output = config.hidden_size * vocab_size
    prediction = 2 * config.hidden_size**2  # of hidden states and embeddings, side by side, to hidden states
    multiply_adds = output * (1 + depths) + prediction * depths
    for layer, part, number in _parts(config, hybrid_layer_pattern):
        multiply_adds += _COSTS[part](layer, _keys(config, number, sequence_length, causal))
    return 6.0 * multiply_adds


def peak_tflops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a whole chip by its datasheet, in TFLOP/s; None if it is not known here.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` has it.
        dtype: of the matrix products: bfloat16, float16, float8_e4m3fn or float8_e5m2.
    """
    if "MIG" in device_name:  # a part of a chip
        return None
    known = (peaks for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    bf16, fp8 = next(known, (None, None))
    if dtype in (torch.bfloat16, torch.float16):
        return bf16
    return fp8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else None


def _parts(config: Any, pattern: str | None) -> list[tuple[Any, str, int]]:
    """Of each part of a layer its config, its kind by mcore's letter for hybrid models, and the layer's number."""
    if config.experimental_attention_variant is not None:
        raise ValueError(
            f"experimental_attention_variant={config.experimental_attention_variant!r} is not counted: set it to None"
        )
    if not config.is_hybrid_model and pattern is None:
        if isinstance(config, HeterogeneousTransformerConfig):
            return _heterogeneous_parts(config)
        return [(config, kind, number) for kinds, number in gpt_layers(config) for kind in kinds]
    if pattern is None:
        raise ValueError("is_hybrid_model is True: pass the model's hybrid_layer_pattern")
    check_pattern(pattern, config)
    parsed = parse_hybrid_pattern(pattern)
    main = (parsed.main_pattern or "").replace("|", "")
    if "D" in main + (parsed.mtp_pattern or ""):
        raise ValueError(f"hybrid_layer_pattern {pattern!r} has 'D' (sparse attention) layers, which are not counted")
    stacks = [main] + [parsed.mtp_pattern or ""] * parsed.mtp_num_depths  # each numbers its layers from 1
    return [(config, kind, number) for stack in stacks for number, kind in enumerate(stack, start=1)]


def gpt_layers(config: Any) -> list[tuple[str, int]]:
    """Of each layer of a GPT, then of each depth of multi-token prediction: its two parts by letter, and its number."""
    layers, depths, frequency = config.num_layers, config.mtp_num_layers or 0, config.moe_layer_freq
    attention = "+" if config.multi_latent_attention else "*"
    routed = frequency if isinstance(frequency, list) else [index % frequency == 0 for index in range(layers)]
    kinds = [attention + ("E" if config.num_moe_experts and expert else "-") for expert in routed]
    predicting = [1] * depths if config.mtp_use_repeated_layer else range(1, depths + 1)
    return list(zip(kinds + kinds[-1:] * depths, [*range(1, layers + 1), *predicting], strict=True))


def _heterogeneous_parts(config: Any) -> list[tuple[Any, str, int]]:
    if config.mtp_num_layers:
        raise ValueError(f"mtp_num_layers ({config.mtp_num_layers}) with heterogeneous layers: set it to None")
    parts: list[tuple[Any, str, int]] = []
    for number, block in enumerate(config.per_block_parameters, start=1):
        layer = copy.copy(config)
        layer.num_query_groups = block.attention.num_query_groups or config.num_query_groups
        layer.ffn_hidden_size = block.mlp.ffn_hidden_size or config.ffn_hidden_size
        for part, kind in ((block.attention, "*"), (block.mlp, "-")):
            if not part.no_op:
                parts.append((layer, "linear" if part.replace_with_linear else kind, number))
    return parts


def _keys(config: Any, layer_number: int, sequence_length: int, causal: bool) -> float:
    """How many keys a query meets, on average."""
    keys: float = sequence_length
    window = config.window_size
    if is_layer_window_attention(window, config.window_attn_skip_freq, layer_number) and window[0] >= 0:
        keys = min(sequence_length, window[0] + 1)
    return keys * (1 - keys / (2 * sequence_length)) if causal else keys


# Each of these returns the multiply-adds of one token in the forward pass of one part of a layer.


def _attention(config: Any, keys: float) -> float:
    query = config.num_attention_heads * config.kv_channels
    key = config.num_query_groups * config.kv_channels
    gate = query if config.attention_output_gate else 0
    return config.hidden_size * (query + gate + 2 * key + query) + 2 * query * keys


def _latent_attention(config: Any, keys: float) -> float:
    hidden, heads, latent, rotary = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_pos_emb_head_dim,
    )
    query, value = heads * (config.qk_head_dim + rotary), heads * config.v_head_dim
    rank = config.q_lora_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    keys_and_values = hidden * (latent + rotary) + latent * heads * (config.qk_head_dim + config.v_head_dim)
    return queries + keys_and_values + value * hidden + (query + value) * keys


def matrices(config: Any) -> int:
    """How many matrices of hidden size by ffn hidden size an MLP has: SwiGLU and the like have three."""
    return 3 if config.gated_linear_unit else 2


def _mlp(config: Any, keys: float) -> float:
    return matrices(config) * config.hidden_size * config.ffn_hidden_size


def _experts(config: Any, keys: float) -> float:
    hidden, latent = config.hidden_size, config.moe_latent_size
    shared = config.moe_shared_expert_intermediate_size
    routed = matrices(config) * (latent or hidden) * config.moe_ffn_hidden_size * config.moe_router_topk
    gate = hidden if shared and config.moe_shared_expert_gate else 0
    router = hidden * config.num_moe_experts
    return routed + 2 * hidden * (latent or 0) + matrices(config) * hidden * (shared or 0) + gate + router


def _mamba(config: Any, keys: float) -> float:
    """Mamba-2, arXiv 2405.21060."""
    heads = config.mamba_num_heads or MAMBA_EXPAND * config.hidden_size // config.mamba_head_dim
    inner, state = heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    projections = config.hidden_size * (2 * inner + 2 * state + heads + inner)
    return projections + MAMBA_CONV_KERNEL * (inner + 2 * state) + 3.5 * inner * config.mamba_state_dim


def _gated_delta_net(config: Any, keys: float) -> float:
    """Gated delta net, arXiv 2412.06464."""
    key = config.linear_num_key_heads * config.linear_key_head_dim
    heads, value = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    projections = config.hidden_size * (2 * key + 2 * value + 2 * heads + value)
    return projections + config.linear_conv_kernel_dim * (2 * key + value) + 4 * value * config.linear_key_head_dim


def _linear(config: Any, keys: float) -> float:
    return config.hidden_size**2


_COSTS: dict[str, Any] = {
    "*": _attention,
    "+": _latent_attention,
    "-": _mlp,
    "E": _experts,
    "M": _mamba,
    "G": _gated_delta_net,
    "linear": _linear,
}
