"""Checks of activation recomputation: what mcore would only fail at, or hang in, during a backward pass."""

from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

from minloop.spelling import did_you_mean

MODULES = ("core_attn", "mlp", "moe", "shared_experts", "mla_up_proj", "layernorm", "moe_act", "gdn_norm_out")
NEEDS_TE = ("layernorm", "moe_act", "gdn_norm_out")
PART_OF = {
    "moe": "num_moe_experts",
    "shared_experts": "moe_shared_expert_intermediate_size",
    "mla_up_proj": "multi_latent_attention",
}
"""Without these fields a model has no such module, and recomputes nothing or fails."""


def check_recompute(config: Any) -> None:
    """Refuse recomputation that mcore 0.19 cannot do.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    granularity, layers = config.recompute_granularity, config.recompute_num_layers
    modules = config.recompute_modules or ["core_attn"]
    if granularity == "full":
        _check_full(config, layers)
    else:
        _check_not_full(config)
    if granularity != "selective":
        # mcore fills in ["core_attn"] whatever the granularity, and sets the latter for moe_layer_recompute
        if modules != ["core_attn"] and not config.moe_layer_recompute:
            raise ValueError(
                f"recompute_modules {modules} with recompute_granularity={granularity!r}, which ignores them: set "
                "recompute_granularity='selective', or leave recompute_modules out"
            )
        return
    for module in modules:
        if module not in MODULES:
            raise ValueError(
                f"recompute_modules {modules}: {module!r} is none of {', '.join(MODULES)}"
                f"{did_you_mean(module, MODULES)}"
            )
        if module in PART_OF and not getattr(config, PART_OF[module]):
            raise ValueError(
                f"recompute_modules {modules} with {PART_OF[module]}={getattr(config, PART_OF[module])}: the model has "
                f"no {module!r} to recompute; leave it out"
            )
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


def _check_not_full(config: Any) -> None:
    for name in ("recompute_method", "recompute_num_layers", "distribute_saved_activations"):
        if value := getattr(config, name):
            raise ValueError(
                f"{name}={value!r} with recompute_granularity={config.recompute_granularity!r}, which ignores it: set "
                f"recompute_granularity='full', or leave {name} out"
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
