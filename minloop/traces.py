"""What passes through a model leave behind beside gradients: put back, where a step is not to count, or forgotten."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import fp8_utils


def forget_fp8_scales() -> None:
    """Drop the scales of 'delayed' FP8, which Transformer Engine keeps for the whole process.

    It would go on to update those of models that are gone, over process groups that are gone, with the next model's.
    """
    manager = getattr(fp8_utils, "FP8GlobalStateManager", None)  # not there without Transformer Engine
    if manager is not None:
        manager.reset()


def remember_fp8_scales(chunks: Sequence[torch.nn.Module], config: Any) -> Callable[[], None]:
    """Return a function that puts back what 'delayed' FP8 knows of the sizes of values, as it is now.

    Transformer Engine notes the largest values of every pass, of an evaluation, too, and scales the next passes by them
    (quantization.py, `DelayedScalingRecipeState`); its own capture of graphs puts them back, too (graph.py).
    """
    in_fp8 = chunks if config.fp8 else ()  # attention in FP8 scales by a history with other recipes, too
    modules: list[Any] = [module for chunk in in_fp8 for module in chunk.modules() if hasattr(module, "fp8_meta")]
    before = [(module, module.get_fp8_meta_tensors()) for module in modules if _looks_back(module)]

    def put_back() -> None:
        for module, tensors in before:
            if _looks_back(module):
                module.reset_fp8_meta_tensors(tensors)  # None, if there was no pass yet: the initial ones

    return put_back


def _looks_back(module: Any) -> bool:
    """Whether a module of Transformer Engine's scales by a history: its attention may by each tensor itself."""
    metas = module.fp8_meta
    return all(hasattr(metas[key], "amax_history") for key in ("scaling_fwd", "scaling_bwd") if key in metas)


def remember_traces(chunks: Sequence[torch.nn.Module], config: Any) -> Callable[[], None]:
    """Return a function that puts back what a step changes with its gradients alone: experts' bias, FP8's scales."""
    # not `buffers()`, which are DDP's own, of gradients
    before = [(buffer, buffer.clone()) for chunk in chunks for _, buffer in chunk.named_buffers()]
    put_scales_back = remember_fp8_scales(chunks, config)

    def put_back() -> None:
        for buffer, value in before:
            buffer.copy_(value)
        put_scales_back()

    return put_back
