"""The schedule of learning rate and weight decay: mcore's, its lengths given in iterations or in samples."""

from typing import Any

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


def build_scheduler(
    optimizer: MegatronOptimizer,
    *,
    global_batch_size: int | None = None,
    train_iters: int | None = None,
    train_samples: int | None = None,
    lr_decay_style: str = "cosine",
    lr_warmup_iters: int | None = None,
    lr_warmup_samples: int | None = None,
    lr_warmup_fraction: float | None = None,
    lr_decay_iters: int | None = None,
    lr_decay_samples: int | None = None,
    lr_warmup_init: float = 0.0,
    start_weight_decay: float | None = None,
    end_weight_decay: float | None = None,
    weight_decay_incr_style: str = "constant",
    lr_wsd_decay_iters: int | None = None,
    lr_wsd_decay_samples: int | None = None,
    lr_wsd_decay_style: str = "exponential",
) -> OptimizerParamScheduler:
    """Build mcore's `OptimizerParamScheduler`; maximum and minimum learning rate come from the `OptimizerConfig`.

    mcore's scheduler counts samples, as `train_step` does. Every length is given either in samples or in iterations of
    `global_batch_size` samples each; while the batch size grows only samples are right. Iteration 0 runs at the
    warm-up's start. With the same values the rates are those of Megatron-LM. A `min_lr` of None is 0.

    Args:
        train_iters, train_samples: length of the run, one of the two; over it weight decay goes from start to end.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD" (needs the length of its decay).
        lr_warmup_fraction: the warm-up as a part of the decay's length, which includes it.
        lr_decay_iters, lr_decay_samples: until the minimum is reached; by default the length of the run.
        lr_warmup_init: learning rate at the start of the warm-up.
        weight_decay_incr_style: "constant", or "linear" or "cosine" from `start_weight_decay` to `end_weight_decay`.
        lr_wsd_decay_style: "linear", "cosine", "exponential" or "minus_sqrt".
    Raises:
        ValueError: a length that is missing, given twice or not positive, a warm-up that is not shorter than the decay,
            an unknown style, WSD without the length of its decay, a minimum above the maximum, or an `OptimizerConfig`
            without lr.
    """
    config: OptimizerConfig = optimizer.config
    train = _in_samples("train", train_iters, train_samples, global_batch_size)
    if train is None:
        raise ValueError("train_iters and train_samples are None: give the length of the run by one of them")
    decay = _in_samples("lr_decay", lr_decay_iters, lr_decay_samples, global_batch_size) or train
    warmup = _in_samples("lr_warmup", lr_warmup_iters, lr_warmup_samples, global_batch_size)
    wsd = _in_samples("lr_wsd_decay", lr_wsd_decay_iters, lr_wsd_decay_samples, global_batch_size)
    warmup = _warmup(lr_decay_style, warmup, lr_warmup_fraction, decay)
    if lr_decay_style == "WSD":
        _check_wsd(lr_wsd_decay_style, wsd, warmup, decay)
    return OptimizerParamScheduler(
        optimizer,
        **{"lr_warmup_steps": warmup, "lr_decay_steps": decay, "wsd_decay_steps": wsd, "wd_incr_steps": train},
        **{"lr_decay_style": lr_decay_style, "lr_wsd_decay_style": lr_wsd_decay_style},
        **_rates(config, lr_warmup_init),
        **_weight_decay(config, weight_decay_incr_style, start_weight_decay, end_weight_decay),
        # the schedule built here holds; a checkpoint only says how far it has come
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _in_samples(name: str, iters: int | None, samples: int | None, global_batch_size: int | None) -> int | None:
    given, unit = (samples, "samples") if iters is None else (iters, "iters")
    least = 0 if name == "lr_warmup" else 1
    if given is not None and given < least:
        raise ValueError(f"{name}_{unit} ({given}) must be at least {least}")
    if iters is None:
        return samples
    if samples is not None:
        raise ValueError(f"{name}_iters ({iters}) and {name}_samples ({samples}) are both given: give one of them")
    if not global_batch_size:
        raise ValueError(
            f"{name}_iters ({iters}) without global_batch_size, the samples of an iteration: give it, or {name}_samples"
        )
    return iters * global_batch_size


def _warmup(style: str, samples: int | None, fraction: float | None, decay: int) -> Any:
    """In samples; of a fraction mcore takes parts of one, as Megatron-LM gives it."""
    if style not in LR_DECAY_STYLES:
        raise ValueError(f"lr_decay_style {style!r} is none of {', '.join(LR_DECAY_STYLES)}")
    if samples is not None and fraction is not None:
        raise ValueError(
            f"lr_warmup_fraction ({fraction}) and lr_warmup_iters or lr_warmup_samples ({samples} samples) are both "
            "given: give one of them"
        )
    warmup = samples or 0 if fraction is None else fraction * decay
    if not 0 <= warmup < decay:
        raise ValueError(
            f"the warm-up ({warmup:g} samples, by lr_warmup_iters, lr_warmup_samples or lr_warmup_fraction) must be "
            f"shorter than the decay ({decay} samples, by lr_decay_iters or lr_decay_samples, else the whole run)"
        )
    return warmup


def _check_wsd(style: str, samples: int | None, warmup: float, decay: int) -> None:
    if style not in LR_WSD_DECAY_STYLES:
        raise ValueError(f"lr_wsd_decay_style {style!r} is none of {', '.join(LR_WSD_DECAY_STYLES)}")
    if samples is None:
        raise ValueError(
            "lr_decay_style='WSD' needs lr_wsd_decay_iters or lr_wsd_decay_samples, the length of its final decay"
        )
    if warmup + samples > decay:
        raise ValueError(
            f"the warm-up ({warmup:g} samples) and WSD's final decay ({samples} samples) are longer than the whole "
            f"({decay} samples): shorten one of them, or lengthen lr_decay_iters or lr_decay_samples"
        )


def _rates(config: OptimizerConfig, warmup_init: float) -> dict[str, float]:
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: the schedule needs its maximum; set lr")
    for name, value in (("OptimizerConfig.min_lr", config.min_lr or 0.0), ("lr_warmup_init", warmup_init)):
        if not 0.0 <= value <= config.lr:
            raise ValueError(f"{name} ({value}) must be between 0 and OptimizerConfig.lr ({config.lr})")
    if config.decoupled_lr is not None:
        own = config.decoupled_min_lr is not None
        least: Any = config.decoupled_min_lr if own else config.min_lr or 0.0
        if not 0.0 <= least <= config.decoupled_lr:  # mcore's scheduler asks this of the other weights' rates alone
            raise ValueError(
                f"OptimizerConfig.{'decoupled_min_lr' if own else 'min_lr'} ({least}) must be between 0 and "
                f"OptimizerConfig.decoupled_lr ({config.decoupled_lr}), or embedding and output layer would learn "
                "faster and faster: set a smaller decoupled_min_lr, or a larger decoupled_lr"
            )
    return {"init_lr": warmup_init, "max_lr": config.lr, "min_lr": config.min_lr or 0.0}


def _weight_decay(config: OptimizerConfig, style: str, start: float | None, end: float | None) -> dict[str, Any]:
    if style not in WEIGHT_DECAY_STYLES:
        raise ValueError(f"weight_decay_incr_style {style!r} is none of {', '.join(WEIGHT_DECAY_STYLES)}")
    if style != "constant" and (start is None or end is None):
        raise ValueError(f"weight_decay_incr_style={style!r} needs start_weight_decay and end_weight_decay")
    first, last = (config.weight_decay if value is None else value for value in (start, end))
    if style == "constant" and first != last:
        raise ValueError(
            f"weight_decay_incr_style='constant' with start_weight_decay ({first}) and end_weight_decay ({last}): give "
            "equal ones, or choose 'linear' or 'cosine'"
        )
    if not 0.0 <= first <= last:
        raise ValueError(f"start_weight_decay ({first}) must be between 0 and end_weight_decay ({last})")
    return {"start_wd": first, "end_wd": last, "wd_incr_style": style}
