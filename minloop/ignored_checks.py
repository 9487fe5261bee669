"""Checks of fields that mcore takes and does not read, because another field that would read them is not set."""

from collections.abc import Mapping
from typing import Any

READ_BY: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("fp8", "fp4"): {
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "fp8_output_proj": False,
        "fp8_wgrad": True,
        "first_last_layers_bf16": False,
    },
    ("num_moe_experts",): {
        "moe_grouped_gemm": False,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_ffn_hidden_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_expert_capacity_factor": None,
        "moe_layer_freq": 1,
        "moe_latent_size": None,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": None,
        "moe_shared_expert_overlap": False,
    },
    ("moe_shared_expert_intermediate_size",): {"moe_shared_expert_overlap": False},
    ("mtp_num_layers",): {"mtp_detach_heads": False, "mtp_use_repeated_layer": False},
    ("fp8",): {
        "fp8_recipe": "delayed",
        "fp8_margin": 0,
        "fp8_quantizer_factory": None,
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
    },
    ("fp4",): {"fp4_recipe": "nvfp4", "fp4_quantizer_factory": None},
    ("tp_comm_overlap",): {
        "tp_comm_bulk_wgrad": True,
        "tp_comm_bulk_dgrad": True,
        "tp_comm_overlap_ag": True,
        "tp_comm_overlap_rs": True,
        "tp_comm_overlap_rs_dgrad": False,
        "tp_comm_atomic_ag": False,
        "tp_comm_atomic_rs": False,
    },
    ("window_size",): {"window_attn_skip_freq": None},
    ("hybrid_context_parallel",): {"max_seqlen_per_dp_cp_rank": None},
    ("cpu_offloading",): {"cpu_offloading_num_layers": 0, "cpu_offloading_weights": False},
    ("fine_grained_activation_offloading",): {"offload_modules": []},
}
"""Fields of which one must be set → those that are read only then, with the values that ask for nothing."""


def unread(fields: Mapping[str, Any]) -> set[str]:
    """The names of `READ_BY` that nothing reads where these fields of a `TransformerConfig` are set."""
    rows = READ_BY.items()
    return {name for readers, names in rows if not any(fields.get(reader) for reader in readers) for name in names}


def check_ignored(config: Any) -> None:
    """Refuse fields that change nothing, as the ones that would read them are not set.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    for readers, fields in READ_BY.items():
        if any(getattr(config, reader) for reader in readers):
            continue
        for name, usual in fields.items():
            value = getattr(config, name, usual)
            if value != usual and (value or usual):  # None, 0 and [] alike ask for nothing
                unset = " and ".join(f"{reader}={getattr(config, reader)}" for reader in readers)
                raise ValueError(
                    f"{name}={value!r} with {unset}, without which nothing reads it: set {' or '.join(readers)}, or "
                    f"leave {name} out"
                )
    _check_stages(config)
    _check_hierarchy(config)


def _check_stages(config: Any) -> None:
    """Of a pipeline of one stage; mcore fills in a group of 1."""
    if config.pipeline_model_parallel_size > 1:
        return
    for name, usual in (
        ("account_for_embedding_in_pipeline_split", (False,)),
        ("account_for_loss_in_pipeline_split", (False,)),
        ("microbatch_group_size_per_vp_stage", (None, 1)),
    ):
        if (value := getattr(config, name)) not in usual:
            raise ValueError(
                f"{name}={value} with pipeline_model_parallel_size (1), where nothing reads it: set that to 2 or more, "
                f"or leave {name} out"
            )


def _check_hierarchy(config: Any) -> None:
    kinds, hierarchy = config.cp_comm_type, config.hierarchical_context_parallel_sizes
    if hierarchy and "a2a+p2p" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(
            f"hierarchical_context_parallel_sizes={hierarchy} with cp_comm_type={kinds!r}, which does not read them: "
            "set cp_comm_type='a2a+p2p', or leave hierarchical_context_parallel_sizes out"
        )
