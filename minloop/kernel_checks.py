"""Checks of Transformer Engine's layers: what they would refuse in mid-forward, or leave out in silence."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.enums import AttnBackend


def is_heterogeneous(config: Any) -> bool:
    """Whether every layer has a description of its own.

    Args:
        config: a `TransformerConfig`, or anything with its fields, also before mcore has derived any.
    """
    names = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    return config.heterogeneous_block_specs or any(getattr(config, name, None) for name in names)


def check_kernels(config: Any) -> None:
    """Refuse what Transformer Engine's layers cannot do.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if config.use_te_activation_func:
        _check_activation(config)
    if config.transformer_impl != "transformer_engine":
        return
    if config.attention_backend == AttnBackend.local:
        raise ValueError(
            "attention_backend=AttnBackend.local with transformer_impl='transformer_engine', whose attention it "
            "switches off: set attention_backend=AttnBackend.auto, or transformer_impl='local'"
        )
    if config.normalization == "L2Norm":
        raise ValueError(
            "normalization='L2Norm' with transformer_impl='transformer_engine', which has none: use 'LayerNorm' or "
            "'RMSNorm', or transformer_impl='local'"
        )


def check_loss_kernel(config: Any) -> None:
    """Refuse Transformer Engine's loss where it cannot run; a config may still be built, for an estimate.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    fused = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    if fused and not (HAVE_TE and torch.cuda.is_available()):
        raise ValueError(
            f"cross_entropy_fusion_impl='te' with transformer_impl={config.transformer_impl!r}, but "
            f"{'there is no GPU' if HAVE_TE else 'Transformer Engine is not installed'}: set "
            "cross_entropy_fusion_impl='native'"
        )


def _check_activation(config: Any) -> None:
    """Of mcore's `TEActivationOp` and of the layers that it is given to."""
    if config.activation_func is F.silu and not config.gated_linear_unit:
        raise ValueError(
            "use_te_activation_func=True with activation_func=F.silu and gated_linear_unit=False, for which mcore "
            "takes ReLU: set use_te_activation_func=False"
        )
    for name, usual in (("activation_func_clamp_value", None), ("glu_linear_offset", 0.0)):
        if (value := getattr(config, name)) != usual:
            raise ValueError(
                f"use_te_activation_func=True with {name}={value}, which Transformer Engine's activation leaves out: "
                "set use_te_activation_func=False"
            )
    others = {"is_hybrid_model=True": config.is_hybrid_model, "heterogeneous layers": is_heterogeneous(config)}
    for what, asked in others.items():
        if asked and not config.num_moe_experts:
            raise ValueError(
                f"use_te_activation_func=True with {what}, whose specs of mcore's have no such activation, and would "
                "leave out the gate: set use_te_activation_func=False"
            )


Size = tuple[str, int, int, str]
"""What, its size, the ranks that share it, the field that says how many."""


def product_sizes(config: Any) -> list[Size]:
    """The rows and columns of the weights of a layer's products."""
    tp, experts = config.tensor_model_parallel_size, config.num_moe_experts
    shared = (tp, "tensor_model_parallel_size")
    sizes: list[Size] = [("hidden_size", config.hidden_size, 1, "")]
    sizes += _latent_sizes(config, shared) if config.multi_latent_attention else _attention_sizes(config, shared)
    if not experts or config.moe_layer_freq != 1:
        sizes.append(("ffn_hidden_size", config.ffn_hidden_size or 4 * config.hidden_size, *shared))
    if experts:
        etp = config.expert_tensor_parallel_size or tp
        ffn = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
        sizes.append(("moe_ffn_hidden_size", ffn, etp, "expert_tensor_parallel_size"))
        if size := config.moe_shared_expert_intermediate_size:
            sizes.append(("moe_shared_expert_intermediate_size", size, *shared))
        if size := config.moe_latent_size:
            sizes.append(("moe_latent_size", size, 1, ""))
    return sizes


def _attention_sizes(config: Any, shared: tuple[int, str]) -> list[Size]:
    heads = config.num_attention_heads
    channels = config.kv_channels or config.hidden_size // heads
    qkv = (heads + 2 * (config.num_query_groups or heads)) * channels
    return [
        ("num_attention_heads × kv_channels", heads * channels, *shared),
        ("(num_attention_heads + 2 × num_query_groups) × kv_channels", qkv, *shared),
    ]


def _latent_sizes(config: Any, shared: tuple[int, str]) -> list[Size]:
    heads, rotary = config.num_attention_heads, config.qk_pos_emb_head_dim
    whole = {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "kv_lora_rank + qk_pos_emb_head_dim": config.kv_lora_rank + rotary,
    }
    of_a_head = {
        "(qk_head_dim + qk_pos_emb_head_dim)": config.qk_head_dim + rotary,
        "(qk_head_dim + v_head_dim)": config.qk_head_dim + config.v_head_dim,
        "v_head_dim": config.v_head_dim,
    }
    sizes: list[Size] = [(name, size, 1, "") for name, size in whole.items() if size]
    return sizes + [(f"num_attention_heads × {name}", heads * size, *shared) for name, size in of_a_head.items()]
