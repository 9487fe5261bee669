"""Models: a provider builds one chunk; `build_model` builds this rank's chunks, one per virtual pipeline stage."""

import copy
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.module import Float16Module

from minloop.checks import check_config
from minloop.layers import with_torch_parts
from minloop.messages import without_log_lines


class ModelProvider(Protocol):
    """Builds one model chunk: any `MegatronModule` with a ``set_input_tensor(tensor)``, by which mcore's schedules hand
    over the activations of the stage before. `gpt_forward_step` also reads ``pre_process``, ``post_process``,
    ``pg_collection``, ``vocab_size``, ``max_sequence_length`` and ``position_embedding_type`` from it.
    """

    def __call__(
        self,
        config: TransformerConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> MegatronModule:
        """Build the chunk of virtual stage `vp_stage` on this rank.

        Args:
            config: the copy to give to the model: a training state binds its hooks to it.
            pre_process: whether the chunk holds the embedding.
            post_process: whether the chunk holds the output layer and computes the loss.
            vp_stage: virtual pipeline stage, None without virtual stages.
            pg_collection: the groups to pass on to mcore's modules.
        """
        ...


def build_model(
    provider: ModelProvider,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    before_wrapping: Callable[[MegatronModule], None] | None = None,
) -> list[MegatronModule]:
    """Build this rank's model chunks: on its device, in the config's precision, one per virtual pipeline stage.

    All chunks share one copy of `config`, so that one config serves many models.

    Args:
        provider: builds one chunk.
        before_wrapping: called with each chunk before it is cast to bf16 or fp16: load weights, freeze, add adapters.
    Raises:
        ValueError: the groups have another layout than the config.
    """
    check_config(config)
    check_groups(config, groups)
    config = copy.copy(config)
    stages = config.virtual_pipeline_model_parallel_size
    chunks: list[MegatronModule] = []
    for stage in range(stages or 1):
        vp_stage = None if stages is None else stage
        chunk = provider(
            config,
            pre_process=is_pp_first_stage(groups.pp) and is_vp_first_stage(stage, stages),
            post_process=is_pp_last_stage(groups.pp) and is_vp_last_stage(stage, stages),
            vp_stage=vp_stage,
            pg_collection=groups,
        )
        if getattr(chunk, "model_type", None) is None:
            cast(Any, chunk).model_type = ModelType.encoder_or_decoder  # mcore's schedules ask for it
        for parameter in chunk.parameters():  # without them gradient norms and checkpoints count a parameter wrongly
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if before_wrapping is not None:
            before_wrapping(chunk)
        chunk.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk)
    return chunks


def check_groups(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raise ValueError unless the groups have the sizes that `config` names."""
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": groups.tp,
        "pipeline_model_parallel_size": groups.pp,
        "context_parallel_size": groups.cp,
        "expert_model_parallel_size": groups.ep,
    }
    for name, group in sizes.items():
        if group is not None and group.size() != getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)} in the config, but the groups were made for {group.size()}: pass "
                "the config that init_distributed was given, or shut down and init again with this one"
            )


def build_gpt_model(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    vocab_size: int,
    max_sequence_length: int,
    before_wrapping: Callable[[MegatronModule], None] | None = None,
    **gpt_options: Any,
) -> list[MegatronModule]:
    """Build a GPT: `build_model` with `gpt_provider`; see both.

    Args:
        vocab_size: rows of the embedding; a multiple of the tensor parallel size.
        max_sequence_length: tokens; the size of the learned position embedding.
        gpt_options: other arguments of mcore's `GPTModel`, such as ``position_embedding_type="rope"`` or
            ``share_embeddings_and_output_weights=True``.
    """
    provider = gpt_provider(vocab_size=vocab_size, max_sequence_length=max_sequence_length, **gpt_options)
    return build_model(provider, config, groups, before_wrapping=before_wrapping)


def gpt_provider(*, vocab_size: int, max_sequence_length: int, **gpt_options: Any) -> ModelProvider:
    """Return a provider of mcore's `GPTModel`; arguments as in `build_gpt_model`.

    `config.transformer_impl` chooses the layers: Transformer Engine's, or mcore's local ones with torch-only parts
    where mcore's own need Transformer Engine (see `minloop.layers`).

    Raises:
        ValueError: when called, if `vocab_size` cannot be divided over the tensor parallel ranks.
    """

    def provide(
        config: TransformerConfig,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> MegatronModule:
        tp = config.tensor_model_parallel_size
        if vocab_size % tp:
            raise ValueError(
                f"vocab_size ({vocab_size}) is not divisible by tensor_model_parallel_size ({tp}): pad it to "
                f"{-(-vocab_size // tp) * tp}"
            )
        layer_spec, mtp_spec = _gpt_specs(config, pg_collection, vp_stage)
        with without_log_lines("megatron.core.models.gpt.gpt_model", "DEPRECATED"):
            return GPTModel(
                config,
                transformer_layer_spec=layer_spec,
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                pre_process=pre_process,
                post_process=post_process,
                mtp_block_spec=mtp_spec,
                pg_collection=pg_collection,
                vp_stage=vp_stage,
                **gpt_options,
            )

    return provide


def _gpt_specs(config: TransformerConfig, groups: ProcessGroupCollection, vp_stage: int | None) -> tuple[Any, Any]:
    """The layer specs of this stage: (decoder block, multi-token prediction block or None)."""
    with_te = config.transformer_impl == "transformer_engine"
    where: dict[str, Any] = {"vp_stage": vp_stage, "pp_rank": groups.pp.rank()}
    layer_spec: Any = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        **where,
    )
    mtp_spec: Any = None
    if config.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=with_te, **where)
    return (layer_spec, mtp_spec) if with_te else (with_torch_parts(layer_spec), with_torch_parts(mtp_spec))
