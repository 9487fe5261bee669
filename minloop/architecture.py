"""What a GPT is made of: layer specs by its config, and options of mcore's `GPTModel` that are not just passed on."""

from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.utils import unwrap_model

from minloop.layers import with_torch_parts
from minloop.spelling import did_you_mean

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "mrope", "yarn", "none")
YARN_REQUIRED = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
YARN_DEFAULTS: dict[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""Options of YaRN (arXiv 2309.00071) by the names under which mcore reads them off the config, which has no such
fields; the defaults are those of mcore's `YarnRotaryEmbedding`."""


def unwrapped(chunk: torch.nn.Module) -> Any:
    """The model inside a chunk's wrappers, of which mcore's `unwrap_model` leaves Megatron FSDP's inner one."""
    model: Any = unwrap_model(chunk)
    return unwrap_model(model.module) if isinstance(model, MegatronFSDP) else model


def gpt_specs(config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None) -> tuple[Any, Any]:
    """The layer specs of this stage: (decoder block, multi-token prediction block or None).

    A `HeterogeneousTransformerConfig` gives every layer its own; all others follow `config.moe_layer_freq`.

    Raises:
        ValueError: the config names layers that mcore builds for other models only.
    """
    for name in ("experimental_attention_variant", "linear_attention_freq"):
        if (value := getattr(config, name)) is not None:
            raise ValueError(
                f"{name}={value!r}: a GPT has no such layers here; leave it None, and use minloop.build_hybrid_model "
                "with a G in its hybrid_layer_pattern for each layer of gated delta net"
            )
    with_te = config.transformer_impl == "transformer_engine"
    where: dict[str, Any] = {"vp_stage": vp_stage, "pp_rank": groups.pp.rank()}
    kinds: dict[str, Any] = {
        "use_transformer_engine": with_te,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }
    if isinstance(config, HeterogeneousTransformerConfig):
        layer_spec: Any = get_gpt_heterogeneous_layer_spec(config, with_te, **where)
    else:
        layer_spec = get_gpt_decoder_block_spec(config, **kinds, **where)
    mtp_spec: Any = None
    if config.mtp_num_layers:
        # A layer like the model's last one: this stage may have none that mcore could take it from.
        layers: Any = get_gpt_decoder_layer_specs(config, **kinds)
        mtp_spec = get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=with_te, **where)
    return (layer_spec, mtp_spec) if with_te else (with_torch_parts(layer_spec), with_torch_parts(mtp_spec))


def take_yarn_options(config: TransformerConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Set YaRN's options on `config`, where mcore looks for them; return the others.

    Raises:
        ValueError: they are given without ``position_embedding_type="yarn"``, or a required one is missing.
    """
    given = {name: value for name, value in options.items() if name in (*YARN_REQUIRED, *YARN_DEFAULTS)}
    kind = options.get("position_embedding_type", "learned_absolute")
    if kind != "yarn":
        if given:
            raise ValueError(f"{', '.join(given)} with position_embedding_type={kind!r}: set it to 'yarn'")
        return options
    if missing := [name for name in YARN_REQUIRED if name not in given]:
        raise ValueError(f"position_embedding_type='yarn' needs {', '.join(missing)}")
    for name, value in (YARN_DEFAULTS | given).items():
        setattr(config, name, value)
    return {name: value for name, value in options.items() if name not in given}


def check_position_embedding(kind: str) -> None:
    """Raise ValueError for a kind that there is not, which mcore would take for "none"."""
    if kind not in POSITION_EMBEDDINGS:
        raise ValueError(
            f"position_embedding_type={kind!r}: use one of {', '.join(POSITION_EMBEDDINGS)}"
            f"{did_you_mean(kind, POSITION_EMBEDDINGS)}"
        )


def check_gpt_options(config: TransformerConfig, options: dict[str, Any]) -> None:
    """Refuse arguments of `GPTModel` that do not go with `config`.

    Raises:
        ValueError: naming them, their values and the remedy.
    """
    kind = options.get("position_embedding_type", "learned_absolute")
    check_position_embedding(kind)
    of_yarn = (*YARN_REQUIRED, *YARN_DEFAULTS)
    for name in options:
        if name.startswith("yarn_") and name not in of_yarn:
            raise ValueError(f"{name} is no option of YaRN{did_you_mean(name, of_yarn)}")
    if kind == "learned_absolute" and config.mtp_num_layers and config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"mtp_num_layers ({config.mtp_num_layers}) with position_embedding_type='learned_absolute' and "
            f"pipeline_model_parallel_size ({config.pipeline_model_parallel_size}): mcore gives the stage of the "
            "prediction layers a copy of the position embedding that it neither ties to the first nor saves apart; use "
            "position_embedding_type='rope' or pipeline_model_parallel_size=1"
        )
    if config.mtp_standalone and options.get("share_embeddings_and_output_weights"):
        raise ValueError(
            "share_embeddings_and_output_weights=True with prediction layers on another stage than the loss "
            f"(pipeline_model_parallel_layout {config.pipeline_model_parallel_layout}): three stages would share a "
            "weight that is tied between two; lay out the m beside the L"
        )
    if not options.get("parallel_output", True):
        raise ValueError("parallel_output=False: the loss takes each rank's part of the logits; leave it out")
    if config.fused_single_qkv_rope:
        _check_fused_rope(config)
    if kind == "mrope":
        _check_mrope(config, int((config.kv_channels or 0) * options.get("rotary_percent", 1.0)) // 2)
    if config.multi_latent_attention and kind in ("yarn", "mrope"):
        raise ValueError(
            f"position_embedding_type={kind!r} with multi_latent_attention=True: it takes its rotary embedding from "
            "the config's rope_type ('rope' or 'yarn'); set position_embedding_type='rope'"
        )
    if config.heterogeneous_block_specs and config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers ({config.mtp_num_layers}) with heterogeneous layers: mcore would build the prediction "
            "layers by the description of the first decoder layers; set mtp_num_layers=None"
        )


def _check_fused_rope(config: TransformerConfig) -> None:
    """mcore's fused function would leave out without a word whatever else is set."""
    for name, value, needed in (
        ("transformer_impl", config.transformer_impl, "transformer_engine"),
        ("rotary_interleaved", config.rotary_interleaved, False),
        ("qk_layernorm", config.qk_layernorm, False),
        ("qk_l2_norm", config.qk_l2_norm, False),
        ("multi_latent_attention", config.multi_latent_attention, False),
    ):
        if value != needed:
            raise ValueError(
                f"fused_single_qkv_rope=True with {name}={value!r}, not {needed!r}: set fused_single_qkv_rope=False"
            )


def _check_mrope(config: TransformerConfig, frequencies: int) -> None:
    section: Any = config.mrope_section
    if not section or len(section) != 3 or sum(section) != frequencies:
        raise ValueError(
            f"position_embedding_type='mrope' with mrope_section={section}: it must say how many of the {frequencies} "
            "rotary frequencies (kv_channels × rotary_percent / 2) turn with each of the three positions"
        )
    if config.rotary_interleaved:
        raise ValueError(
            "position_embedding_type='mrope' with rotary_interleaved=True: mcore gives the embedding a wrong shape; "
            "set rotary_interleaved=False"
        )
