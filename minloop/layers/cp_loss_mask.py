"""Loss masks that count the tokens of all context parallel ranks, which mcore's multi-token prediction needs.

`process_mtp_loss` weighs the losses of each depth by a ratio of two sums of the loss mask, before and after it is moved
on to later tokens. Each rank takes it of its own part of the sequence, and parts lose tokens unequally. Only where a
mask is summed would mcore have to look at all ranks: so these masks do that themselves.
"""

import functools
import inspect
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce


class _SummedOverRanks(Tensor):
    """A tensor whose sum, and that of what is made of it, is over all ranks of a group and has no gradient."""

    group: ProcessGroup

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.ones_like:  # the gradient of a loss that was multiplied by the mask
            return result.as_subclass(Tensor)
        if func in (torch.sum, Tensor.sum):
            result = result.as_subclass(Tensor).detach().clone()
            all_reduce(result, group=cls.group)
        return result


@functools.cache
def _summed_over(group: ProcessGroup) -> type[_SummedOverRanks]:
    return type("SummedOverRanks", (_SummedOverRanks,), {"group": group})


def count_tokens_of_all_ranks(model: torch.nn.Module, group: ProcessGroup) -> None:
    """Have mcore's language models in `model` be called with loss masks that are summed over `group`."""
    for module in model.modules():
        if isinstance(module, LanguageModule):
            module.register_forward_pre_hook(functools.partial(_with_shared_mask, group), with_kwargs=True)


def _with_shared_mask(
    group: ProcessGroup, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    mask, labels = bound.arguments.get("loss_mask"), bound.arguments.get("labels")
    if mask is None and labels is not None:
        mask = torch.ones_like(labels, dtype=torch.float32)
    if mask is not None:
        bound.arguments["loss_mask"] = mask.as_subclass(_summed_over(group))
    return bound.args, bound.kwargs
