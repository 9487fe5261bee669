"""Recomputed activations are the activations: every way to recompute gives the same losses and weights, bit by bit."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small import small_config, small_state, text_loader, train

import minloop

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = TP | {"sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2": (2, TP),
    "TP2+SP": (2, SP),
    "PP2 VPP2": (2, PP | {"virtual_pipeline_model_parallel_size": 2}),
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"add_bias_linear": False, "activation_func": F.silu, "gated_linear_unit": True},
    "biases": {},
    "latent": {
        "config_class": minloop.MLATransformerConfig,
        "multi_latent_attention": True,
        "add_bias_linear": False,
        "rope_type": "rope",
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    },
    "experts": {
        "add_bias_linear": False,
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    },
    "predicted tokens": {
        "mtp_num_layers": 1,
        "add_bias_linear": False,
        "gpt": {"position_embedding_type": "rope"},
    },
}


def full(method: str, layers: int, **more: Any) -> dict[str, Any]:
    more |= {"recompute_method": method, "recompute_num_layers": layers}
    return {"recompute_granularity": "full", **more}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


FULL = [full("uniform", 1), full("uniform", 3), full("uniform", 4), full("block", 1), full("block", 4)]
KINDS: dict[str, list[dict[str, Any]]] = {
    "dense": [*FULL, selective("core_attn"), selective("mlp"), selective("core_attn", "mlp")],
    "biases": [full("uniform", 2), full("block", 2), selective("core_attn")],
    "latent": [full("uniform", 2), selective("mla_up_proj"), selective("core_attn", "mlp")],
    "experts": [full("uniform", 1), selective("moe"), selective("shared_experts"), selective("mlp", "shared_experts")],
    "predicted tokens": [full("uniform", 1), selective("core_attn", "mlp")],
}


def results(fields: dict[str, Any], kinds: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Losses, gradient norms and weights after two steps with dropout, for each kind of recomputation."""
    found: list[list[torch.Tensor]] = []
    for kind in kinds:
        state = small_state(hidden_dropout=0.2, attention_dropout=0.2, **(fields | kind))
        history = torch.tensor(train(state, text_loader(state), steps=2), dtype=torch.float64)
        found.append([history, *(parameter.detach() for chunk in state.chunks for parameter in chunk.parameters())])
        minloop.shutdown_distributed()
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_changes_nothing(model: str, layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    if model in ("experts", *(["latent"] if torch.cuda.is_available() else [])) and sizes == TP:
        sizes = SP  # mcore's experts need sequence parallelism, and Transformer Engine's latent attention
    kinds = KINDS[model] + ([full("uniform", 1, distribute_saved_activations=True)] if sizes == TP else [])
    for plain, *recomputed in run_ranks(world_size, results, MODELS[model] | sizes, [{}, *kinds]):
        for kind, values in zip(kinds, recomputed, strict=True):
            assert all(map(torch.equal, values, plain)), kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (selective("layernorm") | {"add_bias_linear": False}, "recomputes layernorm only where Transformer Engine"),
        (selective("core_attn", "mlp"), r"recompute_modules \['core_attn', 'mlp'\] with add_bias_linear=True"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, r"recompute_num_layers .* not None"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, r"recompute_method .* not None"),
        (full("block", 1) | {"mtp_num_layers": 1}, r"needs recompute_method='uniform' and recompute_num_layers=1"),
        (selective("core_attn", "mpl"), "'mpl' is none of core_attn, mlp, .*: did you mean 'mlp'?"),
        (selective("moe"), r"recompute_modules \['moe'\] with num_moe_experts=None"),
        ({"recompute_modules": ["mlp"]}, r"recompute_modules \['mlp'\] with recompute_granularity=None"),
        (full("block", 1, recompute_modules=["mlp"]), "with recompute_granularity='full', which ignores them"),
        (selective("core_attn") | {"recompute_method": "block"}, "recompute_method='block' with .*'selective'"),
        (selective(), r"recompute_modules=\[\], which recomputes nothing"),
        ({"recompute_modules": "mlp"}, r"'mlp' is a word, .*: give recompute_modules=\['mlp'\]"),
        (full("uniform", 5), r"recompute_num_layers \(5\) is more than num_layers \(4\)"),
        ({"recompute_num_layers": 1}, "recompute_num_layers=1 with recompute_granularity=None, which ignores it"),
    ],
)
def test_what_would_fail_in_the_backward_pass_or_be_ignored_is_refused(fields: dict[str, Any], message: str) -> None:
    without = mock.patch("minloop.memory_checks.HAVE_TE", new=False)
    with without, pytest.raises(ValueError, match=message):
        small_config(**fields)
