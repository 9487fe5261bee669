"""Hugging Face's config.json in mcore's words."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from minloop.checkpoint.foreign import not_hugging_face
from minloop.checkpoint.hf.architectures import ARCHITECTURES, Architecture
from minloop.data.tokenizers import pad_vocab_size

RENAMED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "add_bias_linear": "attention_bias",
}
"""`TransformerConfig` fields and Hugging Face's names for them."""

FIELDS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "hidden_dropout": 0.0,
}
"""`TransformerConfig` fields of all Llama-shaped models."""

DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 1.0,
    "router_jitter_noise": 0.0,
    "quantization_config": None,
}
"""What transformers takes for entries that a config.json does not have."""

ONLY = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "router_jitter_noise": 0.0, "quantization_config": None}
"""Entries with one value that can be read here."""

LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""The constants in mcore's `RotaryEmbedding`."""


class _Entries(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"Hugging Face's config lacks {key!r}: add it to config.json")


@dataclass(frozen=True)
class HFModel:
    """A model of Hugging Face in mcore's words.

    Attributes:
        name: of its architecture.
        fields: of `TransformerConfig`.
        options: of `build_gpt_model`, with the vocabulary as it is.
    """

    name: str
    fields: dict[str, Any]
    options: dict[str, Any]

    @property
    def architecture(self) -> Architecture:
        """What is said of it in `ARCHITECTURES`."""
        return ARCHITECTURES[self.name]


def hf_config_fields(
    source: str | Path | Mapping[str, Any], *, make_vocab_size_divisible_by: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate the config of a model of Hugging Face, so that the same model is built here, in any layout and dtype.

        fields, options = minloop.hf_config_fields("Llama-3.1-8B", make_vocab_size_divisible_by=2)
        config = minloop.build_config(**fields, bf16=True, tensor_model_parallel_size=2)
        chunks = minloop.build_gpt_model(config, groups, **options)

    Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE, with plain, linear, Llama 3's and YaRN's rotary embeddings.
    What concerns training alone is not carried over (initial values, the router's auxiliary loss), but for dropout.

    Args:
        source: a directory with a config.json, or the content of one.
        make_vocab_size_divisible_by: pad the vocabulary to a multiple of this, the tensor parallel size for one. Padded
            rows are zeros when weights are loaded; their logits count in the softmax like any others.
    Returns:
        Fields of `TransformerConfig`, and arguments of `build_gpt_model`.
    Raises:
        FileNotFoundError: no config.json there.
        ValueError: another architecture, or a variant that mcore does not have; the message names it.
    """
    model = read_hf_config(source)
    size = pad_vocab_size(model.options["vocab_size"], make_vocab_size_divisible_by)
    return model.fields, model.options | {"vocab_size": size}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: it does not.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content  # pyright: ignore[reportUnknownVariableType]  # JSON's keys are strings


def config_entries(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config, given themselves or by their directory."""
    if isinstance(source, Mapping):
        return dict(source)
    file = Path(source) / "config.json"
    if not file.is_file() and (instead := not_hugging_face(Path(source))):
        raise FileNotFoundError(f"{file} is missing: {source} {instead}")
    return read_json(file)


def read_hf_config(source: str | Path | Mapping[str, Any]) -> HFModel:
    """Translate a config; see `hf_config_fields`."""
    given = config_entries(source)
    name = _architecture_name(given)
    architecture = ARCHITECTURES[name]
    entries = _Entries(DEFAULTS | dict(architecture.defaults) | given)
    for entry, value in ONLY.items():
        if entries[entry] not in (value, None):
            raise ValueError(f"{entry} is {entries[entry]!r}: only {value!r} can be read")
    if entries["attention_bias"] != entries["mlp_bias"]:
        raise ValueError(
            f"attention_bias is {entries['attention_bias']} and mlp_bias {entries['mlp_bias']}: they must be equal, as "
            "mcore's add_bias_linear stands for both"
        )
    heads = entries["num_attention_heads"]
    fields = {own: entries[theirs] for own, theirs in RENAMED.items()} | FIELDS | dict(architecture.fields)
    fields["num_query_groups"] = entries["num_key_value_heads"] or heads
    fields["kv_channels"] = entries["head_dim"] or entries["hidden_size"] // heads
    fields |= _window(entries, architecture) | (_experts(entries) if architecture.experts else {})
    options = {
        "vocab_size": entries["vocab_size"],
        "max_sequence_length": entries["max_position_embeddings"],
        "share_embeddings_and_output_weights": entries["tie_word_embeddings"],
    }
    return HFModel(name, fields, options | _rope(entries))


def _architecture_name(entries: Mapping[str, Any]) -> str:
    names, kind = entries.get("architectures"), entries.get("model_type")
    of_kind = [name for name, architecture in ARCHITECTURES.items() if architecture.model_type == kind]
    if not of_kind or names not in (None, [], of_kind):
        raise ValueError(
            f"architectures {names} of model_type {kind!r} is none of those whose weights can be read and written: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return of_kind[0]


def _window(entries: _Entries, architecture: Architecture) -> dict[str, Any]:
    """A window of n tokens holds a token itself and the n - 1 before it."""
    if architecture.windowed == "none" or not entries["use_sliding_window"] or not entries["sliding_window"]:
        return {"window_size": None}
    fields: dict[str, Any] = {"window_size": (entries["sliding_window"] - 1, 0)}
    if architecture.windowed == "some":
        if (kinds := entries.get("layer_types")) is None:
            first = entries["max_window_layers"]
            windowed = [int(layer >= first) for layer in range(entries["num_hidden_layers"])]
        else:
            windowed = [int(kind == "sliding_attention") for kind in kinds]
        fields["window_attn_skip_freq"] = windowed
    return fields


def _experts(entries: _Entries) -> dict[str, Any]:
    count = entries["num_local_experts"] if "num_local_experts" in entries else entries["num_experts"]
    step, dense = entries["decoder_sparse_step"], entries["mlp_only_layers"] or []
    layers = range(entries["num_hidden_layers"])
    with_experts = [int(count > 0 and layer not in dense and (layer + 1) % step == 0) for layer in layers]
    if not any(with_experts):
        return {}
    topk, normalised = entries["num_experts_per_tok"], entries["norm_topk_prob"]
    if topk == 1 and normalised:
        raise ValueError(
            "num_experts_per_tok is 1 with norm_topk_prob=True: mcore has no router that gives 1 to one expert"
        )
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": entries["moe_intermediate_size"] or entries["intermediate_size"],
        "moe_layer_freq": 1 if all(with_experts) else with_experts,
        "moe_router_topk": topk,
        # The softmax over the chosen alone is the one over all of them, normalised.
        "moe_router_pre_softmax": not normalised,
        "moe_router_score_function": "softmax",
    }


def _rope(entries: _Entries) -> dict[str, Any]:
    """Rotary embedding: of transformers 5 in `rope_parameters`, before in `rope_theta` and `rope_scaling`."""
    rope = _Entries(entries.get("rope_parameters") or entries.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    options = {"position_embedding_type": "rope", "rotary_base": rope.get("rope_theta", entries["rope_theta"])}
    lengths = {"original_max_position_embeddings": entries["max_position_embeddings"]}
    rope = _Entries(lengths | rope)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"rope_parameters by layer type ({', '.join(rope)}): mcore has one rotary embedding for all layers"
        )
    if kind == "default":
        return options
    if kind == "linear":
        return options | {"seq_len_interpolation_factor": rope["factor"]}
    if kind == "llama3":
        if others := {name: rope[name] for name, value in LLAMA3_ROPE.items() if rope[name] != value}:
            raise ValueError(f"rope_type 'llama3' with {others}: mcore's has {LLAMA3_ROPE}")
        return options | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if kind == "yarn":
        return options | _yarn(rope)
    raise ValueError(f"rope_type {kind!r}: mcore has 'default', 'linear', 'llama3' and 'yarn'")


def _yarn(rope: _Entries) -> dict[str, Any]:
    if rope.get("attention_factor") is not None:
        raise ValueError(f"rope_type 'yarn' with attention_factor {rope['attention_factor']}: mcore computes its own")
    both = rope.get("mscale") and rope.get("mscale_all_dim")  # transformers looks at neither without the other
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": rope["mscale"] if both else 1.0,
        "yarn_mscale_all_dim": rope["mscale_all_dim"] if both else 0.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }
