"""Hybrid models: every kind of layer that runs without a GPU trains the same model in every layout."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.ssm.mlp_layer import MLPLayer
from ranks import run_ranks
from small import SEQUENCE_LENGTH, VOCAB_SIZE, rounding, small_config, text_loader, train

import minloop
from minloop import hybrid_pattern
from minloop.hybrid_pattern import check_pattern, divide_pattern
from minloop.layers.mamba import scan

STEPS, ENOUGH = 8, 20  # that layouts take, and after which one rank has learnt
# worst relative difference of losses and gradient norms, without and with experts
DENSE, ROUTED = rounding(2e-6), rounding(1e-5)

MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2}
GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
ROPE = {"position_embedding_type": "rope"}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention and MLP": ("*-*-", {"qk_layernorm": True, "num_query_groups": 2}, ROPE),
    "Mamba and gated delta net": ("M*G-", MAMBA | GATED_DELTA_NET, {"share_embeddings_and_output_weights": True}),
    "experts": ("*EME", MAMBA | EXPERTS, ROPE),
    "latent attention": ("+-+-", LATENT, {}),
    "multi-token prediction": ("*-M-/*-", MAMBA | {"mtp_num_layers": 1}, ROPE),
}
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = TP | {"sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2": TP,
    "TP2+SP": SP,
    "PP2": PP,
    "PP2 VPP2": PP | {"virtual_pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
    "TP2+SP×EP2": SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
}
RUNS = [
    ("attention and MLP", "PP2 VPP2", "DP2"),
    ("Mamba and gated delta net", "TP2", "PP2"),
    ("Mamba and gated delta net", "TP2+SP", "CP2"),
    ("experts", "EP2", "PP2 VPP2"),
    ("experts", "TP2+SP×EP2", "CP2"),
    ("latent attention", "TP2+SP", "PP2"),
    ("multi-token prediction", "PP2", "TP2+SP"),
]


def build(pattern: str, hybrid: dict[str, Any], **fields: Any) -> minloop.TrainState:
    config_class = minloop.MLATransformerConfig if "multi_latent_attention" in fields else minloop.TransformerConfig
    if {"M", "G"} & set(pattern):
        fields["transformer_impl"] = "local"  # else these layers need packages of their own
    config = small_config(config_class, is_hybrid_model=True, **fields)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    groups = minloop.init_distributed(config, seed=1)
    sizes = {"vocab_size": VOCAB_SIZE, "max_sequence_length": SEQUENCE_LENGTH}
    chunks = minloop.build_hybrid_model(config, groups, hybrid_layer_pattern=pattern, **sizes, **hybrid)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    # At 5e-3 the tied model's gradient jumps fortyfold around step 18, and one rank differs from itself by 2e-4 when
    # only its microbatches have another size.
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=2e-3)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def train_on(source: str, target: str, steps: int, model: str, **layout: Any) -> list[tuple[float, float]]:
    """Train on from the checkpoint in `source`, and leave one in `target`, where these are given."""
    pattern, fields, hybrid = MODELS[model]
    state = build(pattern, hybrid, **fields, **layout)
    loader = text_loader(state)
    if source:
        minloop.load_checkpoint(source, state, loader)
    history = train(state, loader, steps, global_batch_size=4)
    if target:
        minloop.save_checkpoint(target, state, loader)
    minloop.shutdown_distributed()
    return history


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[tuple[float, float]]]]:
    """Of a model: a checkpoint of initial weights, and what one rank makes of it."""

    @functools.cache
    def train_on_one_rank(model: str) -> tuple[str, list[tuple[float, float]]]:
        initial = str(tmp_path_factory.mktemp("initial"))
        run_ranks(1, train_on, "", initial, 0, model)
        (history,) = run_ranks(1, train_on, initial, "", ENOUGH, model)
        assert history[-1][0] < 0.8 * history[0][0]
        return initial, history[:STEPS]

    return train_on_one_rank


@pytest.mark.parametrize(("model", "first", "second"), RUNS)
def test_layouts_train_the_same_model(model: str, first: str, second: str, reference: Any, tmp_path: Path) -> None:
    """Half the steps in one layout, half in another: together they are those of one rank."""
    initial, expected = reference(model)
    halves = (initial, str(tmp_path), first), (str(tmp_path), "", second)
    history: list[tuple[float, float]] = []
    for source, target, layout in halves:
        results = run_ranks(2, train_on, source, target, STEPS // 2, model, **LAYOUTS[layout])
        assert results[0] == results[1], "ranks report different numbers"
        history += results[0]
    pairs = zip(history, expected, strict=True)
    worst = max(abs(a - b) / b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    assert worst <= (ROUTED if "E" in MODELS[model][0] else DENSE)


def dropped() -> list[torch.Tensor]:
    """Where the stack's first layer kept what it adds: where ranks have the same tokens, and each its own."""
    kept: list[torch.Tensor] = []
    for sequence_parallel in (False, True):
        state = build("-", {}, num_layers=1, hidden_dropout=0.5, **TP | {"sequence_parallel": sequence_parallel})
        (layer,) = [module for module in state.chunks[0].modules() if isinstance(module, MLPLayer)]

        def keep(layer: Any, args: Any, given: dict[str, Any], output: tuple[torch.Tensor, Any]) -> None:
            kept.append((output[0] != given["hidden_states"]).clone())

        layer.register_forward_hook(keep, with_kwargs=True)
        minloop.train_step(state, text_loader(state), num_microbatches=1)
        minloop.shutdown_distributed()
    return kept


def test_ranks_with_their_own_tokens_drop_at_their_own_places() -> None:
    first, second = run_ranks(2, dropped)
    assert torch.equal(first[0], second[0])
    assert 0.4 < (first[1] == second[1]).double().mean() < 0.6
    assert 0.4 < first[1].double().mean() < 0.6


def test_the_pattern_decides_which_layers_a_stage_has() -> None:
    assert run_ranks(2, layers_of_stages, "*-|-") == [["0.self_attention", "1.mlp"], ["0.mlp"]]


def layers_of_stages(pattern: str) -> list[str]:
    state = build(pattern, {}, num_layers=3, **PP)
    names = {".".join(name.split(".")[3:5]) for name, _ in state.chunks[0].named_parameters() if ".layers." in name}
    minloop.shutdown_distributed()
    return sorted(name for name in names if "norm" not in name)


@pytest.mark.parametrize(
    ("pattern", "stages", "divided"),
    [
        ("*-M-", (1, 1), "*-M-"),
        ("*-|M-", (1, 1), "*-M-"),
        ("*-M-/*-", (2, 1), "*-|M-/*-"),
        ("*-M-", (2, 2), "*|-|M|-"),
        ("*-M|-", (2, 1), "*-M|-"),
    ],
)
def test_patterns_are_divided_over_stages(pattern: str, stages: tuple[int, int], divided: str) -> None:
    pp, vpp = stages
    config = SimpleNamespace(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=None if vpp == 1 else vpp
    )
    assert divide_pattern(pattern, config) == divided


@pytest.mark.parametrize(
    ("pattern", "fields", "named"),
    [
        ("*-*-", {"is_hybrid_model": False}, "is_hybrid_model"),
        ("*-*", {}, "num_layers"),
        ("*-*?", {}, "not a valid layer symbol"),
        ("*-*-/-", {}, "mtp_num_layers"),
        ("*-*-", {"mtp_num_layers": 1}, "mtp_num_layers"),
        ("*-|*-|", PP, "3 parts"),
        ("*-*", PP | {"num_layers": 3}, "evenly"),
        ("*-*-", PP | {"num_layers_in_first_pipeline_stage": 1}, "num_layers_in_first_pipeline_stage=1"),
        ("*E*E", EXPERTS | {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("*-*E", {}, "num_moe_experts"),
        ("*-*-", EXPERTS, "num_moe_experts"),
        ("+-+-", {}, "multi_latent_attention"),
        ("*-*-", LATENT, "multi_latent_attention"),
        ("D-D-", LATENT, "fast-hadamard-transform"),
        ("+-+-", LATENT | {"mla_down_proj_fusion": True}, "mla_down_proj_fusion"),
        ("G-G-", GATED_DELTA_NET | {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("M-M-", MAMBA | {"mamba_head_dim": 48}, "mamba_head_dim"),
        ("M-M-", MAMBA | TP | {"mamba_num_groups": 1}, "mamba_num_groups"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(pattern: str, fields: dict[str, Any], named: str) -> None:
    config_class = minloop.MLATransformerConfig if "multi_latent_attention" in fields else minloop.TransformerConfig
    config = small_config(config_class, **({"is_hybrid_model": True, "transformer_impl": "local"} | fields))
    with pytest.raises(ValueError, match=named):
        check_pattern(pattern, config)


@pytest.mark.parametrize(("pattern", "package"), [("M-M-", "mamba-ssm"), ("G-G-", "flash-linear-attention")])
def test_kernels_that_are_not_installed_are_named(pattern: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = MAMBA if pattern == "M-M-" else GATED_DELTA_NET
    config = small_config(is_hybrid_model=True, **fields)
    config.transformer_impl = "transformer_engine"
    monkeypatch.setattr(hybrid_pattern, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"pip install {package}, or set transformer_impl='local'"):
        check_pattern(pattern, config)


@pytest.mark.parametrize(
    ("pattern", "fields", "named"),
    [
        ("G-G-", GATED_DELTA_NET | TP, "sequence_parallel"),
        ("+-+-", LATENT | {"qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_what_transformer_engine_would_get_wrong_is_refused(pattern: str, fields: Any, named: str) -> None:
    config_class = minloop.MLATransformerConfig if "multi_latent_attention" in fields else minloop.TransformerConfig
    config = small_config(config_class, is_hybrid_model=True, **fields)
    config.transformer_impl = "transformer_engine"
    with pytest.raises(ValueError, match=named):
        check_pattern(pattern, config)


@pytest.fixture
def shut_down() -> Iterator[None]:
    yield
    minloop.shutdown_distributed()


@pytest.mark.usefixtures("shut_down")
def test_an_unknown_position_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="position_embedding_type='mrope'"):
        build("*-*-", {"position_embedding_type": "mrope"})


@pytest.mark.usefixtures("shut_down")
def test_checkpoints_name_weights_as_transformer_engine_does() -> None:
    state = build("M*G-", {}, **MAMBA, **GATED_DELTA_NET)
    model: Any = state.chunks[0].module
    names = model.sharded_state_dict(metadata={"dp_cp_group": state.groups.dp_cp})
    keys = {value.key for value in names.values() if hasattr(value, "key")}
    layers = "decoder.layers"
    assert {
        f"{layers}.0.mixer.in_proj.layer_norm_weight",
        f"{layers}.1.self_attention.linear_qkv.layer_norm_weight",
        f"{layers}.2.self_attention.in_proj.layer_norm_weight",
        f"{layers}.3.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
    } <= keys


@pytest.mark.parametrize("length", [5, 8, 11])
def test_the_scan_is_the_recurrence(length: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, 4, 3, generator=generator)
    log_decay = -torch.rand(2, length, 4, generator=generator)
    write, read = (torch.randn(2, length, 2, 5, generator=generator) for _ in range(2))
    state, expected = torch.zeros(2, 4, 5, 3), list[torch.Tensor]()
    for t in range(length):
        key, query = (tensor[:, t].repeat_interleave(2, dim=1) for tensor in (write, read))
        state = state * log_decay[:, t, :, None, None].exp() + key.unsqueeze(-1) * x[:, t].unsqueeze(-2)
        expected.append((query.unsqueeze(-2) @ state).squeeze(-2))
    torch.testing.assert_close(scan(x, log_decay, write, read, chunk_size=4), torch.stack(expected, dim=1))


@pytest.mark.usefixtures("shut_down")
def test_the_gated_delta_net_is_causal_and_normalizes_queries_and_keys() -> None:
    state = build("G", {}, num_layers=1, **GATED_DELTA_NET)
    layer: Any = state.chunks[0].get_submodule("module.decoder.layers.0.self_attention")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(8, 1, 32, generator=generator).cuda()
    changed = torch.cat([tokens[:5], tokens[5:] + 1])
    output, other = layer(tokens, None)[0], layer(changed, None)[0]
    torch.testing.assert_close(output[:5], other[:5])
    assert not torch.allclose(output[5:], other[5:])
    qkv, gate = (torch.randn(1, 8, *size, generator=generator).cuda() for size in ((64,), (4, 8)))
    query, key, value, *_ = layer._prepare_input_for_gated_delta_rule(qkv, gate, 1, 8)
    for part in (query, key):
        torch.testing.assert_close(part.norm(dim=-1).cpu(), torch.ones(1, 8, 4))
    assert torch.equal(value.flatten(), qkv[..., 32:].flatten())
