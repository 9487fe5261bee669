"""Checks of activation recomputation: what mcore would only fail at, or hang in, during a backward pass."""

from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

NEEDS_TE = ("layernorm", "moe_act", "gdn_norm_out")


def check_recompute(config: Any) -> None:
    """Refuse recomputation that mcore 0.19 cannot do.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    granularity, layers = config.recompute_granularity, config.recompute_num_layers
    if granularity == "full":
        _check_full(config, layers)
    if granularity != "selective":
        return
    modules = config.recompute_modules or ["core_attn"]
    if not HAVE_TE and (refused := [name for name in modules if name in NEEDS_TE]):
        raise ValueError(
            f"recompute_modules {modules}: mcore recomputes {', '.join(refused)} only where Transformer Engine is "
            "installed; leave them out, or use recompute_granularity='full'"
        )
    if "mlp" in modules and config.add_bias_linear:
        raise ValueError(
            f"recompute_modules {modules} with add_bias_linear=True: the backward pass of a recomputed 'mlp' never "
            "ends, because its bias is returned from it; set add_bias_linear=False, leave 'mlp' out, or use "
            "recompute_granularity='full'"
        )


def _check_full(config: Any, layers: int | None) -> None:
    if config.recompute_method not in ("uniform", "block") or not layers:
        raise ValueError(
            f"recompute_granularity='full' needs recompute_method ('uniform' or 'block', not "
            f"{config.recompute_method!r}) and recompute_num_layers (a positive number, not {layers})"
        )
    if config.mtp_num_layers and (config.recompute_method, layers) != ("uniform", 1):
        raise ValueError(
            f"recompute_granularity='full' with mtp_num_layers ({config.mtp_num_layers}) needs "
            f"recompute_method='uniform' and recompute_num_layers=1, which are {config.recompute_method!r} and {layers}"
        )
