"""mcore's `HybridModel`: a stack of layers of several kinds, as a pattern says; its layers without Transformer Engine.

A pattern has one letter per layer: ``*`` attention, ``+`` multi-latent attention, ``-`` MLP, ``E`` mixture of experts,
``M`` Mamba-2, ``G`` gated delta net, ``D`` sparse attention. ``|`` divides it into pipeline stages, and each
``/pattern`` at its end is one depth of multi-token prediction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from minloop.architecture import check_gpt_options, take_yarn_options
from minloop.hybrid_pattern import check_pattern, divide_pattern
from minloop.layers import OwnStreamHybridStack, with_torch_parts
from minloop.model import ModelProvider, build_model, check_vocab_size

_ADD: Any = get_bias_dropout_add


def build_hybrid_model(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    vocab_size: int,
    max_sequence_length: int,
    hybrid_layer_pattern: str,
    before_wrapping: Callable[[MegatronModule], None] | None = None,
    **hybrid_options: Any,
) -> list[MegatronModule]:
    """Build a hybrid model: `build_model` with `hybrid_provider`; see both.

    Args:
        config: with ``is_hybrid_model=True``.
        vocab_size: rows of the embedding; a multiple of the tensor parallel size.
        max_sequence_length: tokens; the size of the learned position embedding.
        hybrid_layer_pattern: the kinds of the layers in mcore's letters, such as ``"M-M*-"``. Without ``|`` the layers
            are divided evenly over the pipeline stages, and on one stage ``|`` means nothing, so that one pattern
            serves many layouts.
        hybrid_options: other arguments of mcore's `HybridModel`, such as ``position_embedding_type="rope"`` (its
            default is "none") or ``share_embeddings_and_output_weights=True``; with "yarn" as in `build_gpt_model`.
    Raises:
        ValueError: the pattern does not fit the config, or needs what is not installed.
    """
    provider = hybrid_provider(
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        hybrid_layer_pattern=hybrid_layer_pattern,
        **hybrid_options,
    )
    return build_model(provider, config, groups, before_wrapping=before_wrapping)


def hybrid_provider(
    *, vocab_size: int, max_sequence_length: int, hybrid_layer_pattern: str, **hybrid_options: Any
) -> ModelProvider:
    """Return a provider of mcore's `HybridModel`; arguments as in `build_hybrid_model`.

    `config.transformer_impl` chooses the layers: Transformer Engine's by mcore's own spec, or torch-only ones (see
    `minloop.layers`), whose checkpoints are the same.

    Raises:
        ValueError: when called, see `build_hybrid_model`.
    """

    def provide(
        config: TransformerConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> MegatronModule:
        check_vocab_size(vocab_size, config)
        check_pattern(hybrid_layer_pattern, config)
        return HybridModel(
            config,
            hybrid_stack_spec=_stack_spec(config),
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            hybrid_layer_pattern=divide_pattern(hybrid_layer_pattern, config),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **_options(config, hybrid_options),
        )

    return provide


def _options(config: TransformerConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for `HybridModel` among those given; YaRN's are set on `config`."""
    options = {"position_embedding_type": "none"} | given
    known = ("learned_absolute", "rope", "yarn", "none")
    if options["position_embedding_type"] not in known:
        raise ValueError(
            f"position_embedding_type={options['position_embedding_type']!r}: hybrid models have {', '.join(known)}"
        )
    check_gpt_options(config, options)
    return take_yarn_options(config, options)


def _stack_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of the stack, one layer of each kind."""
    if config.transformer_impl == "transformer_engine":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return dataclasses.replace(hybrid_stack_spec, module=OwnStreamHybridStack)
    # With these maps checkpoints name a norm as Transformer Engine does, which keeps it in the linear layer behind it.
    parts = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    attention = _attention_layer(parts.self_attention, "" if config.multi_latent_attention else "linear_qkv")
    layers = HybridStackSubmodules(
        mamba_layer=_mamba_layer(),
        gdn_layer=_attention_layer(_gated_delta_net(), "in_proj"),
        attention_layer=attention,
        mla_layer=attention,
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=parts.mlp,
                mlp_bda=_ADD,
                sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
            ),
        ),
        moe_layer=ModuleSpec(
            MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1),
                mlp_bda=_ADD,
            ),
        ),
        mtp_block_spec=_mtp_block(),
    )
    return with_torch_parts(ModuleSpec(HybridStack, submodules=layers))


def _attention_layer(mixer: Any, behind_norm: str) -> ModuleSpec:
    """A layer that only mixes along the sequence; `behind_norm` is the linear layer that its norm goes with, if any."""
    names = {"input_layernorm.": f"self_attention.{behind_norm}.layer_norm_"} if behind_norm else {}
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=mixer,
            self_attn_bda=_ADD,
            sharded_state_dict_keys_map=names,
        ),
    )


def _gated_delta_net() -> ModuleSpec:
    linears = GatedDeltaNetSubmodules(ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    return ModuleSpec(GatedDeltaNet, submodules=linears)


def _mamba_layer() -> ModuleSpec:
    return ModuleSpec(
        MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=WrappedTorchNorm,
            mixer=ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)),
            mamba_bda=_ADD,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _mtp_block() -> ModuleSpec:
    """Multi-token prediction; its layers come from the pattern."""
    parts: dict[str, Any] = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    parts |= {"eh_proj": ColumnParallelLinear, "mtp_model_layer": None}
    layer = MultiTokenPredictionLayerSubmodules(**parts)
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=layer)])
    return ModuleSpec(MultiTokenPredictionBlock, submodules=layers)
