"""Master weights that an optimizer keeps by itself: Transformer Engine's precision-aware Adam, or mcore's on the CPU.

mcore's own functions that bring weights and master weights together then do nothing (distrib_optimizer.py:2785, 3086).
"""

from typing import Any, cast

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.distributed.tensor import DTensor

MASTER = "master_param"
"""Transformer Engine's name of them in a parameter's state."""


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master weights, of bf16 weights and the int16 bits that they lack (`store_param_remainders`).

    As transformer_engine/common/multi_tensor/adam.cu has it: what is below zero as int16 was rounded up.
    """
    high = weight.detach().view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weights and the int16 remainders of fp32 master weights: the inverse of `joined`."""
    bits = master.view(torch.int32)
    remainder = bits.short()
    return ((bits >> 16) + (remainder < 0).int()).short().view(torch.bfloat16), remainder


def is_on_host(optimizer: MegatronOptimizer) -> bool:
    """Whether inside is mcore's optimizer of which some is on the CPU (`optimizer_cpu_offload`)."""
    inner: Any = optimizer.optimizer
    return isinstance(inner, HybridDeviceOptimizer)


def make_missing_state(optimizer: Any) -> None:
    """Make what Transformer Engine's precision-aware Adam makes in its first step, where it is not there yet.

    Raises:
        RuntimeError: mcore's optimizer on the CPU, whose state nothing but a step makes.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if optimizer.state.get(parameter):
            continue
        if isinstance(optimizer, HybridDeviceOptimizer):
            raise RuntimeError("optimizer_cpu_offload=True: there is no state before the first step: save after it")
        optimizer.initialize_state(parameter, optimizer.store_param_remainders and parameter.dtype == torch.bfloat16)


@torch.no_grad()
def follow_weights(optimizer: MegatronOptimizer) -> None:
    """Let master weights that the optimizers inside mcore's keep by themselves be the weights as they are now."""
    outer: Any = optimizer
    for one in getattr(outer, "chained_optimizers", [outer]):
        inner: Any = one.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            inner.update_fp32_param_by_new_param()
            cast(Any, inner)._sync_sub_optimizers_state_to_hdo()  # or a save before the next step has the old ones
        elif inner is not None and hasattr(inner, "set_scaled_state"):
            for parameter, held in inner.state.items():
                if MASTER in held:
                    _follow(inner, parameter, held[MASTER])


def _follow(optimizer: Any, parameter: torch.Tensor, master: torch.Tensor) -> None:
    if master.dtype == torch.int16:
        master.zero_()
        return
    weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if weight.numel():
        optimizer.set_scaled_state(parameter, MASTER, weight.detach().float().clone())  # which may scale it in place
