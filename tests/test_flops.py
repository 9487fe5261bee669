"""FLOPs by a config's shapes are those that PyTorch counts while the model trains, and those of Megatron-LM."""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from small import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, small_config, small_state, text_loader
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import minloop
from minloop.flops import flops_per_token, peak_tflops
from minloop.layers.attention import TorchDotProductAttention

SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "sequence_length": SEQUENCE_LENGTH}
GATED: dict[str, Any] = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
EXPERTS: dict[str, Any] = GATED | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": 2,
}
LATENT = GATED | {
    "config_class": minloop.MLATransformerConfig,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "gpt": {"position_embedding_type": "rope"},
}
BLOCKS = [
    {"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 96}},
    {"attention": {"num_query_groups": None, "no_op": True}, "mlp": {"ffn_hidden_size": 40}},
    {
        "attention": {"num_query_groups": None, "replace_with_linear": True},
        "mlp": {"ffn_hidden_size": None, "no_op": True},
    },
    {"attention": {"num_query_groups": 4}, "mlp": {"ffn_hidden_size": None, "replace_with_linear": True}},
]
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2, tied": {"num_layers": 2, "gpt": {"share_embeddings_and_output_weights": True}},
    "grouped queries, wide heads, output gate": GATED
    | {"num_layers": 2, "num_query_groups": 2, "kv_channels": 12, "attention_output_gate": True},
    "experts in every second layer, shared ones": EXPERTS
    | {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "mtp_num_layers": 1},
    "experts in listed layers": EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
    "latent attention": LATENT | {"num_layers": 2},
    "latent attention, queries at full rank": LATENT | {"num_layers": 1, "q_lora_rank": None},
    "two more tokens": GATED | {"num_layers": 2, "mtp_num_layers": 2},
    "heterogeneous": GATED
    | {
        "config_class": HeterogeneousTransformerConfig,
        "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": BLOCKS}),
    },
}
MAMBA: dict[str, Any] = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
GATED_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
LLAMA: dict[str, Any] = GATED | {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
}


@pytest.fixture(autouse=True)
def shut_down() -> Iterator[None]:
    yield
    minloop.shutdown_distributed()


@pytest.mark.parametrize("model", MODELS)
def test_pytorch_counts_as_many_in_a_step(model: str) -> None:
    """By the full convention, as attention on a CPU takes all keys and masks them; and none is left out or added."""
    # nor what Transformer Engine's layers multiply
    with mock.patch.dict("minloop.layers.attention._KERNELS", {AttnBackend.auto: (SDPBackend.MATH,)}):
        state = small_state(transformer_impl="local", gradient_accumulation_fusion=False, **MODELS[model])
    loader = text_loader(state)
    router = mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None)  # as without it
    # Torch's counter does not know the fused attention of CPUs; that of GPUs makes one product again in its backward.
    with router, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        minloop.train_step(state, loader, num_microbatches=1)
    tokens = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
    assert counter.get_total_flops() == tokens * flops_per_token(state.config, **SIZES, causal=False)


def test_hybrid_models_cost_what_their_weights_and_states_say() -> None:
    """Torch cannot tell: how many products a scan has depends on its chunks."""
    pattern = "M*G-/M*"
    gpt: dict[str, Any] = {"hybrid_layer_pattern": pattern}
    fields: dict[str, Any] = {"is_hybrid_model": True, "mtp_num_layers": 1, "mamba_num_heads": 6}
    fields["transformer_impl"] = "local"
    state = small_state(build=minloop.build_hybrid_model, gpt=gpt, **fields, **MAMBA, **GATED_DELTA_NET)
    matrices = {name: weight.numel() for name, weight in state.chunks[0].named_parameters() if weight.dim() > 1}
    weights = sum(count for name, count in matrices.items() if "embedding" not in name)
    again = matrices["module.output_layer.weight"]  # for the token that multi-token prediction adds
    scans = 2 * 3.5 * (6 * 8) * 8 + 4 * (4 * 16) * 8
    attention = 2 * 2 * 32 * SEQUENCE_LENGTH
    counted = flops_per_token(state.config, **SIZES, causal=False, hybrid_layer_pattern=pattern)
    assert counted == 6 * (weights + again + scans + attention)


@pytest.mark.parametrize(
    ("fields", "vocab_size", "sequence_length", "causal", "gflops"),
    [
        ({"num_layers": 32}, 128_256, 8192, True, 51.47),  # Llama 3 8B
        ({"num_layers": 32}, 128_256, 8192, False, 57.91),
        ({"num_layers": 16}, 128_256, 8192, True, 27.31),
        (
            {
                "num_layers": 24,
                "hidden_size": 2048,
                "ffn_hidden_size": 8192,
                "num_attention_heads": 16,
                "num_query_groups": None,
                "gated_linear_unit": False,
            },
            131_072,
            4096,
            True,
            10.07,
        ),
    ],
)
def test_published_shapes_cost_what_megatron_lm_says(
    fields: dict[str, Any], vocab_size: int, sequence_length: int, causal: bool, gflops: float
) -> None:
    config = small_config(**(LLAMA | fields))
    flops = flops_per_token(config, vocab_size=vocab_size, sequence_length=sequence_length, causal=causal)
    assert round(flops / 1e9, 2) == gflops


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("frequency", [2, [1, 0, 1, 0]])
def test_windows_count_the_keys_that_queries_see(frequency: Any, causal: bool) -> None:
    """In two of four layers; the causal convention is off by the diagonal, half a key at most."""
    length = 48
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "sequence_length": length}
    config = small_config(window_size=(7, 0), window_attn_skip_freq=frequency)
    weights = flops_per_token(small_config(), **sizes, causal=False) - 12 * 4 * 32 * length
    keys = (flops_per_token(config, **sizes, causal=causal) - weights) / (12 * 32)
    if not causal:
        assert keys == 2 * 8 + 2 * length
    else:
        whole = torch.ones(length, length).tril()
        visible = (2 * whole.triu(-7).sum() + 2 * whole.sum()).item() / length
        assert visible - 4 * 0.5 <= keys < visible


@pytest.mark.parametrize("repeated", [False, True])
def test_windows_of_prediction_layers_are_those_they_have(repeated: bool) -> None:
    """mcore numbers these layers from 1 again; a repeated one is always the first."""
    fields: dict[str, Any] = {"num_layers": 3, "mtp_num_layers": 2, "mtp_use_repeated_layer": repeated}
    fields["transformer_impl"] = "local"
    state = small_state(window_size=(7, 0), window_attn_skip_freq=2, **fields)
    attentions = [module for module in state.chunks[0].modules() if isinstance(module, TorchDotProductAttention)]
    if repeated:
        attentions += attentions[3:]
    saved = sum(SEQUENCE_LENGTH - 8 for attention in attentions if attention.window[0] == 7)
    whole, windowed = (flops_per_token(c, **SIZES, causal=False) for c in (small_config(**fields), state.config))
    assert whole - windowed == 12 * 32 * saved


def test_experts_may_work_on_a_latent() -> None:
    """Only Transformer Engine's layers have it."""
    config, latent = small_config(**EXPERTS), small_config(**EXPERTS)
    latent.moe_latent_size = 16
    change = 2 * 32 * 16 - 3 * (32 - 16) * 24 * 2  # of two projections, and of two experts, in two layers of four
    assert flops_per_token(latent, **SIZES) - flops_per_token(config, **SIZES) == 6 * 2 * change


@pytest.mark.parametrize(
    ("fields", "pattern", "message"),
    [
        ({"experimental_attention_variant": "dsa"}, None, "experimental_attention_variant='dsa' is not counted"),
        ({"is_hybrid_model": True}, None, "pass the model's hybrid_layer_pattern"),
        ({}, "*-*-", "is_hybrid_model is False"),
        (
            {"is_hybrid_model": True, "multi_latent_attention": True, "transformer_impl": "transformer_engine"},
            "D-D-",
            "'D' .sparse attention. layers, which are not counted",
        ),
    ],
)
def test_what_is_not_counted_is_refused(fields: dict[str, Any], pattern: str | None, message: str) -> None:
    config = small_config()
    vars(config).update(fields)
    installed = mock.patch("minloop.hybrid_pattern.find_spec")
    with installed, pytest.raises(ValueError, match=message):
        flops_per_token(config, **SIZES, hybrid_layer_pattern=pattern)


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("NVIDIA GB200", 2500, 5000),
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("NVIDIA RTX A1000", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ],
)
def test_peaks_are_those_of_the_chip(name: str, bf16: float | None, fp8: float | None) -> None:
    assert (peak_tflops(name, torch.bfloat16), peak_tflops(name, torch.float8_e4m3fn)) == (bf16, fp8)
    assert peak_tflops(name, torch.float32) is None
