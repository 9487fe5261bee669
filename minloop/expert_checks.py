"""Checks of a mixture of experts: what mcore would refuse later, by an assertion or in mid-forward, or let pass."""

from importlib.util import find_spec
from typing import Any

from minloop.spelling import did_you_mean

LOAD_BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
FLEX_PACKAGES = {"deepep": "deep_ep", "hybridep": "deep_ep", "ncclep": "transformer_engine"}
"""What each `moe_flex_dispatcher_backend` imports."""

FLEX_INSTALL = {
    "deepep": "pip install git+https://github.com/deepseek-ai/DeepEP",
    "hybridep": "pip install git+https://github.com/deepseek-ai/DeepEP@hybrid-ep",
    "ncclep": "pip install transformer-engine[pytorch]",
}

ONLY_WITH_TE = {
    "moe_grouped_gemm": "mcore's local layers run expert after expert whatever it says; set it to False",
    "moe_latent_size": "set it to None",
    "moe_permute_fusion": "set it to False",
    "moe_router_fusion": "set it to False",
}


def fuses_routers(config: Any) -> bool:
    """Whether Transformer Engine's fused routers can do what this config asks of routers."""
    chosen_by_mcore = config.moe_router_load_balancing_type == "quantile_balancing" or config.moe_enable_routing_replay
    return not chosen_by_mcore and config.moe_router_dtype != "fp64"


def check_experts(config: Any) -> None:
    """Refuse settings of experts, and layouts for them, that mcore 0.19 cannot train.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    ep, experts = config.expert_model_parallel_size, config.num_moe_experts
    if not experts:
        if ep > 1:
            raise ValueError(
                f"expert_model_parallel_size ({ep}) needs experts, but num_moe_experts is {experts}: set "
                "num_moe_experts or expert_model_parallel_size=1"
            )
        return
    if experts % ep:
        raise ValueError(f"num_moe_experts ({experts}) is not divisible by expert_model_parallel_size ({ep})")
    _check_tensor_parallel(config)
    _check_routing(config)
    _check_load_balancing(config)
    _check_parts(config)


def _check_tensor_parallel(config: Any) -> None:
    tp, etp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if tp > 1 and not config.sequence_parallel:
        raise ValueError(
            f"num_moe_experts ({config.num_moe_experts}) with tensor_model_parallel_size ({tp}) needs "
            "sequence_parallel=True"
        )
    if config.add_bias_linear and (etp or tp) > 1:
        raise ValueError(
            f"add_bias_linear=True with experts needs expert_tensor_parallel_size=1, which is {etp or tp} (by default "
            "tensor_model_parallel_size): set it to 1, or add_bias_linear=False"
        )


def _check_routing(config: Any) -> None:
    if config.moe_router_topk_limited_devices:
        raise ValueError(
            f"moe_router_topk_limited_devices ({config.moe_router_topk_limited_devices}) means another model for every "
            "expert_model_parallel_size: set moe_router_num_groups and moe_router_group_topk instead"
        )
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if not 1 <= topk <= experts:
        raise ValueError(f"moe_router_topk ({topk}) must be from 1 to num_moe_experts ({experts})")
    score, kind = config.moe_router_score_function, config.moe_router_load_balancing_type
    if topk == 1 and score == "softmax" and kind != "sinkhorn" and not config.moe_router_pre_softmax:
        raise ValueError(
            "moe_router_topk (1) with moe_router_score_function='softmax': the softmax over one expert is constant, so "
            "that routers would not learn; set moe_router_pre_softmax=True"
        )
    groups, group_topk = config.moe_router_num_groups, config.moe_router_group_topk
    if bool(groups) != bool(group_topk):
        raise ValueError(
            f"moe_router_num_groups ({groups}) and moe_router_group_topk ({group_topk}) go together: set both or "
            "neither"
        )
    if groups and (experts % groups or group_topk > min(groups, topk) or experts // groups * group_topk < topk):
        raise ValueError(
            f"moe_router_group_topk ({group_topk}) of moe_router_num_groups ({groups}): num_moe_experts ({experts}) "
            f"must be a multiple of the groups, and the chosen ones neither more than moe_router_topk ({topk}) nor "
            "hold fewer experts"
        )


def _check_load_balancing(config: Any) -> None:
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    several = isinstance(kinds, list)
    if several != isinstance(coefficients, list) or (several and len(kinds) != len(coefficients)):
        raise ValueError(
            f"moe_router_load_balancing_type {kinds} and moe_aux_loss_coeff {coefficients} must be one and one, or "
            "lists of one length"
        )
    pairs: list[tuple[str, float]] = list(zip(kinds, coefficients, strict=True)) if several else [(kinds, coefficients)]
    for kind, coefficient in pairs:
        if kind not in LOAD_BALANCING_TYPES:
            raise ValueError(
                f"moe_router_load_balancing_type {kind!r} is none of {', '.join(LOAD_BALANCING_TYPES)}"
                f"{did_you_mean(kind, LOAD_BALANCING_TYPES)}"
            )
        if several and not kind.endswith("aux_loss"):
            raise ValueError(f"moe_router_load_balancing_type {kinds}: {kind!r} cannot be one of several")
        if coefficient and not kind.endswith("aux_loss"):
            raise ValueError(
                f"moe_aux_loss_coeff ({coefficient}) with moe_router_load_balancing_type={kind!r}, which has no such "
                "loss: set moe_aux_loss_coeff=0.0 or one of aux_loss, seq_aux_loss, global_aux_loss"
            )


def _check_parts(config: Any) -> None:
    if config.moe_router_fusion and not fuses_routers(config):
        raise ValueError(
            "moe_router_fusion=True with moe_router_load_balancing_type="
            f"{config.moe_router_load_balancing_type!r}, moe_router_dtype={config.moe_router_dtype!r} and "
            f"moe_enable_routing_replay={config.moe_enable_routing_replay}: fused routers know neither "
            "'quantile_balancing' nor 'fp64' nor replay; set moe_router_fusion=False"
        )
    for name, remedy in ONLY_WITH_TE.items():
        if getattr(config, name) and config.transformer_impl == "local":
            raise ValueError(
                f"{name}={getattr(config, name)} needs Transformer Engine, but transformer_impl is 'local': {remedy}"
            )
    if config.moe_latent_size and config.moe_shared_expert_overlap:
        raise ValueError(
            f"moe_latent_size ({config.moe_latent_size}) with moe_shared_expert_overlap=True, with which mcore trains "
            "no latent experts: set moe_shared_expert_overlap=False"
        )
    if config.moe_shared_expert_intermediate_size and config.add_bias_linear:
        raise ValueError(
            f"moe_shared_expert_intermediate_size ({config.moe_shared_expert_intermediate_size}) with "
            "add_bias_linear=True: mcore's shared experts have no biases; set add_bias_linear=False"
        )
    if config.moe_token_dispatcher_type != "flex":
        return
    package = FLEX_PACKAGES[backend := config.moe_flex_dispatcher_backend]
    if find_spec(package) is None:
        raise ValueError(
            f"moe_token_dispatcher_type='flex' with moe_flex_dispatcher_backend={backend!r} needs the package "
            f"{package}, which is not installed: {FLEX_INSTALL[backend]}, or set moe_token_dispatcher_type='alltoall'"
        )
