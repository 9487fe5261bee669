"""What fully sharded data parallelism keeps in parts, and what of whole layers is there while they are at work."""

from collections.abc import Set
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig

from minloop.fsdp_checks import STRATEGIES, is_torch_fsdp
from minloop.parameter_count import ParameterCount, largest_layer

BUCKET_SIZE = 40_000_000
"""Parameters that Megatron FSDP reduces at a time where layers are no units, unless `bucket_size` says otherwise."""


def sharded_parts(ddp_config: DistributedDataParallelConfig) -> Set[str]:
    """Return which of "weights", "gradients" and "optimizer" a rank keeps its part of only."""
    if is_torch_fsdp(ddp_config):
        return {"weights", "gradients", "optimizer"}
    if not ddp_config.use_megatron_fsdp:
        return {"optimizer"} if ddp_config.use_distributed_optimizer else set()
    stage = STRATEGIES.index(ddp_config.data_parallel_sharding_strategy)  # that of ZeRO
    return {*("optimizer", "gradients", "weights")[:stage]}


def kept(
    part: str, config: Any, ddp_config: DistributedDataParallelConfig, count: ParameterCount, world_size: int
) -> int:
    """Return of how many parameters a rank keeps "weights", "gradients" or "optimizer".

    Those of its layers, or its share where they are divided over the ranks that would hold the same ones.
    """
    if part not in sharded_parts(ddp_config):
        return count.total
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    over_replicas = part == "optimizer" and ddp_config.outer_dp_sharding_strategy == "optim"
    instances = 1 if over_replicas else ddp_config.num_distributed_optimizer_instances
    expert_ranks = (config.expert_tensor_parallel_size or tp) * config.expert_model_parallel_size * pp
    ranks, expert_ranks = world_size // (tp * pp * instances), max(1, world_size // (expert_ranks * instances))
    return -(-count.dense // ranks) + -(-count.expert // expert_ranks)


def layers_at_work(
    config: Any, ddp_config: DistributedDataParallelConfig, count: ParameterCount, vocab_size: int
) -> int:
    """Return the bytes of gathered weights and of gradients that are not yet reduced, at the most.

    Of two units: the one that computes, and the one whose communication is under way.
    """
    layer, table = largest_layer(config), vocab_size // config.tensor_model_parallel_size * config.hidden_size
    weight = config.params_dtype.itemsize
    gradient = 4 if ddp_config.grad_reduce_in_fp32 else weight
    if is_torch_fsdp(ddp_config):
        units = 2 * max(layer, table)
        whole = units if getattr(ddp_config, "reshard_after_forward", True) else count.total
        return weight * whole + gradient * units
    parts = sharded_parts(ddp_config)
    if "weights" in parts:  # what is in no layer stays gathered throughout a pass
        return weight * (2 * layer + 2 * table) + gradient * max(2 * layer, table)
    buckets = min(2 * (ddp_config.bucket_size or BUCKET_SIZE), count.total)
    return gradient * max(buckets, table) if "gradients" in parts else 0
