"""Checks of an optimizer's fields before mcore's, whose messages name command line flags and no remedy."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields of `OptimizerConfig` that only a precision-aware optimizer may have at another dtype than fp32."""


def check_optimizer_fields(fields: Mapping[str, Any]) -> None:
    """Refuse a precision-aware optimizer without what it needs, dtypes that need one, and a minimum that is not read.

    Args:
        fields: of an `OptimizerConfig`; others have mcore's defaults.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if fields.get("decoupled_min_lr") is not None and fields.get("decoupled_lr") is None:
        raise ValueError(
            f"decoupled_min_lr={fields['decoupled_min_lr']} with decoupled_lr=None, without which nothing reads it: "
            "set decoupled_lr, or leave decoupled_min_lr out"
        )
    if not fields.get("use_precision_aware_optimizer"):
        for name in DTYPES:
            if (dtype := fields.get(name, torch.float32)) != torch.float32:
                raise ValueError(
                    f"{name}={dtype} with use_precision_aware_optimizer=False, with which it is fp32: set that to "
                    f"True, or leave {name} out"
                )
        return
    given = {
        "optimizer": (fields.get("optimizer", "adam"), "adam"),
        "use_distributed_optimizer": (fields.get("use_distributed_optimizer", False), True),
    }
    for name, (value, needed) in given.items():
        if value != needed:
            where = ", in build_ddp_config" if name == "use_distributed_optimizer" else ""
            raise ValueError(
                f"use_precision_aware_optimizer=True with {name}={value!r}: set that to {needed!r}{where}, or "
                "use_precision_aware_optimizer=False"
            )
    if not (HAVE_TE or fields.get("optimizer_cpu_offload")):
        raise ValueError(
            "use_precision_aware_optimizer=True needs Transformer Engine's Adam, which is not installed (pip install "
            "transformer-engine[pytorch]): set use_precision_aware_optimizer=False"
        )


def check_precision_aware(optimizer_config: OptimizerConfig, config: TransformerConfig) -> None:
    """Refuse weights that a precision-aware optimizer would not update, save or load right.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if optimizer_config.optimizer_cpu_offload:
        if not (config.bf16 or config.fp16):
            raise ValueError(
                "optimizer_cpu_offload=True with bf16=False and fp16=False: when it loads, mcore's optimizer on the "
                "CPU finds no weights in fp32; set bf16=True, or optimizer_cpu_offload=False"
            )
        return
    if not config.fp8_param:
        return
    if config.fp8_recipe == "delayed":
        if optimizer_config.store_param_remainders:
            raise ValueError(
                "store_param_remainders=True (its default) with use_precision_aware_optimizer=True and fp8_param=True: "
                "weights in FP8 have no remainders; set store_param_remainders=False"
            )
        return
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):  # master weights are mcore's, and moments saved as they are
        if (dtype := getattr(optimizer_config, name)) not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name}={dtype} with fp8_param=True and fp8_recipe={config.fp8_recipe!r}, with which mcore saves it "
                "without its scale: set it to torch.bfloat16 or torch.float32"
            )
