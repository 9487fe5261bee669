"""Checks of fully sharded data parallelism: what Megatron FSDP and torch FSDP2 cannot train, or would train wrongly."""

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE

MEGATRON_FSDP = {
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "outer_dp_sharding_strategy": "no_shard",
    "fsdp_double_buffer": False,
    "megatron_fsdp_enable_fine_grained_param_gather": False,
}
"""Fields of `DistributedDataParallelConfig` that mcore's DDP does not read, with their defaults."""

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def is_torch_fsdp(ddp_config: DistributedDataParallelConfig) -> bool:
    """Whether this asks for torch FSDP2."""
    return isinstance(ddp_config, TorchFullyShardedDataParallelConfig)


def check_not_fsdp(ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse what only `wrap_fsdp` reads.

    Raises:
        ValueError: naming the field.
    """
    if is_torch_fsdp(ddp_config):
        raise ValueError("a TorchFullyShardedDataParallelConfig asks for torch FSDP2: use wrap_fsdp, not wrap_ddp")
    for name, default in MEGATRON_FSDP.items():
        if (value := getattr(ddp_config, name)) != default:
            raise ValueError(
                f"{name}={value!r} asks for Megatron FSDP: use wrap_fsdp with use_megatron_fsdp=True, or leave it at "
                f"{default!r} for wrap_ddp"
            )


def check_meta_device(config: Any, ddp_config: DistributedDataParallelConfig | None = None) -> None:
    """Refuse `init_model_with_meta_device` where nothing would put the weights where they belong.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if not config.init_model_with_meta_device:
        return
    for name in ("fp8_param", "use_cpu_initialization"):
        if getattr(config, name):
            raise ValueError(f"init_model_with_meta_device=True with {name}=True: set one of them to False")
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            "init_model_with_meta_device=True is for wrap_fsdp, which has no pipelines, with "
            f"pipeline_model_parallel_size ({config.pipeline_model_parallel_size}) > 1: set one of them to False or 1"
        )
    if ddp_config is not None and not is_torch_fsdp(ddp_config):
        strategy = ddp_config.data_parallel_sharding_strategy
        if not ddp_config.use_megatron_fsdp or strategy == "no_shard":
            raise ValueError(
                f"init_model_with_meta_device=True with use_megatron_fsdp={ddp_config.use_megatron_fsdp} and "
                f"data_parallel_sharding_strategy={strategy!r}: it is for wrap_fsdp with shards; set it to False"
            )


def check_megatron_fsdp(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse what mcore 0.19's Megatron FSDP cannot train, fails on without a name, or trains wrongly in silence.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    _check_strategies(ddp_config)
    _check_model(config, "Megatron FSDP")
    ep = config.expert_model_parallel_size
    if ddp_config.data_parallel_sharding_strategy == "no_shard" and ep > 1:
        raise ValueError(
            f"data_parallel_sharding_strategy='no_shard' with expert_model_parallel_size ({ep}) > 1: every rank would "
            "clip by the norm of its own experts' gradients, and replicas come apart; use 'optim' or wrap_ddp"
        )
    if config.overlap_moe_expert_parallel_comm and ddp_config.fsdp_double_buffer:
        raise ValueError(
            "overlap_moe_expert_parallel_comm=True with fsdp_double_buffer=True, which has room for one microbatch's "
            "layers: set one of them to False"
        )
    if config.fp16:
        raise ValueError(
            "Megatron FSDP with fp16=True, where mcore 0.19 fails on ranks that hold no part of a weight: use bf16=True"
        )
    if ddp_config.average_in_collective:
        raise ValueError("average_in_collective=True, with which Megatron FSDP fails: set it to False")
    if ddp_config.align_param_gather:
        raise ValueError("align_param_gather=True aligns pipeline stages, which Megatron FSDP lacks: set it to False")
    if ddp_config.megatron_fsdp_main_params_dtype != torch.float32:
        raise ValueError(
            f"megatron_fsdp_main_params_dtype is {ddp_config.megatron_fsdp_main_params_dtype}: the optimizer would "
            "round every update to it; set it to torch.float32"
        )
    if ddp_config.gradient_reduce_div_fusion and not torch.cuda.is_available():
        raise ValueError(
            "gradient_reduce_div_fusion=True needs NCCL, and there is no GPU: set it to False, or leave it to "
            "build_ddp_config"
        )
    if config.gradient_accumulation_fusion and not HAVE_TE:
        raise ValueError(
            "Megatron FSDP with gradient_accumulation_fusion=True needs Transformer Engine, which is not installed: "
            "set it to False"
        )
    if find_spec("einops") is None:
        raise ValueError("use_megatron_fsdp=True needs the package einops, which is not installed: pip install einops")


def check_tied_weights(ddp_config: DistributedDataParallelConfig, tied: bool) -> None:
    """Raise ValueError if torch FSDP2 would have to shard a weight that is embedding and output layer in one."""
    if tied and is_torch_fsdp(ddp_config):
        raise ValueError(
            "torch FSDP2 with share_embeddings_and_output_weights=True, whose weight two units would share: set it to "
            "False, or use Megatron FSDP"
        )


def check_instances(config: Any, world_size: int, instances: int) -> None:
    """Refuse replicas of the distributed optimizer, or of fully sharded states, into which no ranks divide.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
        instances: `num_distributed_optimizer_instances`.
    Raises:
        ValueError: naming the fields and their values.
    """
    tp, pp, ep = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.expert_model_parallel_size,
    )
    etp = config.expert_tensor_parallel_size or tp
    sizes = {
        "data and context parallel ranks": world_size // (tp * pp),
        "ranks that hold the same experts": world_size // (etp * ep * pp),  # mcore makes their groups without experts
    }
    for what, size in sizes.items():
        if instances < 1 or size % instances:
            raise ValueError(
                f"num_distributed_optimizer_instances ({instances}) does not divide the {size} {what} that a world of "
                f"{world_size} has with tensor_model_parallel_size ({tp}), pipeline_model_parallel_size ({pp}) and "
                f"expert_model_parallel_size ({ep}): choose a divisor, or 1"
            )


def _check_strategies(ddp_config: DistributedDataParallelConfig) -> None:
    strategy, outer = ddp_config.data_parallel_sharding_strategy, ddp_config.outer_dp_sharding_strategy
    instances = ddp_config.num_distributed_optimizer_instances
    if strategy not in STRATEGIES:
        raise ValueError(f"data_parallel_sharding_strategy={strategy!r} is none of {', '.join(STRATEGIES)}")
    if not ddp_config.use_distributed_optimizer:  # others step on weights that Megatron FSDP never reads
        raise ValueError(
            "use_megatron_fsdp=True with use_distributed_optimizer=False trains nothing, in silence: only mcore's "
            "distributed optimizer copies the weights back, whatever data_parallel_sharding_strategy; set it to True"
        )
    if outer not in ("no_shard", "optim"):
        raise ValueError(f"outer_dp_sharding_strategy={outer!r} is neither 'no_shard' nor 'optim'")
    if outer == "optim" and (instances == 1 or strategy != "optim_grads_params"):
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs num_distributed_optimizer_instances > 1, which is "
            f"{instances}, and data_parallel_sharding_strategy='optim_grads_params', which is {strategy!r}"
        )
    needed = {
        "overlap_grad_reduce": strategy in ("optim_grads", "optim_grads_params") or instances > 1,
        "overlap_param_gather": strategy == "optim_grads_params",
    }
    for name, is_needed in needed.items():
        if is_needed and not getattr(ddp_config, name):
            raise ValueError(
                f"data_parallel_sharding_strategy={strategy!r} with num_distributed_optimizer_instances ({instances}) "
                f"needs {name}=True, which is False: set it to True, or leave it to build_ddp_config"
            )


def _check_model(config: Any, kind: str) -> None:
    """What neither kind can do."""
    if config.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"{kind} with pipeline_model_parallel_size ({config.pipeline_model_parallel_size}) > 1, which mcore 0.19 "
            "lacks: set pipeline_model_parallel_size=1, or use wrap_ddp with use_distributed_optimizer=True"
        )
    if config.hybrid_context_parallel:
        raise ValueError(
            f"{kind} with hybrid_context_parallel=True, whose ranks run different numbers of microbatches, while "
            "every microbatch gathers weights on all of them: use wrap_ddp, or set hybrid_context_parallel=False"
        )
    if config.cuda_graph_impl != "none":
        raise ValueError(f"{kind} with cuda_graph_impl={config.cuda_graph_impl!r}: set it to 'none'")


def check_torch_fsdp(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse what mcore 0.19's wrapper of torch FSDP2 cannot train, or would train wrongly in silence.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    _check_model(config, "torch FSDP2")
    for name in ("use_distributed_optimizer", "use_megatron_fsdp", "average_in_collective"):
        if getattr(ddp_config, name):
            raise ValueError(f"torch FSDP2 with {name}=True, which it does not know: set it to False")
    for name in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
        if (strategy := getattr(ddp_config, name)) != MEGATRON_FSDP[name]:
            raise ValueError(
                f"torch FSDP2 with {name}={strategy!r}, which Megatron FSDP alone reads: leave it out, or use "
                "use_megatron_fsdp=True in the place of reshard_after_forward"
            )
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise ValueError("torch FSDP2 has no replicas here: set num_distributed_optimizer_instances=1")
    if config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size not in (
        None,
        config.tensor_model_parallel_size,
    ):
        raise ValueError(
            f"torch FSDP2 with expert_model_parallel_size ({config.expert_model_parallel_size}) > 1 or another "
            "expert_tensor_parallel_size than tensor_model_parallel_size: experts would be sharded over ranks that "
            "hold other ones; use Megatron FSDP or wrap_ddp"
        )
    if config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "torch FSDP2 with overlap_moe_expert_parallel_comm=True, whose schedule calls parts of layers, where FSDP2 "
            "would gather no weights: set it to False"
        )
    if config.gradient_accumulation_fusion:
        raise ValueError(
            "torch FSDP2 with gradient_accumulation_fusion=True, which writes to main_grad where FSDP2 reads grad: "
            "set it to False"
        )
    if config.fp16:
        raise ValueError("torch FSDP2 with fp16=True, which mcore lacks: use bf16=True")
