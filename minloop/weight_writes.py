"""Adam that writes the model's weights in the pass in which it updates their fp32 master weights.

mcore lets Transformer Engine's Adam update the master weights alone, and then copies every one of them to the model's:
a launch a weight, and six bytes of traffic for each of its numbers where two would do. The kernel takes the model's
weights, too, as it does where it keeps the master weights itself, and what it writes are the same bits.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch
from megatron.core.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.nn import Parameter


def fuse_weight_writes(optimizer: MegatronOptimizer) -> None:
    """Let one of mcore's optimizers, just built, update and write weights in one pass, if its Adam can."""
    if _is_fusable(optimizer):
        writes, outer = WeightWrites(optimizer), cast(Any, optimizer)
        outer.optimizer.multi_tensor_adam = writes.update
        outer._copy_main_params_to_model_params = writes.copy


class WeightWrites:
    """Stands for Transformer Engine's `multi_tensor_adam`, and for mcore's copy, which then has nothing left to do."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        outer = cast(Any, optimizer)
        self._optimizer, self._written = outer, False
        self._adam, self._copy = outer.optimizer.multi_tensor_adam, outer._copy_main_params_to_model_params

    def update(self, chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], *settings: Any) -> None:
        """Take a step of Adam.

        Args:
            lists: gradients, weights, first and second moments of as many tensors, none of them empty. Weights are
                master weights, or have none as the model's own are fp32.
            settings: those of Adam.
        """
        # by address, anew in every step: memory may have gone to the host and come back since the last
        model_weights = {master.data_ptr(): weight for master, weight in _pairs(self._optimizer)}
        with_masters: list[tuple[torch.Tensor, ...]] = []
        others: list[tuple[torch.Tensor, ...]] = []
        for gradient, weight, *moments in zip(*lists, strict=True):
            written = model_weights.get(weight.data_ptr())
            if written is None:
                others.append((gradient, weight, *moments))
            else:
                with_masters.append((gradient, written, *moments, weight))
        for rows in filter(None, (with_masters, others)):
            self._adam(chunk_size, noop, [list(column) for column in zip(*rows, strict=True)], *settings)
        self._written = True

    def copy(self) -> None:
        """Copy master weights to the model's, unless the update just before has written them."""
        if not self._written:
            self._copy()
        self._written = False


def _pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's parts of master weights and of the 16-bit weights that they stand for."""
    groups = (
        (optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups)
        if isinstance(optimizer, DistributedOptimizer)
        else (optimizer.fp32_from_float16_groups, optimizer.float16_groups)
    )
    masters, weights = map(chain.from_iterable, groups)
    for master, weight in zip(masters, weights, strict=True):
        yield master, weight.data if isinstance(weight, Parameter) else weight


def _is_fusable(optimizer: MegatronOptimizer) -> bool:
    """Whether this keeps master weights for an Adam of Transformer Engine that knows nothing of the model's."""
    inner: Any = getattr(optimizer, "optimizer", None)
    if not type(inner).__module__.startswith("transformer_engine.") or not hasattr(inner, "multi_tensor_adam"):
        return False
    if type(optimizer) not in (Float16OptimizerWithFloat16Params, DistributedOptimizer) or inner.master_weights:
        return False
    if inner.capturable or getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        return False
    # neither weights in FP8, nor FSDP2's, nor, in ZeRO-1, fp32 ones, which mcore's copy is for, too
    plain = all(type(weight) is torch.Tensor for _, weight in _pairs(optimizer))
    return plain and not any(getattr(optimizer, "shard_fp32_groups", ()))
