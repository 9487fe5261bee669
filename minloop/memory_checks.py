"""Checks of activations that are recomputed or moved to the host: what mcore fails at late, hangs in, or ignores."""

from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

from minloop.spelling import did_you_mean

MODULES = ("core_attn", "mlp", "moe", "shared_experts", "mla_up_proj", "layernorm", "moe_act")
OFFLOAD_MODULES = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
)
NEEDS_TE = ("layernorm", "moe_act")
PART_OF = {
    "moe": "num_moe_experts",
    "shared_experts": "moe_shared_expert_intermediate_size",
    "mla_up_proj": "multi_latent_attention",
}
"""Without these fields a model has no such module, and recomputes nothing or fails."""


def check_activation_memory(config: Any) -> None:
    """Refuse recomputation and moves to the host that mcore 0.19 cannot do.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    _check_recompute(config)
    _check_offload(config)


def _check_recompute(config: Any) -> None:
    granularity, layers = config.recompute_granularity, config.recompute_num_layers
    _check_list("recompute_modules", config.recompute_modules)
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
    _check_modules(config, modules)


def _check_modules(config: Any, modules: list[str]) -> None:
    if config.recompute_modules is not None and not config.recompute_modules:
        raise ValueError(
            "recompute_granularity='selective' with recompute_modules=[], which recomputes nothing: leave "
            "recompute_modules out, which means ['core_attn'], or set recompute_granularity=None"
        )
    for module in modules:
        if module == "gdn_norm_out":
            raise ValueError(
                f"recompute_modules {modules}: mcore has 'gdn_norm_out' with experimental_attention_variant="
                "'gated_delta_net' alone, which no model here has, also those with gated delta nets; leave it out"
            )
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


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} is a word, where a list of them is due: give {name}=[{value!r}]")


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
    if layers > config.num_layers:
        raise ValueError(
            f"recompute_num_layers ({layers}) is more than num_layers ({config.num_layers}): set it to that at most"
        )
    if config.mtp_num_layers and (config.recompute_method, layers) != ("uniform", 1):
        raise ValueError(
            f"recompute_granularity='full' with mtp_num_layers ({config.mtp_num_layers}) needs "
            f"recompute_method='uniform' and recompute_num_layers=1, which are {config.recompute_method!r} and {layers}"
        )


def _check_offload(config: Any) -> None:
    fine, modules = config.fine_grained_activation_offloading, getattr(config, "offload_modules", None) or []
    _check_list("offload_modules", modules)
    for module in modules:
        if module not in OFFLOAD_MODULES:
            raise ValueError(
                f"offload_modules {modules}: {module!r} is none of {', '.join(OFFLOAD_MODULES)}"
                f"{did_you_mean(module, OFFLOAD_MODULES)}"
            )
    for name in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(config, name) and config.transformer_impl != "transformer_engine":
            raise ValueError(
                f"{name}=True with transformer_impl={config.transformer_impl!r}: mcore moves activations of "
                f"Transformer Engine's layers alone, on a GPU; set {name}=False, or recompute_granularity"
            )
    if fine and config.cpu_offloading:
        raise ValueError("fine_grained_activation_offloading=True and cpu_offloading=True: set one of them to False")
    if fine and not modules:
        raise ValueError(
            f"fine_grained_activation_offloading=True with offload_modules={modules}, which moves nothing: name some "
            f"of {', '.join(OFFLOAD_MODULES)}, or set it to False"
        )
