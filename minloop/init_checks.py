"""Checks of what `init_distributed` and `build_groups` are given: the world's size, the order of ranks, options."""

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""In which mcore numbers ranks: tensor parallel ranks are neighbours, pipeline stages far apart."""

SAME_NAME = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_comm_backend",
)
FIELDS = {name: name for name in SAME_NAME} | {
    "gtp_remat_size": "gtp_weight_remat_size",
    "expert_gtp_remat_size": "expert_gtp_weight_remat_size",
}
"""Arguments of mcore's `initialize_model_parallel` that are fields of the config → their names there."""


def check_mcore_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of `init_distributed` that the config has, or by which mcore always fails."""
    for name, value in options.items():
        if name in FIELDS:
            raise ValueError(f"{name} is a field of the config: build_config({FIELDS[name]}={value!r})")
    if options.get("use_sharp") and options.get("sharp_enabled_group") in (None, "dp"):
        raise ValueError(
            "use_sharp=True with sharp_enabled_group='dp', the default: mcore 0.19 asks for that group before it has "
            "set it, and fails: give sharp_enabled_group='dp_replica' and num_distributed_optimizer_instances > 1, or "
            "leave use_sharp out"
        )


def check_world_size(config: TransformerConfig, world_size: int, order: str = DEFAULT_ORDER) -> None:
    """Raise ValueError unless `world_size` ranks can be divided as `config` and `order` say; every factor is named."""
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if world_size % (tp * pp * cp):
        raise ValueError(
            f"world size {world_size} is not a multiple of tensor_model_parallel_size ({tp}) × "
            f"pipeline_model_parallel_size ({pp}) × context_parallel_size ({cp}) = {tp * pp * cp}: change the number "
            "of ranks or a size; what remains is data parallel"
        )
    size = world_size // (tp * pp)
    if config.hybrid_context_parallel and (size < 2 or size & (size - 1)):
        raise ValueError(
            f"hybrid_context_parallel=True with {size} data parallel ranks: it divides samples over 2, 4, 8 and so on; "
            "change the number of ranks or tensor_model_parallel_size, or set hybrid_context_parallel=False"
        )
    etp, ep = config.expert_tensor_parallel_size or tp, config.expert_model_parallel_size
    if world_size % (etp * ep * pp):
        raise ValueError(
            f"world size {world_size} is not a multiple of expert_tensor_parallel_size ({etp}) × "
            f"expert_model_parallel_size ({ep}) × pipeline_model_parallel_size ({pp}) = {etp * ep * pp}: change the "
            "number of ranks or a size; what remains holds copies of the experts"
        )
    dp = max(world_size // (tp * pp * cp), world_size // (etp * ep * pp))
    _check_order(order, {"tp": max(tp, etp), "cp": cp, "ep": ep, "dp": dp, "pp": pp})
    if pp > 1 and not order.lower().endswith("pp") and etp * ep != tp * cp:
        raise ValueError(
            f"order={order!r} with pipeline_model_parallel_size ({pp}) > 1: unless it ends in pp, mcore needs "
            f"expert_tensor_parallel_size ({etp}) × expert_model_parallel_size ({ep}) to be tensor_model_parallel_size "
            f"({tp}) × context_parallel_size ({cp}); use {DEFAULT_ORDER!r}, the default, or other sizes"
        )


def _check_order(order: str, sizes: Mapping[str, int]) -> None:
    axes = order.lower().split("-")
    needed = [axis for axis, size in sizes.items() if size > 1]
    if not set(needed) <= set(axes) <= {*sizes, "gtp_remat"} or len(set(axes)) != len(axes):
        named = ", ".join(f"{axis} ({sizes[axis]})" for axis in needed) or "none"
        raise ValueError(
            f"order={order!r} must name every axis of more than one rank, which here are {named}, no axis twice, and "
            f"nothing but tp, cp, ep, dp and pp: use {DEFAULT_ORDER!r}, the default, or these in another order"
        )
