"""How many parameters a rank of any layout holds, from the config alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from minloop.flops import gpt_layers, matrices


@dataclass
class ParameterCount:
    """Parameters of one rank.

    Attributes:
        linear: in the layers' dense products, which FP8 quantises.
        other: embeddings, output layer, norms, biases, routers.
        expert_linear: in the products of this rank's experts.
        expert_other: their biases.
    """

    linear: int = 0
    other: int = 0
    expert_linear: int = 0
    expert_other: int = 0

    @property
    def dense(self) -> int:
        """Parameters that data parallel ranks share."""
        return self.linear + self.other

    @property
    def expert(self) -> int:
        """Parameters that expert data parallel ranks share."""
        return self.expert_linear + self.expert_other

    @property
    def total(self) -> int:
        return self.dense + self.expert


def check_countable(config: Any) -> None:
    """Raise ValueError for models whose parts are not counted."""
    unknown = {
        "is_hybrid_model": config.is_hybrid_model,
        "multi_latent_attention": config.multi_latent_attention,
        "experimental_attention_variant": config.experimental_attention_variant,
        "mtp_num_layers": config.mtp_num_layers,
        "moe_latent_size": config.moe_latent_size,
    }
    for name, value in unknown.items():
        if value:
            raise ValueError(f"{name}={value!r}: the memory of such a model is not counted; estimate it without")
    if isinstance(config, HeterogeneousTransformerConfig):
        raise ValueError("HeterogeneousTransformerConfig: the memory of such a model is not counted")


def stage_layers(config: Any, pipeline_rank: int) -> list[list[str]]:
    """Of each chunk of a pipeline stage, the second part of its layers: "-" an MLP, "E" experts."""
    kinds = [kinds[1] for kinds, _ in gpt_layers(config)]
    layout = config.pipeline_model_parallel_layout
    chunks: list[list[str]] = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        for rank in range(config.pipeline_model_parallel_size):
            if layout is None:
                count = get_num_layers_to_build(config, stage, rank)
            else:  # mcore's own functions would ask the process groups
                count = layout.layout[rank][stage].count(LayerType.decoder)
            here, kinds = kinds[:count], kinds[count:]
            if rank == pipeline_rank:
                chunks.append(here)
    return chunks


def count_parameters(
    config: Any,
    *,
    vocab_size: int,
    pipeline_rank: int = 0,
    max_sequence_length: int = 0,
    share_embeddings_and_output_weights: bool = False,
) -> ParameterCount:
    """Count the parameters of a GPT on one tensor parallel rank of a pipeline stage, exactly.

    Args:
        max_sequence_length: tokens of a learned position embedding; 0 for any other, which has no parameters.
    Raises:
        ValueError: the model has parts that are not counted.
    """
    check_countable(config)
    count = ParameterCount()
    for kinds in stage_layers(config, pipeline_rank):
        for kind in kinds:
            for name, number in [*_attention(config), *(_experts(config) if kind == "E" else _mlp(config))]:
                setattr(count, name, getattr(count, name) + number)
    stages = config.pipeline_model_parallel_size
    first, last = pipeline_rank == 0, pipeline_rank == stages - 1
    table = vocab_size // config.tensor_model_parallel_size * config.hidden_size
    if first:
        count.other += table + max_sequence_length * config.hidden_size
    if last:
        tied_here = share_embeddings_and_output_weights and first
        count.other += (0 if tied_here else table) + _norm(config, config.hidden_size)
    return count


def largest_layer(config: Any) -> int:
    """Return the parameters that a rank has of the largest layer."""
    kinds = {kind for kinds in stage_layers(config, 0) for kind in kinds}
    parts = [[*_attention(config), *(_experts(config) if kind == "E" else _mlp(config))] for kind in kinds]
    return max((sum(number for _, number in part) for part in parts), default=0)


def _norm(config: Any, size: int) -> int:
    return size * (2 if config.normalization == "LayerNorm" else 1)


def _attention(config: Any) -> Iterator[tuple[str, int]]:
    hidden, tp = config.hidden_size, config.tensor_model_parallel_size
    query = config.num_attention_heads * config.kv_channels
    mixed = query + 2 * config.num_query_groups * config.kv_channels + (query if config.attention_output_gate else 0)
    yield "linear", hidden * (mixed + query) // tp
    yield "other", _norm(config, hidden)
    if config.add_qkv_bias or config.add_bias_linear:
        yield "other", mixed // tp
    if config.add_bias_linear:
        yield "other", hidden
    if config.qk_layernorm:
        yield "other", 2 * _norm(config, config.kv_channels)
    if config.softmax_type == "learnable":
        yield "other", config.num_attention_heads // tp


def _mlp(config: Any) -> Iterator[tuple[str, int]]:
    hidden, ffn = config.hidden_size, config.ffn_hidden_size // config.tensor_model_parallel_size
    yield "linear", matrices(config) * hidden * ffn
    yield "other", _norm(config, hidden)
    if config.add_bias_linear:
        yield "other", (matrices(config) - 1) * ffn + hidden


def _experts(config: Any) -> Iterator[tuple[str, int]]:
    hidden, count = config.hidden_size, matrices(config)
    tp = config.tensor_model_parallel_size
    ffn = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or tp)
    local = config.num_moe_experts // config.expert_model_parallel_size
    yield "expert_linear", local * count * hidden * ffn
    yield "other", hidden * config.num_moe_experts + _norm(config, hidden)
    if config.add_bias_linear:
        yield "expert_other", local * ((count - 1) * ffn + hidden)
        yield "other", config.num_moe_experts
    if shared := config.moe_shared_expert_intermediate_size:
        yield "linear", count * hidden * shared // tp
        if config.moe_shared_expert_gate:
            yield "other", hidden
