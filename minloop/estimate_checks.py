"""Checks of what `estimate_memory` is asked for: nothing is counted that the build functions would refuse."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from minloop.checks import check_ddp_config
from minloop.data.batch import check_sequence_length
from minloop.distributed import check_world_size
from minloop.fsdp_checks import check_instances
from minloop.model import check_vocab_size
from minloop.optimizer import check_agreement
from minloop.parameter_count import check_countable
from minloop.schedule import check_count

MOVED = ("cpu_offloading", "fine_grained_activation_offloading")
"""Fields that move activations to the host, of which the estimate knows nothing."""


def check_estimate(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    sizes: Mapping[str, Any],
    pipeline_rank: int | None,
) -> None:
    """Refuse configs, sizes and a layout that do not go together, and what is not counted.

    Args:
        config: a `TransformerConfig`.
        sizes: the sizes that `estimate_memory` is given, by its names.
        pipeline_rank: None for all.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    check_countable(config)
    for name in MOVED:
        if getattr(config, name):
            raise ValueError(f"{name}=True: how much it moves to the host is not counted; estimate with {name}=False")
    for name, size in sizes.items():
        if not isinstance(size, Integral) or int(size) < 1:
            raise ValueError(f"{name} is {size!r}: give a whole number from 1 on")
    stages = config.pipeline_model_parallel_size
    if pipeline_rank is not None and pipeline_rank not in range(stages):
        raise ValueError(
            f"pipeline_rank is {pipeline_rank}: pipeline_model_parallel_size ({stages}) has the stages 0 to "
            f"{stages - 1}; leave it out for the fullest"
        )
    _check_sizes(config, ddp_config, **sizes)
    check_ddp_config(config, ddp_config)
    check_agreement(optimizer_config, config, ddp_config)


def _check_sizes(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    world_size: int,
    num_microbatches: int | None = None,
    **_: Any,
) -> None:
    check_world_size(config, world_size)
    check_instances(config, world_size, ddp_config.num_distributed_optimizer_instances)
    check_vocab_size(vocab_size, config)
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    check_sequence_length(sequence_length, cp)
    if config.sequence_parallel and sequence_length % (tp * cp):
        raise ValueError(
            f"sequence_length ({sequence_length}) is not divisible by tensor_model_parallel_size ({tp}) × "
            f"context_parallel_size ({cp}), as sequence_parallel=True needs: change one of them"
        )
    if num_microbatches is not None:
        check_count(config, num_microbatches)
