"""How much of a GPU's memory a training step takes, from the configs alone, before anything is started."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from minloop.activation_memory import stage_activations
from minloop.architecture import check_position_embedding
from minloop.estimate_checks import check_estimate
from minloop.fsdp_checks import check_tied_weights, is_torch_fsdp
from minloop.fsdp_memory import kept, layers_at_work, sharded_parts
from minloop.parameter_count import ParameterCount, count_parameters

MOMENTS = {"adam": 2, "sgd": 1, "lion": 1}
"""fp32 numbers that an optimizer keeps per parameter, beside its fp32 copy of a half precision parameter."""

WORKSPACE = 160 * 2**20
"""Bytes of the workspaces of cuBLAS, cuDNN and Transformer Engine, as measured on an H200."""

OUTPUT_BACKWARD = 3
"""Bytes per weight of the output layer that its backward pass takes, measured on an H200: vocabularies from 50 to 131
thousand, hidden sizes from 1024 to 4096, one and two tensor parallel ranks agree in it."""

BYTES_PER_LOGIT = {"te": 4, "native": 10}
"""At the loss, of a half precision model: Transformer Engine's fused cross entropy holds the logits and their gradient;
mcore's own, whether fused or not, holds two fp32 copies beside the logits."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest moment of a step of one rank, as ``torch.cuda.max_memory_allocated()`` counts them.

    What the CUDA context and NCCL take (about 1 GiB a process and more), and what the allocator holds beyond what is
    used, is not in it.

    Attributes:
        weights: in the dtype they are computed with; with FP8 also its copies.
        gradients: the buffers that are summed over data parallel ranks, or this rank's part of them.
        optimizer: fp32 weights and moments, of what this rank updates.
        activations: what the backward pass needs, of all microbatches in flight.
        loss: logits and their gradient at the end of a forward pass, on the last pipeline stage.
        backward: what one layer's backward pass takes, gradients and what it recomputes, when there are no logits left.
        layers: of a fully sharded model, whole weights and gradients of the layers at work.
        update: copies that an optimizer step makes of gradients, when no activations are left.
        other: workspaces of libraries.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    backward: int
    layers: int
    update: int
    other: int

    @property
    def total(self) -> int:
        """The peak: the end of a forward pass, in a backward pass or in the optimizer's step."""
        passing = self.activations + self.layers + max(self.loss, self.backward)
        return self.weights + self.gradients + self.optimizer + self.other + max(passing, self.update)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in asdict(self).items())
        return f"{self.total / 2**30:.1f} GiB of {parts}"


def estimate_memory(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    micro_batch_size: int,
    world_size: int,
    num_microbatches: int | None = None,
    pipeline_rank: int | None = None,
    position_embedding_type: str = "learned_absolute",
    share_embeddings_and_output_weights: bool = False,
) -> MemoryEstimate:
    """Estimate the peak memory of a GPT's training step on one rank of any layout.

    Parameters are counted exactly, and multiplied by the bytes of their dtypes. Activations follow Korthikanti et al.
    2022 (arXiv 2205.05198), section 4, changed for what trains today: attention keeps no scores (flash attention),
    SwiGLU has two inputs, keys and values have groups, experts get moe_router_topk copies of a token. They are those
    of Transformer Engine's layers with fused kernels, whatever `config.transformer_impl` is. Experts are taken to be
    balanced. Measured peaks on H200 of dense models are within 0.5 %; those of fully sharded ones are not measured.

    Args:
        config: a `TransformerConfig`.
        vocab_size: rows of the embedding, with padding.
        sequence_length: tokens of a whole sequence, over all context parallel ranks.
        world_size: ranks in all.
        num_microbatches: of a step, where fewer than the pipeline has stages; by default no bound on those in flight.
        pipeline_rank: the stage; by default the fullest.
        position_embedding_type: as in `build_gpt_model`; a learned one is taken to have `sequence_length` rows.
    Raises:
        ValueError: configs, layout and sizes that could not be built together; a model or optimizer of a kind not
            counted; activations that are moved to the host.
    """
    _check_moments(optimizer_config)
    sizes = {"vocab_size": vocab_size, "sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    sizes |= {"world_size": world_size} | ({} if num_microbatches is None else {"num_microbatches": num_microbatches})
    check_estimate(config, ddp_config, optimizer_config, sizes, pipeline_rank)
    check_position_embedding(position_embedding_type)
    check_tied_weights(ddp_config, share_embeddings_and_output_weights)
    stages = range(config.pipeline_model_parallel_size) if pipeline_rank is None else [pipeline_rank]
    tokens = sequence_length * micro_batch_size // config.context_parallel_size
    learned = sequence_length if position_embedding_type == "learned_absolute" else 0
    estimates: list[MemoryEstimate] = []
    for stage in stages:
        count = count_parameters(
            config,
            vocab_size=vocab_size,
            pipeline_rank=stage,
            max_sequence_length=learned,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
        )
        weights = _weights(config, ddp_config, count, world_size)
        gradients = _gradients(config, ddp_config, count, world_size)
        optimizer, update = _optimizer(config, ddp_config, optimizer_config, count, world_size)
        activations, backward = stage_activations(config, tokens, stage, num_microbatches)
        loss = _loss(config, vocab_size, tokens) if stage == config.pipeline_model_parallel_size - 1 else 0
        passing = (activations, loss, backward, layers_at_work(config, ddp_config, count, vocab_size))
        estimates.append(MemoryEstimate(weights, gradients, optimizer, *passing, update, WORKSPACE))
    return max(estimates, key=lambda estimate: estimate.total)


def _check_moments(optimizer_config: OptimizerConfig) -> None:
    if optimizer_config.optimizer not in MOMENTS:
        raise ValueError(
            f"OptimizerConfig.optimizer {optimizer_config.optimizer!r}: the memory of {', '.join(MOMENTS)} is counted"
        )


def _weights(config: Any, ddp_config: DistributedDataParallelConfig, count: ParameterCount, world_size: int) -> int:
    size = config.params_dtype.itemsize
    linear = count.linear + count.expert_linear
    copies = 2 * linear if config.fp8 else 0  # a byte each, by rows and by columns
    here = kept("weights", config, ddp_config, count, world_size)
    if config.fp8 and config.fp8_param and "weights" not in sharded_parts(ddp_config):
        here -= linear  # which are in FP8 alone
    return copies + size * here


def _gradients(config: Any, ddp_config: DistributedDataParallelConfig, count: ParameterCount, world_size: int) -> int:
    here = kept("gradients", config, ddp_config, count, world_size)
    return here * (4 if _in_fp32(ddp_config) else config.params_dtype.itemsize)


def _in_fp32(ddp_config: DistributedDataParallelConfig) -> bool:
    """Whether reduced gradients stay in fp32: torch FSDP2 keeps them in the dtype of the weights."""
    return ddp_config.grad_reduce_in_fp32 and not is_torch_fsdp(ddp_config)


def _optimizer(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    count: ParameterCount,
    world_size: int,
) -> tuple[int, int]:
    """Bytes that stay, and those that a step takes."""
    here = kept("optimizer", config, ddp_config, count, world_size)
    moments, half = 4 * MOMENTS[optimizer_config.optimizer], config.params_dtype != torch.float32
    weight = 4 if half or ddp_config.use_megatron_fsdp else 0
    gradient = 4 if half and not _in_fp32(ddp_config) else 0
    if optimizer_config.use_precision_aware_optimizer:
        if not optimizer_config.optimizer_cpu_offload:
            moments = optimizer_config.exp_avg_dtype.itemsize + optimizer_config.exp_avg_sq_dtype.itemsize
        own = half and not ddp_config.use_megatron_fsdp  # which keeps its main weights itself
        if optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and own:
            weight, gradient = _precision_aware(config, optimizer_config), 0
    if optimizer_config.optimizer_cpu_offload:
        here = round(here * (1 - optimizer_config.optimizer_offload_fraction))
        weight += 0 if _in_fp32(ddp_config) else 4  # fp32 copies of their gradients, which stay
    return here * (weight + moments), here * gradient


def _precision_aware(config: Any, optimizer_config: OptimizerConfig) -> int:
    """Bytes of a main weight; of an fp32 one Transformer Engine keeps the half that the bf16 weight lacks."""
    size = optimizer_config.main_params_dtype.itemsize
    remainders = optimizer_config.store_param_remainders and config.params_dtype == torch.bfloat16 and size == 4
    return 2 if remainders and not optimizer_config.optimizer_cpu_offload else size


def _loss(config: Any, vocab_size: int, tokens: int) -> int:
    tp, size = config.tensor_model_parallel_size, config.params_dtype.itemsize
    columns = vocab_size // tp
    fused = config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te"
    logit = BYTES_PER_LOGIT["te" if fused else "native"] * size // 2
    norm = 2 * size * config.hidden_size * tokens // (tp if config.sequence_parallel else 1)  # its input and output
    return logit * columns * tokens + norm + OUTPUT_BACKWARD * config.hidden_size * columns
