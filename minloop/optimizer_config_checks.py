"""Checks of an optimizer's precisions before mcore's, whose messages name command line flags and no remedy."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Fields of `OptimizerConfig` that only a precision-aware optimizer may have at another dtype than fp32."""


def check_optimizer_fields(fields: Mapping[str, Any]) -> None:
    """Refuse a precision-aware optimizer without what it needs, and dtypes that need one.

    Args:
        fields: of an `OptimizerConfig`; others have mcore's defaults.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
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
