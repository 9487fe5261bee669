"""Checks of what is wrapped for data parallelism, and of its gradients: mcore fails without a name, or in silence."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_model_config


def check_wrapping(
    chunks: Sequence[torch.nn.Module], ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> None:
    """Refuse chunks that are wrapped already, groups of another DDP config, and layers of which mcore trains no bias.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    for chunk in chunks:
        if hasattr(chunk, "ddp_config"):
            raise ValueError(f"a chunk is a {type(chunk).__name__}, wrapped already: wrap what build_model returned")
        _check_frozen_weights(chunk)
    check_fused_gradients(get_model_config(chunks[0]), ddp_config, groups)
    if not ddp_config.use_distributed_optimizer:
        return
    instances, made = ddp_config.num_distributed_optimizer_instances, groups.dp_cp.size() // groups.intra_dp_cp.size()
    if instances != made:
        raise ValueError(
            f"num_distributed_optimizer_instances is {instances} in the DistributedDataParallelConfig, but the groups "
            f"were made for {made}: pass init_distributed(..., num_distributed_optimizer_instances={instances}), or "
            "give both the same value"
        )


def check_fused_gradients(config: Any, ddp_config: Any, groups: Any) -> None:
    """Refuse `gradient_accumulation_fusion` where Megatron FSDP keeps gradients whole.

    It tells Transformer Engine to overwrite `main_grad`, which is right for what is reduced after every microbatch, and
    of gradients that are added up over microbatches would leave the last alone, in silence.

    Args:
        config: a `TransformerConfig`; it and the others may be anything with the fields of what `wrap_fsdp` is given.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    strategy = getattr(ddp_config, "data_parallel_sharding_strategy", "no_shard")
    if not config.gradient_accumulation_fusion or not getattr(ddp_config, "use_megatron_fsdp", False):
        return
    ranks = {"data parallel": groups.intra_dp_cp.size()}
    if config.num_moe_experts:
        ranks["expert data parallel"] = groups.intra_expt_dp.size()
    whole = [f"one {kind} rank" for kind, size in ranks.items() if size == 1]
    if strategy == "optim" or (strategy != "no_shard" and whole):
        raise ValueError(
            f"gradient_accumulation_fusion=True with data_parallel_sharding_strategy={strategy!r}"
            f"{' and ' + whole[0] if whole else ''}, where Megatron FSDP keeps gradients whole: of the microbatches of "
            "a step only the last would count; set gradient_accumulation_fusion=False"
        )


def _check_frozen_weights(chunk: torch.nn.Module) -> None:
    found: list[str] = []
    for name, module in chunk.named_modules():
        if isinstance(module, ColumnParallelLinear) and not module.skip_bias_add:
            weight: Any = module.weight  # None where it is another layer's
            bias: Any = module.bias
            if weight is not None and not weight.requires_grad and bias is not None and bias.requires_grad:
                found.append(f"{name}.bias")
    if found:
        raise ValueError(
            f"{_first(found)} of frozen weights: mcore's ColumnParallelLinear computes no gradient of the bias then, "
            "so that it would never change; freeze it, too, with requires_grad_(False), or train the weight"
        )


def check_gradients(chunks: Sequence[Any]) -> None:
    """Refuse to reduce gradients of which some never came, as of a parameter that the forward pass does not use.

    With overlap_grad_reduce mcore waits for all of a bucket: it would fail without a name, in the next step.

    Raises:
        RuntimeError: naming the parameters and the remedy.
    """
    for chunk in chunks:
        missing: set[torch.nn.Parameter] = set()
        if not (hasattr(chunk, "bucket_groups") and chunk.ddp_config.overlap_grad_reduce):
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ready = group.per_param_grad_ready_counts
            if len(ready) < len(group.params) and (ready or not group.is_first_batch):
                missing |= group.params - ready.keys()
        if missing:
            names = [name for name, parameter in chunk.module.named_parameters() if parameter in missing]
            raise RuntimeError(
                f"{_first(names)} got no gradient in this backward pass, and with overlap_grad_reduce=True all of a "
                "bucket are awaited: freeze what the forward pass does not use, with requires_grad_(False) before "
                "wrapping, or set overlap_grad_reduce=False"
            )


def _first(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
