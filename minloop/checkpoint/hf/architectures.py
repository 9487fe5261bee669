"""Hugging Face's Llama-shaped models as tables: how they name and shape their weights, and how their configs differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Rule:
    """One of mcore's tensors and those of Hugging Face whose rows it is made of.

    Attributes:
        own: mcore's name in a checkpoint, of a layer's tensors without what comes before.
        theirs: Hugging Face's names and their shapes, in the sizes of `names.sizes`; "{expert}" is an expert's number.
        by_query_group: whether rows alternate: those of the first query group from each tensor, then of the second, …;
            otherwise whole tensors follow each other.
    """

    own: str
    theirs: Mapping[str, str]
    by_query_group: bool = False


EMBEDDING = Rule("embedding.word_embeddings.weight", {"model.embed_tokens.weight": "v h"})
FINAL_NORM = Rule("decoder.final_layernorm.weight", {"model.norm.weight": "h"})
OUTPUT = Rule("output_layer.weight", {"lm_head.weight": "v h"})

LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "h"}),
    Rule(
        "self_attention.linear_qkv.weight",
        {"self_attn.q_proj.weight": "q h", "self_attn.k_proj.weight": "k h", "self_attn.v_proj.weight": "k h"},
        by_query_group=True,
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "h q"}),
    Rule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": "h"}),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"},
        by_query_group=True,
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "d"}),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "d"}),
)
MLP = (
    Rule("mlp.linear_fc1.weight", {"mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h"}),
    Rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "h f"}),
)
OTHER_BIASES = (
    Rule("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "h"}),
    Rule("mlp.linear_fc1.bias", {"mlp.gate_proj.bias": "f", "mlp.up_proj.bias": "f"}),
    Rule("mlp.linear_fc2.bias", {"mlp.down_proj.bias": "h"}),
)


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    return (
        Rule("mlp.router.weight", {router: "e h"}),
        Rule("mlp.experts.experts.linear_fc1.weight", {gate: "m h", up: "m h"}),
        Rule("mlp.experts.experts.linear_fc2.weight", {down: "h m"}),
    )


OTHER_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""mcore's names of norms that are layers of their own, and of the same norms as parts of the linear layer after them:
which of them a checkpoint has depends on `transformer_impl` and on experts."""


@dataclass(frozen=True)
class Architecture:
    """What one of Hugging Face's architectures has of its own.

    Attributes:
        model_type: its config's `model_type`.
        defaults: what transformers takes for entries that its config.json does not have.
        fields: `TransformerConfig` fields that hold for every model of it.
        windowed: which layers a `sliding_window` is for: "none", "all", or "some", named by `layer_types` or those from
            `max_window_layers` on.
        experts: the rules of its layers with experts.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    windowed: Literal["none", "all", "some"] = "none"
    experts: tuple[Rule, ...] = ()


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", {"num_key_value_heads": None}),
    "MistralForCausalLM": Architecture("mistral", windowed="all"),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", {"use_sliding_window": False}, fields={"add_qkv_bias": True}, windowed="some"
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", {"use_sliding_window": False, "head_dim": 128}, fields={"qk_layernorm": True}, windowed="some"
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        {"rope_theta": 1e6, "sliding_window": None, "norm_topk_prob": True, "moe_intermediate_size": None},
        windowed="all",
        experts=_experts(
            "block_sparse_moe.gate.weight",
            *(f"block_sparse_moe.experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2")),
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        {"use_sliding_window": False, "norm_topk_prob": False},
        fields={"qk_layernorm": True},
        windowed="all",
        experts=_experts(
            "mlp.gate.weight", *(f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        ),
    ),
}
"""By the name in a config's `architectures`."""
