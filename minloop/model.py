"""Models: a provider builds one chunk; `build_model` builds this rank's chunks, one per virtual pipeline stage."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.module import Float16Module

from minloop.architecture import check_gpt_options, gpt_specs, take_yarn_options, unwrapped
from minloop.checks import check_config
from minloop.distributed import check_seeded
from minloop.groups import check_groups
from minloop.layers.cp_loss_mask import count_tokens_of_all_ranks
from minloop.layers.embedding import fuse_embedding_gradient
from minloop.layers.expert_products import join_experts
from minloop.layers.installed import adapt_experts, adapt_layers, fuse_rope_where_it_fits, install_kernels
from minloop.messages import without_log_lines
from minloop.meta_device import cut_as_built
from minloop.precision_checks import start_from_own_weights
from minloop.tp_overlap import require_tp_overlap


class ModelProvider(Protocol):
    """Builds one model chunk: any `MegatronModule` with a ``set_input_tensor(tensor)``, by which mcore's schedules hand
    over the activations of the stage before. `gpt_forward_step` also reads ``pg_collection``, ``vocab_size``,
    ``max_sequence_length`` and ``position_embedding_type`` from it. For checkpoints that fit other layouts, a layer has
    one name whatever its stage, and all modules that hold a part of it are `MegatronModule`s or mcore's layers.
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

    For a model larger than a GPU, `init_model_with_meta_device` keeps of each layer's weights only this rank's part, as
    soon as they are drawn, until `wrap_fsdp` puts them into its shards: the same weights as otherwise. What is no
    `TransformerLayer` or other layer of mcore's, such as the embedding, is whole until then.

    Args:
        provider: builds one chunk.
        before_wrapping: called with each chunk before it is cast to bf16 or fp16: load weights, freeze, add adapters.
    Raises:
        ValueError: the groups have another layout than the config; `before_wrapping` with
            `init_model_with_meta_device`, when it would see no weights.
        RuntimeError: `deterministic_mode`, but torch does not use deterministic algorithms; `tp_comm_overlap` without
            `init_tp_overlap`; no random streams to draw the weights from, as neither `init_distributed` nor
            `seed_ranks` was called.
    """
    check_config(config)
    check_groups(config, groups)
    check_seeded(config)
    _check_start(config, before_wrapping)
    install_kernels(config)
    require_tp_overlap(config)
    config = copy.copy(config)
    stages = config.virtual_pipeline_model_parallel_size
    chunks: list[MegatronModule] = []
    for stage in range(stages or 1):
        vp_stage = None if stages is None else stage
        first = is_pp_first_stage(groups.pp) and is_vp_first_stage(stage, stages)
        last = is_pp_last_stage(groups.pp) and is_vp_last_stage(stage, stages)
        with cut_as_built(config, groups) if config.init_model_with_meta_device else contextlib.nullcontext():
            chunk = provider(config, pre_process=first, post_process=last, vp_stage=vp_stage, pg_collection=groups)
        _complete(chunk, config, groups, first, last)
        if before_wrapping is not None:
            before_wrapping(chunk)
            start_from_own_weights(chunk)
        _bring_to_gpu(chunk)
        chunks.append(Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk)
        join_experts(chunks[-1], config)
    _freeze_tied_weight(chunks, groups)
    return chunks


def _check_start(config: TransformerConfig, before_wrapping: Any) -> None:
    if config.init_model_with_meta_device and before_wrapping is not None:
        raise ValueError(
            "before_wrapping with init_model_with_meta_device=True, where layers have no weights before wrap_fsdp: set "
            "it to False, or load weights into the training state"
        )
    if config.deterministic_mode and not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "deterministic_mode=True, but torch does not use deterministic algorithms: give this config to "
            "init_distributed, or call torch.use_deterministic_algorithms(True) where a host made the groups"
        )


def _bring_to_gpu(chunk: MegatronModule) -> None:
    """Bring a chunk to this rank's GPU, position embeddings at least; layers' weights may be on the meta device."""
    device = torch.cuda.current_device()
    if not any(parameter.is_meta for parameter in chunk.parameters()):
        chunk.cuda(device)
        return
    for tensor in (*chunk.parameters(), *chunk.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.cuda(device)


def _freeze_tied_weight(chunks: list[MegatronModule], groups: ProcessGroupCollection) -> None:
    """If a first or last stage froze its copy of a tied embedding, freeze the other: mcore sums gradients of both."""
    group: Any = groups.embd
    models: list[Any] = [unwrapped(chunk) for chunk in chunks]
    ends = [model for model in models if model.pre_process or model.post_process]
    if group is None or group.size() == 1 or not ends or not ends[0].share_embeddings_and_output_weights:
        return
    weight = ends[0].shared_embedding_or_output_weight()
    trains = torch.tensor(int(weight.requires_grad), device=weight.device)
    torch.distributed.all_reduce(trains, op=torch.distributed.ReduceOp.MIN, group=group)
    weight.requires_grad_(bool(trains))


def _complete(
    chunk: MegatronModule, config: TransformerConfig, groups: ProcessGroupCollection, first: bool, last: bool
) -> None:
    """Give a chunk what mcore takes for granted, and the loss masks that multi-token prediction needs."""
    # mcore asks every model for these: its schedules for the first, its sums of tied gradients for the others.
    asked = {"model_type": ModelType.encoder_or_decoder, "share_embeddings_and_output_weights": False}
    for name, value in (asked | {"pre_process": first, "post_process": last}).items():
        if not hasattr(chunk, name):
            setattr(chunk, name, value)
    adapt_layers(chunk, config)
    for parameter in chunk.parameters():  # without them gradient norms and checkpoints count a parameter wrongly
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if config.gradient_accumulation_fusion:
        fuse_embedding_gradient(chunk, config)
    fuse_rope_where_it_fits(chunk, config)
    adapt_experts(chunk, config)
    if config.mtp_num_layers and config.context_parallel_size > 1:
        count_tokens_of_all_ranks(chunk, groups.cp)


def check_vocab_size(vocab_size: int, config: TransformerConfig) -> None:
    """Raise ValueError if `vocab_size` cannot be divided over the tensor parallel ranks."""
    tp = config.tensor_model_parallel_size
    if vocab_size % tp:
        raise ValueError(
            f"vocab_size ({vocab_size}) is not divisible by tensor_model_parallel_size ({tp}): pad it to "
            f"{-(-vocab_size // tp) * tp}"
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
            ``share_embeddings_and_output_weights=True``. With ``position_embedding_type="yarn"`` also YaRN's:
            `yarn_rotary_scaling_factor` and `yarn_original_max_position_embeddings`, and of those that have defaults
            `yarn_beta_fast`, `yarn_beta_slow`, `yarn_mscale`, `yarn_mscale_all_dim`,
            `yarn_correction_range_round_to_int`.
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
        check_vocab_size(vocab_size, config)
        check_gpt_options(config, gpt_options)
        options = take_yarn_options(config, gpt_options)
        layer_spec, mtp_spec = gpt_specs(config, pg_collection, vp_stage)
        with without_log_lines("megatron.core.models.gpt.gpt_model", "DEPRECATED"):
            model = GPTModel(
                config,
                transformer_layer_spec=layer_spec,
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                pre_process=pre_process,
                post_process=post_process,
                mtp_block_spec=mtp_spec,
                pg_collection=pg_collection,
                vp_stage=vp_stage,
                **options,
            )
        if options.get("share_embeddings_and_output_weights") and model.mtp_process and post_process:
            # This stage's embedding serves as output weight. mcore allocates one beside it, which it then cannot save.
            model.output_layer.weight = None
        return model

    return provide
