"""Optimizers: mcore's, built over the chunks; and what torch's Adam and SGD lack inside mcore's."""

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from minloop.fully_sharded import FullySharded
from minloop.groups import as_the_world
from minloop.messages import without_warnings
from minloop.optimizer_config_checks import check_precision_aware
from minloop.precision_checks import check_optimizer_precision
from minloop.weight_writes import fuse_weight_writes

OPTIMIZERS = ("adam", "sgd", "lion", "muon")
NOT_TRAINABLE = {
    "soap": "mcore cannot save it, as its factors have other shapes than the weights",
    "adaptive_muon": "mcore 0.19's fails in its first step with emerging-optimizers 0.3, which moved its scale",
    "dist_muon": "it is a layer-wise optimizer",
}
"""Others that mcore 0.19 names, and why they do not train here."""

EMERGING_OPTIMIZERS = ("lion", "muon")
"""Those of the package emerging-optimizers, github.com/NVIDIA-NeMo/Emerging-Optimizers."""


def build_optimizer(
    chunks: Sequence[DistributedDataParallel | FullySharded],
    optimizer_config: OptimizerConfig,
    groups: ProcessGroupCollection,
    **mcore_options: Any,
) -> MegatronOptimizer:
    """Build mcore's optimizer over the chunks of this rank; with `use_mup` its learning rates scale with the width.

    Args:
        optimizer_config: from `build_optimizer_config`, or mcore's own.
        mcore_options: other arguments of `get_megatron_optimizer`, such as ``config_overrides``, settings that hold for
            some parameters only. They stand in for mcore's ``get_standard_config_overrides(optimizer_config)``, which
            keep norms and biases from decaying, as in Megatron-LM: give ``standard | yours`` to have both.
    Raises:
        ValueError: the optimizer config contradicts the model's or the DDP config, or needs a package that is missing.
        TypeError: the chunks are not wrapped in DDP.
    """
    for chunk in chunks:
        if not hasattr(chunk, "ddp_config"):
            raise TypeError(f"{type(chunk).__name__} is not wrapped for data parallelism: call wrap_ddp first")
    config = get_model_config(chunks[0])
    check_optimizer_config(optimizer_config, config, chunks[0].ddp_config)
    if config.use_mup:
        overrides = mcore_options.get("config_overrides") or get_standard_config_overrides(optimizer_config)
        scaled = get_mup_config_overrides(optimizer_config, config.mup_width_mult, optimizer_config.optimizer)
        mcore_options["config_overrides"] = overrides | scaled
    if chunks[0].ddp_config.outer_dp_sharding_strategy != "no_shard":
        groups = copy.copy(groups)
        groups.intra_dist_opt = groups.tp_dp_cp  # mcore sums the gradient norm over these ranks: all have other shards
    with without_warnings(), as_the_world(groups):  # warnings of experimental parts of mcore that it imports
        optimizer = get_megatron_optimizer(
            optimizer_config,
            [*chunks],
            use_gloo_process_groups=False,
            pg_collection=groups,
            **mcore_options,
        )
    await_gradients(optimizer)
    for inner in inner_optimizers(optimizer):
        fuse_weight_writes(inner)
    prepare_optimizer_state(optimizer)
    return optimizer


def check_optimizer_config(
    optimizer_config: OptimizerConfig, config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> None:
    """Refuse an `OptimizerConfig` that does not go with the model's two, or that mcore 0.19 cannot train with.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if optimizer_config.optimizer not in OPTIMIZERS:
        name = optimizer_config.optimizer
        reason = NOT_TRAINABLE.get(name, "AdamW is 'adam' with decoupled_weight_decay=True, its default")
        raise ValueError(f"OptimizerConfig.optimizer {name!r} is none of {', '.join(OPTIMIZERS)}; {reason}")
    check_agreement(optimizer_config, config, ddp_config)
    if optimizer_config.optimizer_cpu_offload and not torch.cuda.is_available():
        raise ValueError("optimizer_cpu_offload=True where there is no GPU, and it trains otherwise: set it to False")
    if optimizer_config.use_layer_wise_distributed_optimizer:
        raise ValueError(
            "use_layer_wise_distributed_optimizer=True: minloop does not drive that optimizer; set it to False"
        )
    stages = config.virtual_pipeline_model_parallel_size
    if optimizer_config.overlap_param_gather_with_optimizer_step and not (stages and ddp_config.overlap_param_gather):
        raise ValueError(
            "overlap_param_gather_with_optimizer_step=True updates one model chunk while gathering another: it needs "
            f"virtual_pipeline_model_parallel_size, which is {stages}, and overlap_param_gather=True (with "
            f"use_distributed_optimizer), which is {ddp_config.overlap_param_gather}; set it to False otherwise"
        )
    if optimizer_config.optimizer == "sgd" and ddp_config.use_distributed_optimizer:
        raise ValueError(
            "OptimizerConfig.optimizer 'sgd' with use_distributed_optimizer=True (ZeRO-1, Megatron FSDP): mcore's "
            "distributed optimizer knows Adam's state alone; use 'adam', or wrap_ddp with "
            "use_distributed_optimizer=False, or torch FSDP2"
        )
    if optimizer_config.optimizer in EMERGING_OPTIMIZERS:
        _check_emerging(optimizer_config, config)


def check_agreement(
    optimizer_config: OptimizerConfig, config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> None:
    """Refuse an `OptimizerConfig` of another precision or sharding than the model's two configs.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    for name, expected in (
        ("bf16", config.bf16),
        ("fp16", config.fp16),
        ("use_distributed_optimizer", ddp_config.use_distributed_optimizer),
        ("overlap_param_gather", ddp_config.overlap_param_gather),
    ):
        if getattr(optimizer_config, name) != expected:
            raise ValueError(
                f"OptimizerConfig.{name} is {getattr(optimizer_config, name)}, but the model was built with "
                f"{expected}: use build_optimizer_config, or give both the same value"
            )
    check_optimizer_precision(optimizer_config, config, ddp_config)
    if optimizer_config.use_precision_aware_optimizer:
        check_precision_aware(optimizer_config, config)


def _check_emerging(optimizer_config: OptimizerConfig, config: TransformerConfig) -> None:
    name = optimizer_config.optimizer
    if optimizer_config.use_distributed_optimizer:  # it would see sums of gradients over some of the ranks only
        raise ValueError(f"OptimizerConfig.optimizer {name!r} with use_distributed_optimizer=True: set it to False")
    if config.fp16:
        raise ValueError(f"OptimizerConfig.optimizer {name!r} with fp16=True, which mcore lacks: use bf16=True")
    tp = config.tensor_model_parallel_size
    if name == "muon" and tp > 1 and optimizer_config.muon_tp_mode == "blockwise":
        raise ValueError(
            f"muon_tp_mode='blockwise' with tensor_model_parallel_size ({tp}) orthogonalises each rank's part of a "
            "weight on its own, another training for every size: set muon_tp_mode='duplicated' or 'distributed'"
        )
    if find_spec("emerging_optimizers") is None:
        raise ValueError(
            f"OptimizerConfig.optimizer {name!r} needs the package emerging-optimizers, which is not installed: "
            "pip install emerging-optimizers (0.2 or later), or use one of adam, sgd"
        )


def inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers that a chained mcore optimizer drives, or the optimizer itself; none that has no parameters."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(inner, "is_stub_optimizer", False):
            yield inner


def await_gradients(optimizer: MegatronOptimizer) -> None:
    """Let the part on the GPU of an optimizer on the CPU wait for its gradients.

    With `overlap_cpu_optimizer_d2h_h2d` mcore casts them, too, on the stream of copies to the host, and then steps
    without waiting for it (its hybrid_optimizer.py, `step`).
    """
    for outer in inner_optimizers(optimizer):
        inner: Any = outer.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            _await(inner)
            inner.register_load_state_dict_post_hook(_await)  # mcore's, called before it, makes the parts anew


def _await(inner: Any) -> None:
    if inner.gpu_optimizer is not None:
        inner.gpu_optimizer.register_step_pre_hook(partial(_wait_for, inner._d2h_stream))


def _wait_for(stream: torch.cuda.Stream, *_: Any) -> None:
    torch.cuda.current_stream().wait_stream(stream)


def is_torch_adam(optimizer: object) -> bool:
    """Whether this is torch's own Adam: what mcore falls back to without Transformer Engine and apex."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def prepare_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Give the optimizers inside mcore's the state that its checkpoints expect to find; existing values stay.

    Zeros, as the first step would begin with: mcore saves no moments before that step, and its distributed optimizer
    asserts that torch's Adam has a step by then. After loading, mcore lets all parameters share one step tensor, which
    each of them would increment; here each gets its own. For SGD's momentum mcore has no function at all.
    """
    for outer in inner_optimizers(optimizer):
        inner, init_state = outer.optimizer, getattr(outer, "init_state_fn", None)
        if isinstance(inner, HybridDeviceOptimizer):  # mcore makes its state where it finds none
            continue
        if init_state is not None and not outer.config.use_precision_aware_optimizer:
            init_state(inner, outer.config)
        for group in inner.param_groups:
            for parameter in group["params"]:
                # ZeRO-1's shard of an fp32 weight is no leaf: torch would warn wherever mcore looks at its .grad.
                if not parameter.is_leaf:
                    parameter.retain_grad()
                # an empty state would be taken for one that is there
                if is_torch_adam(inner):
                    state = inner.state[parameter]
                    state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()
                elif init_state is None and group.get("momentum"):
                    inner.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        if init_state is None:
            outer.init_state_fn = _state_exists


def _state_exists(optimizer: object, config: object = None) -> None:
    """mcore's `init_state_fn` where `prepare_optimizer_state` has done its work already."""
