"""The cases of the sameness matrix, as data: layouts are rows, architectures are columns.

A layout is (ranks, options), an architecture is options; options go to `small_state`, most of them to mcore's
`TransformerConfig`. Every model has four layers of hidden size 32.
"""

import json
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

import minloop

Options = dict[str, Any]

RECIPE: Options = {"init_method_std": 0.1, "lr": 2e-3, "optimizer": {"adam_eps": 1e-5}}
"""For every cell. With small initial weights or Adam's usual epsilon some of these models enlarge rounding: one rank
then differs from itself with another micro batch size by up to 1e-2; so started, by less than 1e-6."""

ZERO1: Options = {"use_distributed_optimizer": True}


def layout(ranks: int, tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, **more: Any) -> Any:
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
    }
    return ranks, {name: size for name, size in sizes.items() if size not in (1, None)} | more


SP: Options = {"sequence_parallel": True}

LAYOUTS: dict[str, tuple[int, Options]] = {
    "DP2": layout(2),
    "DP4": layout(4),
    "DP2, no overlap, bucket_size 1000": layout(2, ddp={"overlap_grad_reduce": False, "bucket_size": 1000}),
    "DP2 ZeRO-1": layout(2, ddp=ZERO1),
    "DP2 ZeRO-1, no overlap": layout(2, ddp=ZERO1 | {"overlap_grad_reduce": False}),
    "DP4 ZeRO-1, two instances": layout(4, ddp=ZERO1 | {"num_distributed_optimizer_instances": 2}),
    "TP2": layout(2, tp=2),
    "TP4": layout(4, tp=4),
    "TP2+SP": layout(2, tp=2, **SP),
    "TP4+SP": layout(4, tp=4, **SP),
    "PP2": layout(2, pp=2),
    "PP4": layout(4, pp=4),
    "PP2 VPP2": layout(2, pp=2, vpp=2),
    "PP2, first stage 1 layer": layout(2, pp=2, num_layers_in_first_pipeline_stage=1),
    "PP2, last stage 1 layer": layout(2, pp=2, num_layers_in_last_pipeline_stage=1),
    "PP3, embedding and loss as layers": layout(
        3, pp=3, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
    ),
    "PP2 layout 'Ettt|tL'": layout(2, pp=2, pipeline_model_parallel_layout="Ettt|tL"),
    "PP2 VPP2 layout list": layout(
        2,
        pp=2,
        pipeline_model_parallel_layout=[
            ["embedding"],
            ["decoder", "decoder"],
            ["decoder"],
            ["decoder", "loss"],
        ],
    ),
    "CP2 p2p": layout(2, cp=2, cp_comm_type="p2p"),
    "CP2 a2a": layout(2, cp=2, cp_comm_type="a2a"),
    "CP2 all_gather": layout(2, cp=2, cp_comm_type="all_gather"),
    "CP2, one type per layer": layout(2, cp=2, cp_comm_type=["p2p", "a2a", "all_gather", "p2p"]),
    "CP4 p2p": layout(4, cp=4, cp_comm_type="p2p"),
    "CP4 a2a+p2p [2, 2]": layout(4, cp=4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2]),
    "EP2": layout(2, ep=2),
    "EP4": layout(4, ep=4),
    "EP2 ZeRO-1": layout(4, ep=2, ddp=ZERO1),
    "TP2+SP×EP2": layout(4, tp=2, ep=2, **SP),
    "TP2+SP×EP2, ETP1": layout(4, tp=2, ep=2, expert_tensor_parallel_size=1, **SP),
    "TP2+SP, ETP1": layout(2, tp=2, expert_tensor_parallel_size=1, **SP),
    "TP2+SP×PP2": layout(4, tp=2, pp=2, **SP),
    "TP2+SP×CP2 ZeRO-1": layout(4, tp=2, cp=2, ddp=ZERO1, **SP),
    "PP2×DP2 ZeRO-1": layout(4, pp=2, ddp=ZERO1),
    "PP2×DP2, order tp-cp-ep-pp-dp": layout(4, pp=2, init={"order": "tp-cp-ep-pp-dp"}),
    "PP2×EP2 ZeRO-1": layout(4, pp=2, ep=2, ddp=ZERO1),
    "CP2×PP2 VPP2": layout(4, cp=2, pp=2, vpp=2),
    "TP2+SP×PP2×DP2 ZeRO-1": layout(8, tp=2, pp=2, ddp=ZERO1, **SP),
    "TP2+SP×CP2×PP2": layout(8, tp=2, cp=2, pp=2, **SP),
    "TP2+SP×CP2×DP2×EP2": layout(8, tp=2, cp=2, ep=2, **SP),
    "TP2+SP×PP2×EP2 ZeRO-1": layout(8, tp=2, pp=2, ep=2, ddp=ZERO1, **SP),
}

ROPE: Options = {"position_embedding_type": "rope"}
LLAMA: Options = {
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "gpt": ROPE,
}
MLA: Options = {
    "config_class": minloop.MLATransformerConfig,
    "multi_latent_attention": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "gpt": ROPE,
}
MOE: Options = LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
MAMBA: Options = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
GATED_DELTA_NET: Options = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def block(part: str, **changes: Any) -> Options:
    """One layer's attention or MLP as heterogeneous configs write it."""
    fields: Options = {"num_query_groups": 4} if part == "attention" else {"ffn_hidden_size": 64}
    if changes.get("no_op") or changes.get("replace_with_linear"):
        fields = dict.fromkeys(fields)
    return {part: {"no_op": False, "replace_with_linear": False} | fields | changes}


HETEROGENEOUS = [
    block("attention", num_query_groups=2) | block("mlp"),
    block("attention", no_op=True) | block("mlp", ffn_hidden_size=96),
    block("attention", replace_with_linear=True) | block("mlp", no_op=True),
    block("attention") | block("mlp", replace_with_linear=True),
]


ARCHITECTURES: dict[str, Options] = {
    "GPT-2": {},
    "GPT-2, tied": {"gpt": {"share_embeddings_and_output_weights": True}},
    "Llama": LLAMA,
    "MQA, qk norm": LLAMA | {"num_query_groups": 1, "qk_layernorm": True},
    "GeGLU, half RoPE, zero-centred": LLAMA
    | {
        "activation_func": F.gelu,
        "layernorm_zero_centered_gamma": True,
        "rotary_interleaved": True,
        "gpt": ROPE | {"rotary_percent": 0.5, "rotary_base": 500},
    },
    "ReLU², QKV bias, L2 norm, NoPE": LLAMA
    | {
        "activation_func": squared_relu,
        "gated_linear_unit": False,
        "add_qkv_bias": True,
        "qk_l2_norm": True,
        "no_rope_freq": 2,
    },
    "sliding window": {"window_size": (7, 0), "window_attn_skip_freq": 2, "gpt": ROPE},
    "YaRN": LLAMA
    | {
        "gpt": {
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 16,
        }
    },
    "MLA, q-LoRA, YaRN": MLA
    | {
        "q_lora_rank": 16,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4,
        "original_max_position_embeddings": 16,
    },
    "MTP 1, tied": LLAMA | {"mtp_num_layers": 1, "gpt": ROPE | {"share_embeddings_and_output_weights": True}},
    "MTP 2": LLAMA | {"mtp_num_layers": 2},
    "heterogeneous": {
        "config_class": HeterogeneousTransformerConfig,
        "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": HETEROGENEOUS}),
        "gpt": ROPE,
    },
    "hybrid": {
        "build": minloop.build_hybrid_model,
        "is_hybrid_model": True,
        "transformer_impl": "local",  # else these layers need packages of their own
        "gpt": ROPE | {"hybrid_layer_pattern": "M*G-"},
    }
    | MAMBA
    | GATED_DELTA_NET,
    "MoE, aux loss": MOE | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "MoE, allgather, pre-softmax": MOE
    | {
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_pre_softmax": True,
        "moe_z_loss_coeff": 1e-3,
    },
    "MoE, DeepSeek-like": MOE
    | {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": 32,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "MoE, sqrtsoftplus, gated shared expert": MOE
    | {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.01],
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
    },
}

EXPLAINED: dict[tuple[str, str], tuple[float, str]] = {}
"""Cells that differ by more than rounding: (layout, architecture) → (how much is allowed, why)."""
