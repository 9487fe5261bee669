"""The torch-only layer parts against plain attention and torch's norms, on one rank and on several."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formula import (
    CASES,
    CAUSAL,
    B,
    S,
    assert_same,
    build_attention,
    make_inputs,
    packed,
    packed_mask,
    plain_attention,
    random_mask,
    window_mask,
    with_gradients,
)
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import get_sliding_window_causal_mask
from ranks import run_ranks
from small import DEVICE, rounding, small_state, text_loader, train
from torch import Tensor

import minloop
from minloop.layers import TorchDotProductAttention, TorchNorm, with_torch_parts
from minloop.layers.flash_window import mend_flash_attention

PLACES = [  # device, dtype of the inputs, tolerance
    pytest.param(("cpu", torch.float64, 1e-10), id="cpu"),
    pytest.param(("cuda", torch.float32, 1e-4), id="gpu-fp32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16, 3e-2), id="gpu-bf16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float16, 5e-3), id="gpu-fp16", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("window", [(3, 0), (0, 0), (3, 2)])
def test_the_windows_of_these_tests_are_mcores(window: tuple[int, int]) -> None:
    with minloop.cpu_backend():
        assert torch.equal(window_mask(window, 5), ~get_sliding_window_causal_mask(5, S, window).cpu())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_formula(case: str, place: tuple[str, torch.dtype, float]) -> None:
    fields, shapes, allowed = CASES[case]
    inputs = make_inputs(**shapes, place=place)
    module, scale = build_attention(**fields), fields.get("arguments", {}).get("softmax_scale", 8**-0.5)
    actual = with_gradients(lambda q, k, v: module(q, k, v, None), *inputs)
    expected = with_gradients(lambda q, k, v: plain_attention(q, k, v, allowed, scale), *inputs)
    assert_same(actual, expected, place[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mask_type", [AttnMaskType.padding, AttnMaskType.arbitrary, AttnMaskType.causal])
@pytest.mark.parametrize("query_groups", [4, 2])
def test_attention_mask(mask_type: AttnMaskType, query_groups: int, place: tuple[str, torch.dtype, float]) -> None:
    mask, inputs = random_mask().to(place[0]), make_inputs(query_groups, place=place)
    allowed = ~mask & CAUSAL.to(place[0]) if mask_type == AttnMaskType.causal else ~mask
    module = build_attention(AttnMaskType.padding, num_query_groups=query_groups)
    actual = with_gradients(lambda q, k, v: module(q, k, v, mask, attn_mask_type=mask_type), *inputs)
    assert_same(actual, with_gradients(lambda q, k, v: plain_attention(q, k, v, allowed), *inputs), place[2])


@pytest.mark.parametrize("place", PLACES)
def test_a_row_that_may_not_look_anywhere_looks_everywhere(place: tuple[str, torch.dtype, float]) -> None:
    """As padding does; a softmax of nothing would be NaN, and so would its gradients."""
    mask = torch.zeros(1, 1, 1, S, dtype=torch.bool)
    mask[..., :4] = True
    allowed = CAUSAL & ~mask
    allowed[..., :4, :] = True
    module, inputs = build_attention(), make_inputs(place=place)
    results = with_gradients(lambda q, k, v: module(q, k, v, mask.to(place[0])), *inputs)
    assert_same(results, with_gradients(lambda q, k, v: plain_attention(q, k, v, allowed), *inputs), place[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window_size", [None, (3, 0)])
@pytest.mark.parametrize("layer_scaling", [False, True])
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_sinks(softmax_type: str, layer_scaling: bool, window_size: Any, place: tuple[str, torch.dtype, float]) -> None:
    learnable = softmax_type == "learnable"
    with minloop.cpu_backend():
        module = build_attention(
            softmax_type=softmax_type,
            num_query_groups=2,
            params_dtype=place[1],
            window_size=window_size,
            apply_query_key_layer_scaling=layer_scaling,
            layer_number=3,
        )
    assert list(module.state_dict()) == (["softmax_offset"] if learnable else [])
    offset: Any = module.softmax_offset
    if not learnable:
        module.softmax_offset = offset.to(place[0])
    assert getattr(offset, "tensor_model_parallel", False) == learnable  # or gradient norms would miss most of it
    allowed = CAUSAL if window_size is None else window_mask(window_size)
    sinks = torch.tensor([-1.0, 0.5, 1.0, 3.0] if learnable else [0.0] * 4).to(*place[:2])

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        weights = {"softmax_offset": sinks} if learnable else {}
        return torch.func.functional_call(module, weights, (query, key, value, None)) + 0 * sinks.sum()

    inputs = (*make_inputs(2, place=place), sinks)
    actual = with_gradients(attend, *inputs)
    expected = with_gradients(lambda q, k, v, s: plain_attention(q, k, v, allowed, sinks=s), *inputs)
    compared = slice(None) if learnable else slice(-1)
    assert_same(actual[compared], expected[compared], place[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("lengths", "window_size"), [([5, 30, 29], None), ([5, 0, 30], None), ([40, 24], (2, 0))])
def test_packed_sequences(lengths: list[int], window_size: Any, place: tuple[str, torch.dtype, float]) -> None:
    """Tokens after the last sequence are one more."""
    allowed = packed_mask(lengths, window_size)
    inputs = [x[:, 0] for x in make_inputs(2, place=place)]
    module, params = build_attention(window_size=window_size, num_query_groups=2), packed(lengths)
    params.cu_seqlens_q = params.cu_seqlens_q.to(place[0])
    actual = with_gradients(lambda q, k, v: module(q, k, v, None, packed_seq_params=params), *inputs)

    def expected(*inputs: Tensor) -> Tensor:
        query, key, value = (x.unsqueeze(1) for x in inputs)
        return plain_attention(query, key, value, allowed)[:, 0]

    assert_same(actual, with_gradients(expected, *inputs), place[2])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["window", "end of the keys", "packed"])
def test_no_mask_is_held_on_a_gpu(case: str) -> None:
    length = 32_768
    module = build_attention(window_size=(1024, 0) if case == "window" else None)
    query, key, value = torch.randn(3, length, 1, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    query = query[length // 2 :] if case == "end of the keys" else query
    params = packed([length // 2, length // 2]) if case == "packed" else None
    if params is not None:
        params.cu_seqlens_q = params.cu_seqlens_q.cuda()
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module(query, key, value, None, packed_seq_params=params).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < length * length // 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_bias": torch.zeros(1)}, "attention_bias"),
        ({"attention_mask": torch.zeros(B, 1, S, S - 1, dtype=torch.bool)}, "attention_mask"),
        ({"attention_mask": torch.zeros(B, 1, S, S)}, "attention_mask"),
        ({"packed_seq_params": packed([S], qkv_format="sbhd")}, "packed_seq_params.*qkv_format"),
        ({"packed_seq_params": packed([S]), "attn_mask_type": AttnMaskType.padding}, "packed_seq_params.*causal"),
        ({"packed_seq_params": packed([S]), "attention_mask": random_mask()}, "packed_seq_params.*attention_mask"),
    ],
)
def test_what_attention_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_attention()(*make_inputs(), **({"attention_mask": None} | arguments))


@pytest.mark.parametrize("field", ["qk_clip", "log_max_attention_logit"])
def test_what_needs_the_largest_logit_is_refused(field: str) -> None:
    fields: dict[str, Any] = {field: True}
    with pytest.raises(ValueError, match=field):
        build_attention(**fields)


def attend_with_dropout(sequence_parallel: bool) -> list[Any]:
    config = minloop.build_config(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=8,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        attention_dropout=0.5,
    )
    groups = minloop.init_distributed(config, seed=3)
    module = TorchDotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    before, default = tracker.get_states(), torch.get_rng_state()
    inputs = make_inputs(place=(DEVICE, torch.float32))

    def attend() -> Tensor:
        with tracker.fork() if sequence_parallel else contextlib.nullcontext():  # as a transformer block does
            return module(*inputs, None)

    first, second = attend(), attend()
    default_is_untouched = torch.equal(default, torch.get_rng_state())
    tracker.set_states(before)
    again = attend()
    without = module.eval()(*inputs, None)
    minloop.shutdown_distributed()
    return [first, second, again, without, default_is_untouched]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout(sequence_parallel: bool) -> None:
    ranks = run_ranks(2, attend_with_dropout, sequence_parallel)
    for first, second, again, without, default_is_untouched in ranks:
        assert default_is_untouched
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert_same([without], [plain_attention(*make_inputs(), CAUSAL)], tolerance=rounding(1e-5))
        assert not torch.allclose(first, without)
    assert not torch.equal(ranks[0][0], ranks[1][0])


def build_norm(width: int = 6, **fields: Any) -> torch.nn.Module:
    every: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    return TorchNorm(minloop.TransformerConfig(**(every | fields)), width, eps=1e-3, has_residual=True)


NORMS: dict[Any, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", NORMS)
def test_norm_is_torchs(normalization: Any, zero_centered: bool) -> None:
    """Before training, and with weights and biases that are not the initial ones."""
    norm = build_norm(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    theirs: Any = NORMS[normalization](6, eps=1e-3)
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(1))
    assert list(norm.state_dict()) == list(theirs.state_dict())
    assert_same([norm(x)], [theirs(x)], 1e-6)
    for name, parameter in norm.named_parameters():
        with torch.no_grad():
            parameter += torch.linspace(-0.5, 0.5, 6)
            theirs.get_parameter(name).copy_(parameter + (zero_centered and name == "weight"))
    names = [name for name, _ in norm.named_parameters()]

    def apply(module: torch.nn.Module) -> Callable[..., Tensor]:
        return lambda x, *values: torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    ours = with_gradients(apply(norm), x, *norm.parameters())
    assert_same(ours, with_gradients(apply(theirs), x, *theirs.parameters()), 1e-5)


@pytest.mark.parametrize("normalization", NORMS)
def test_zero_centered_weights_keep_their_precision_in_bf16(normalization: Any) -> None:
    norm: Any = build_norm(64, normalization=normalization, layernorm_zero_centered_gamma=True).bfloat16()
    torch.nn.init.constant_(norm.weight, 2.0**-9)  # 1 + 2**-9 is 1 in bf16
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = NORMS[normalization](64, eps=1e-3)(x.float()) * (1 + 2.0**-9)
    ratio = (norm(x).float() * exact).sum() / exact.square().sum()
    assert abs(ratio - 1) < 2.0**-11


@pytest.mark.parametrize("normalization", NORMS)
def test_norm_of_an_fp32_residual_has_the_dtype_of_its_weights(normalization: Any) -> None:
    norm = build_norm(normalization=normalization, params_dtype=torch.bfloat16)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert norm(x).dtype == torch.bfloat16
    assert_same([norm(x)], [NORMS[normalization](6, eps=1e-3)(x)], 2.0**-8)


def test_l2_norm_has_a_mean_square_of_one() -> None:
    norm = build_norm(normalization="L2Norm")
    assert list(norm.parameters()) == []
    with minloop.cpu_backend():  # mcore compiles this norm
        assert_same([norm(torch.full((6,), 7.0))], [torch.ones(6)], 1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norm_says_whether_its_gradients_are_partial(sequence_parallel: bool) -> None:
    norm: Any = build_norm(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    assert [p.sequence_parallel for p in norm.bfloat16().parameters()] == [sequence_parallel] * 2


@pytest.mark.parametrize(
    "fields", [{"persist_layer_norm": True}, {"memory_efficient_layer_norm": True}, {"normalization": "GroupNorm"}]
)
def test_what_the_norm_refuses(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        build_norm(**fields)


SPECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "RMSNorm, norms of queries and keys": {"normalization": "RMSNorm", "qk_layernorm": True},
    "experts": {
        "num_moe_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "moe_layer_freq": [0, 1],
        "add_bias_linear": False,
    },
    "multi-latent attention": {"multi_latent_attention": True, "qk_layernorm": True},
}


def texts_of_specs(fields: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Decoder block and multi-token prediction: as mcore makes it, with torch parts, and mcore's once more."""
    config_class = minloop.MLATransformerConfig if "multi_latent_attention" in fields else minloop.TransformerConfig
    config = minloop.build_config(
        config_class,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        mtp_num_layers=1,
        transformer_impl="local",
        **fields,
    )
    minloop.init_distributed(config, seed=1)
    block: Any = get_gpt_decoder_block_spec(config, False, config.normalization)
    mtp: Any = get_gpt_mtp_block_spec(config, block, False)
    texts = [(repr(spec), repr(with_torch_parts(spec)), repr(spec)) for spec in (block, mtp)]
    assert with_torch_parts(block).layer_norm is TorchNorm
    minloop.shutdown_distributed()
    return texts


REPLACED = {
    "megatron.core.transformer.torch_norm.WrappedTorchNorm": "minloop.layers.norm.TorchNorm",
    "megatron.core.transformer.dot_product_attention.DotProductAttention": (
        "minloop.layers.attention.TorchDotProductAttention"
    ),
    "megatron.core.transformer.multi_latent_attention.MLASelfAttention": (
        "minloop.layers.latent_attention.TorchMLASelfAttention"
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_with_torch_parts_replaces_all_parts_and_nothing_else(case: str) -> None:
    (texts,) = run_ranks(1, texts_of_specs, SPECS[case])
    for before, after, again in texts:
        assert again == before
        assert before.count("WrappedTorchNorm'") >= 3
        for old, new in REPLACED.items():
            before = before.replace(f"{old}'", f"{new}'")
        assert after == before
        assert "WrappedTorchNorm" not in after
        assert ".DotProductAttention" not in after


def test_with_torch_parts_knows_apexs_norm_and_paths_of_modules() -> None:
    assert with_torch_parts(TransformerBlockSubmodules(layer_norm=FusedLayerNorm)).layer_norm is TorchNorm
    path = ("megatron.core.transformer.dot_product_attention", "DotProductAttention")
    spec = ModuleSpec(module=path, params={"attention_type": "self"})
    assert with_torch_parts(spec) == ModuleSpec(module=TorchDotProductAttention, params={"attention_type": "self"})
    assert spec.module is path
    assert with_torch_parts(None) is None


SHARED: dict[str, dict[str, Any]] = {
    "one group of keys": {"num_query_groups": 1},
    "sinks": {"softmax_type": "learnable", "num_query_groups": 2},
    "window": {"window_size": (5, 0), "window_attn_skip_freq": 2},
    "multi-latent attention": {
        "config_class": minloop.MLATransformerConfig,
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "gpt": {"position_embedding_type": "rope"},
    },
    "zero-centred RMSNorm": {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True, "qk_layernorm": True},
}


def train_from(directory: str, fields: dict[str, Any], save: bool = False) -> list[tuple[float, float]]:
    state = small_state(num_layers=2, transformer_impl="local", **fields)
    if save:
        minloop.save_checkpoint(directory, state)
    else:
        minloop.load_checkpoint(directory, state)
    history = train(state, text_loader(state), 3)
    minloop.shutdown_distributed()
    return history


@pytest.mark.parametrize("case", SHARED)
def test_layouts_train_the_same_model(case: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, train_from, str(tmp_path), SHARED[case], save=True)
    layouts: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
    ]
    for layout in layouts:
        for history in run_ranks(2, train_from, str(tmp_path), SHARED[case] | layout):
            torch.testing.assert_close(torch.tensor(history), torch.tensor(expected), rtol=rounding(5e-6), atol=0)


def test_flash_attention_4_gets_open_windows_in_its_own_word() -> None:
    seen: list[Any] = []

    def attention(*args: Any, **options: Any) -> None:
        seen.append((args, options))

    backends = SimpleNamespace(flash_attn_func_v4=attention, _flash_attn_bwd_v4=attention, flash_attn_func_v3=attention)
    mend_flash_attention(backends)
    once = backends.flash_attn_func_v4
    mend_flash_attention(backends)
    assert backends.flash_attn_func_v4 is once
    assert backends.flash_attn_func_v3 is attention
    once(1, window_size=(-1, 0), causal=True)
    once(1, window_size=(128, -1))
    backends._flash_attn_bwd_v4(window_size_left=-1, window_size_right=0)
    assert seen == [
        ((1,), {"window_size": (None, 0), "causal": True}),
        ((1,), {"window_size": (128, None)}),
        ((), {"window_size_left": None, "window_size_right": 0}),
    ]
