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
    },
    ("cpu_offloading",): {"cpu_offloading_num_layers": 0, "cpu_offloading_weights": False},
    ("fine_grained_activation_offloading",): {"offload_modules": []},
}
"""Fields of which one must be set → those that are read only then, with the values that ask for nothing."""


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
