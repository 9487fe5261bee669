"""Optimizers and their schedules: mcore's, built over the chunks; and what torch's Adam and SGD lack inside mcore's."""

from collections.abc import Iterator, Sequence
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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config

from minloop.messages import without_warnings

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
OPTIMIZERS = ("adam", "sgd", "lion", "muon")
"""mcore 0.19 has others, which do not train here: "soap" cannot be saved (its factors have other shapes than the
weights), "adaptive_muon" fails in its first step, and "dist_muon" is a layer-wise optimizer."""

EMERGING_OPTIMIZERS = ("lion", "muon")
"""Those of the package emerging-optimizers, github.com/NVIDIA-NeMo/Emerging-Optimizers."""


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    optimizer_config: OptimizerConfig,
    groups: ProcessGroupCollection,
    **mcore_options: Any,
) -> MegatronOptimizer:
    """Build mcore's optimizer over the chunks of this rank; with `use_mup` its learning rates scale with the width.

    Args:
        optimizer_config: from `build_optimizer_config`, or mcore's own.
        mcore_options: other arguments of `get_megatron_optimizer`, such as ``config_overrides``, settings that hold for
            some parameters only.
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
    with without_warnings():  # of experimental parts of mcore that it imports
        optimizer = get_megatron_optimizer(
            optimizer_config,
            [*chunks],
            use_gloo_process_groups=False,
            pg_collection=groups,
            **mcore_options,
        )
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
        raise ValueError(
            f"OptimizerConfig.optimizer {optimizer_config.optimizer!r} is none of {', '.join(OPTIMIZERS)}; AdamW is "
            "'adam' with decoupled_weight_decay=True, its default"
        )
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
    if optimizer_config.optimizer in EMERGING_OPTIMIZERS:
        _check_emerging(optimizer_config, config)


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
        if init_state is not None and not outer.config.use_precision_aware_optimizer:
            init_state(inner, outer.config)
        for group in inner.param_groups:
            for parameter in group["params"]:
                # ZeRO-1's shard of an fp32 weight is no leaf: torch would warn wherever mcore looks at its .grad.
                if not parameter.is_leaf:
                    parameter.retain_grad()
                state = inner.state[parameter]
                if is_torch_adam(inner):
                    state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()
                elif init_state is None and group.get("momentum"):
                    state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        if init_state is None:
            outer.init_state_fn = _state_exists


def _state_exists(optimizer: object, config: object = None) -> None:
    """mcore's `init_state_fn` where `prepare_optimizer_state` has done its work already."""


def build_scheduler(
    optimizer: MegatronOptimizer,
    *,
    global_batch_size: int,
    train_iters: int,
    lr_decay_style: str = "cosine",
    lr_warmup_iters: int = 0,
    lr_decay_iters: int | None = None,
    lr_warmup_init: float = 0.0,
    start_weight_decay: float | None = None,
    end_weight_decay: float | None = None,
    weight_decay_incr_style: str = "constant",
    lr_wsd_decay_iters: int | None = None,
    lr_wsd_decay_style: str = "exponential",
) -> OptimizerParamScheduler:
    """Build mcore's `OptimizerParamScheduler`; maximum and minimum learning rate come from the `OptimizerConfig`.

    mcore's scheduler counts samples, as `train_step` does; the arguments here count iterations of `global_batch_size`
    samples each. Iteration 0 runs at the warm-up's start.

    Args:
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD" (needs `lr_wsd_decay_iters`).
        lr_decay_iters: iterations until the minimum is reached; by default `train_iters`.
        lr_warmup_init: learning rate at the start of the warm-up.
    Raises:
        ValueError: the warm-up is not shorter than the decay, an unknown style, WSD without the length of its decay, or
            an `OptimizerConfig` without lr.
    """
    decay = lr_decay_iters or train_iters
    _check_schedule(optimizer, lr_decay_style, lr_warmup_iters, decay, lr_wsd_decay_iters)
    config: OptimizerConfig = optimizer.config
    weight_decay = config.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr_warmup_init,
        max_lr=config.lr,  # pyright: ignore[reportArgumentType]
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=lr_warmup_iters * global_batch_size,
        lr_decay_steps=decay * global_batch_size,
        lr_decay_style=lr_decay_style,
        start_wd=weight_decay if start_weight_decay is None else start_weight_decay,
        end_wd=weight_decay if end_weight_decay is None else end_weight_decay,
        wd_incr_steps=train_iters * global_batch_size,
        wd_incr_style=weight_decay_incr_style,
        wsd_decay_steps=None if lr_wsd_decay_iters is None else lr_wsd_decay_iters * global_batch_size,
        lr_wsd_decay_style=lr_wsd_decay_style,
        # the schedule built here holds; a checkpoint only says how far it has come
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _check_schedule(
    optimizer: MegatronOptimizer, style: str, warmup_iters: int, decay_iters: int, wsd_decay_iters: int | None
) -> None:
    if style not in LR_DECAY_STYLES:
        raise ValueError(f"lr_decay_style {style!r} is none of {', '.join(LR_DECAY_STYLES)}")
    if style == "WSD" and wsd_decay_iters is None:
        raise ValueError("lr_decay_style='WSD' needs lr_wsd_decay_iters, the iterations of its final decay")
    if optimizer.config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: the schedule needs its maximum; set lr")
    if warmup_iters >= decay_iters:
        raise ValueError(f"lr_warmup_iters ({warmup_iters}) must be less than lr_decay_iters ({decay_iters})")
