"""Patterns of hybrid models: what they need of a config, and how they are divided over pipeline stages."""

from importlib.util import find_spec
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern

PACKAGES = {
    "M": ("mamba_ssm", "mamba-ssm"),
    "G": ("fla", "flash-linear-attention"),
    "D": ("fast_hadamard_transform", "fast-hadamard-transform"),
}
"""The module and the package whose kernels mcore's layers of a kind call, but for local ones."""

OTHER_WORDS: dict[str, Any] = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "mtp_standalone": False,
    "moe_layer_freq": 1,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "heterogeneous_block_specs": False,
}
"""Fields that say for other models which layers there are and where they go, with the values at which they say
nothing. mcore's hybrid model does not read them, or (the first two) no longer wants them."""


def check_pattern(pattern: str, config: Any) -> None:
    """Refuse what mcore's `HybridModel` would refuse later, by assertion or on some ranks only, or would ignore.

    Raises:
        ValueError: naming the pattern, the fields and the remedy.
    """
    parsed = parse_hybrid_pattern(pattern)
    layers = (parsed.main_pattern or "").replace("|", "")
    if not config.is_hybrid_model:
        raise ValueError(
            "is_hybrid_model is False: give build_config(is_hybrid_model=True), by which mcore scales initial weights "
            "for layers that add to the residual stream once, not twice"
        )
    if len(layers) != config.num_layers:
        raise ValueError(
            f"hybrid_layer_pattern {pattern!r} has {len(layers)} layers, but num_layers is {config.num_layers}"
        )
    if parsed.mtp_num_depths != (config.mtp_num_layers or 0):
        raise ValueError(
            f"hybrid_layer_pattern {pattern!r} has {parsed.mtp_num_depths} depths of multi-token prediction (its parts "
            f"after '/'), but mtp_num_layers is {config.mtp_num_layers}"
        )
    for name, silent in OTHER_WORDS.items():
        if getattr(config, name, silent) != silent:
            raise ValueError(
                f"{name}={getattr(config, name)!r}: a hybrid model goes by its pattern alone; leave the field out and "
                f"say it in hybrid_layer_pattern ({pattern!r})"
            )
    kinds = set(layers + (parsed.mtp_pattern or ""))
    _check_kinds(kinds, config)
    if "G" in kinds:
        _check_gated_delta_net(config)
    if "M" in kinds:
        _check_mamba(config)
    if config.transformer_impl == "transformer_engine":
        _check_packages(kinds)
    divide_pattern(pattern, config)


def _check_kinds(kinds: set[str], config: Any) -> None:
    if ("E" in kinds) != bool(config.num_moe_experts):
        raise ValueError(
            f"num_moe_experts is {config.num_moe_experts}, but hybrid_layer_pattern has "
            f"{'an' if 'E' in kinds else 'no'} 'E' layer: set both or neither"
        )
    latent = config.multi_latent_attention
    if ("*" in kinds and latent) or (kinds & {"+", "D"} and not latent):
        raise ValueError(
            f"multi_latent_attention is {latent}, but hybrid_layer_pattern has {'*' if latent else '+ or D'} layers: "
            "'*' goes with TransformerConfig, '+' and 'D' with MLATransformerConfig(multi_latent_attention=True)"
        )
    with_te = config.transformer_impl == "transformer_engine"
    if "D" in kinds and not with_te:
        raise ValueError(
            "hybrid_layer_pattern has 'D' (sparse attention) layers, which have no path in plain torch: use a GPU with "
            "fast-hadamard-transform and transformer_impl='transformer_engine'"
        )
    if "+" in kinds and config.qk_layernorm and with_te:
        raise ValueError("mcore's 'transformer_engine' spec of '+' layers ignores qk_layernorm=True: set it to False")
    if not with_te and getattr(config, "mla_down_proj_fusion", False):
        raise ValueError("mla_down_proj_fusion=True needs transformer_impl='transformer_engine': set it to False")


def _check_packages(kinds: set[str]) -> None:
    for kind in sorted(kinds & PACKAGES.keys()):
        module, package = PACKAGES[kind]
        if find_spec(module) is None:
            instead = "" if kind == "D" else ", or set transformer_impl='local', which is plain torch"
            raise ValueError(
                f"hybrid_layer_pattern has {kind!r} layers, which with transformer_impl='transformer_engine' need the "
                f"package {package}, which is not installed: pip install {package}{instead}"
            )


def _check_gated_delta_net(config: Any) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if values % keys or keys % (tp * cp):
        raise ValueError(
            f"'G' layers: linear_num_value_heads ({values}) must be a multiple of linear_num_key_heads ({keys}), and "
            f"those of tensor_model_parallel_size ({tp}) × context_parallel_size ({cp})"
        )
    if tp > 1 and not config.sequence_parallel and config.transformer_impl == "transformer_engine":
        raise ValueError(
            f"'G' layers with tensor_model_parallel_size ({tp}) and sequence_parallel=False: mcore does not sum the "
            "gradient of their norm over the ranks, which come to differ; set sequence_parallel=True"
        )


def _check_mamba(config: Any) -> None:
    tp, cp, groups = config.tensor_model_parallel_size, config.context_parallel_size, config.mamba_num_groups
    inner = 2 * config.hidden_size
    heads = config.mamba_num_heads or inner // config.mamba_head_dim
    if not config.mamba_num_heads and inner % config.mamba_head_dim:
        raise ValueError(f"mamba_head_dim ({config.mamba_head_dim}) must divide 2 × hidden_size ({inner})")
    if heads % groups or groups % tp or heads % (tp * cp):
        raise ValueError(
            f"'M' layers: their heads ({heads}) must be a multiple of mamba_num_groups ({groups}) and of "
            f"tensor_model_parallel_size ({tp}) × context_parallel_size ({cp}), and mamba_num_groups a multiple of "
            "tensor_model_parallel_size"
        )
    local = groups // tp
    if local % cp and cp % local:
        raise ValueError(
            f"'M' layers: mamba_num_groups / tensor_model_parallel_size ({local}) is neither a multiple nor a divisor "
            f"of context_parallel_size ({cp})"
        )


def divide_pattern(pattern: str, config: Any) -> str:
    """The pattern with one part for each stage of `config`'s pipeline, "-*|-*"; virtual stages count.

    Raises:
        ValueError: another number of parts is given, or an even division is impossible.
    """
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    main, *depths = pattern.split("/")
    parts = main.split("|")
    if pp == 1:
        parts = ["".join(parts)]
    stages = f"pipeline_model_parallel_size ({pp}) × virtual_pipeline_model_parallel_size ({vpp})"
    if len(parts) == 1:
        size, rest = divmod(len(parts[0]), pp * vpp)
        if rest:
            raise ValueError(
                f"the {len(parts[0])} layers of hybrid_layer_pattern {pattern!r} cannot be divided evenly over "
                f"{stages}: put '|' between the stages"
            )
        parts = [parts[0][start : start + size] for start in range(0, len(parts[0]), size)]
    if len(parts) != pp * vpp:
        raise ValueError(
            f"hybrid_layer_pattern {pattern!r} has {len(parts)} parts between '|' for {stages} stages: give "
            f"{pp * vpp}, or no '|' for an even division"
        )
    return "/".join(["|".join(parts), *depths])
