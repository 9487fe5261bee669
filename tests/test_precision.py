"""FP8's errors and advice, by config alone; that it trains is seen where there is a GPU."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from ranks import RankError, run_ranks
from small import WIDE, small_config, small_state, text_loader, train

import minloop
from minloop import precision_checks
from minloop.optimizer import await_gradients, check_agreement
from minloop.optimizer_config_checks import check_precision_aware

MODEL: dict[str, Any] = WIDE | {"bf16": True}
LATENT: dict[str, Any] = {
    **{"multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 32},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16},
}
RECIPES: list[dict[str, Any]] = [
    {"fp8": "hybrid", "fp8_recipe": "delayed"},
    {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
]


def fp8_config(**fields: Any) -> Any:
    """What the checks read, of a model with FP8."""
    config = vars(small_config(bf16=True, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4))
    return SimpleNamespace(**(config | {"fp8": "hybrid", "transformer_impl": "transformer_engine"} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8": "hybrid"}, "fp8='hybrid' with bf16=False and fp16=False: .* set bf16=True"),
        ({"fp8": "hybrid", "fp16": True}, "fp8='hybrid' with bf16=False and fp16=True"),
        (
            {"fp8": "hybrid", "bf16": True, "transformer_impl": "local"},
            r"transformer_impl='local', .* \(pip install transformer-engine",
        ),
        ({"fp8_param": True, "bf16": True}, "fp8_param=True .* fp8 is None: set fp8='hybrid'"),
        ({"fp8": "hybrid", "bf16": True, "fp8_recipe": "tensorwize"}, "did you mean 'tensorwise'"),
        ({"fp4": "e2m1"}, "fp4='e2m1' with bf16=False and fp16=False: FP4 is .* set bf16=True"),
        ({"fp4_param": True, "bf16": True}, "fp4_param=True .* fp4 is None: set fp4='e2m1'"),
        ({"fp4": "e2m1", "bf16": True, "transformer_impl": "local"}, "fp4='e2m1' with .*Blackwell.*; set fp4=None"),
    ],
)
def test_fp8_without_what_it_needs_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**fields)


@pytest.mark.parametrize(
    ("recipe", "capability", "message"),
    [
        ("mxfp8", (9, 0), "needs a GPU of compute capability 10.0 .* 'delayed', 'tensorwise', 'blockwise'$"),
        ("blockwise", (8, 9), "has 8.9: set fp8_recipe to one of 'delayed', 'tensorwise'$"),
        ("delayed", (8, 0), "has 8.0: set fp8=None"),
    ],
)
def test_a_recipe_that_the_chip_lacks_is_refused(recipe: str, capability: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precision_checks.check_fp8_chip(SimpleNamespace(fp8_recipe=recipe), capability)
    precision_checks.check_fp8_chip(SimpleNamespace(fp8_recipe=recipe), (10, 0))


def test_attention_in_fp8_that_cudnn_lacks_is_refused() -> None:
    heads: dict[str, Any] = {"fp8_dot_product_attention": True, "kv_channels": 128}
    latent = {"multi_latent_attention": True, "qk_head_dim": 96, "qk_pos_emb_head_dim": 32, "v_head_dim": 128}
    for fields in ({}, heads, heads | latent, {"fp8_multi_head_attention": True, "kv_channels": 128}):
        precision_checks.check_fp8_attention(fp8_config(**fields), (9, 0))
    precision_checks.check_fp8_attention(fp8_config(**heads | {"kv_channels": 64}), (10, 0))
    both = {"kv_channels": 64, "fp8_multi_head_attention": True}
    refused: list[tuple[dict[str, Any], tuple[int, int], str]] = [
        ({"kv_channels": 64}, (9, 0), r"=True with heads of 64 channels \(kv_channels.* 9.0: .* set fp8_dot_.*=False$"),
        ({"kv_channels": 256}, (10, 0), "256 channels .* 10.0: make it 128 channels a head, or set"),
        (latent | {"qk_head_dim": 128}, (9, 0), r"160 channels \(qk_head_dim \+ qk_pos_emb_head_dim\)"),
        (latent | {"v_head_dim": 64}, (9, 0), r"64 channels \(v_head_dim\)"),
        (both, (9, 0), "and fp8_multi_head_attention=True .* fp8_multi_head_attention=False$"),
    ]
    for fields, capability, message in refused:
        with pytest.raises(ValueError, match=f"^fp8_dot_product_attention.*{message}"):
            precision_checks.check_fp8_attention(fp8_config(**heads | fields), capability)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 72, "tensor_model_parallel_size": 1}, r"hidden_size \(72\) must be a multiple of 16"),
        ({"ffn_hidden_size": 48}, r"ffn_hidden_size \(48\) over tensor_model_parallel_"),
        (
            {"fp8_recipe": "mxfp8", "kv_channels": 4, "tensor_model_parallel_size": 1},
            r"num_attention_heads × kv_channels \(16\) must be .* of 32",
        ),
        ({"num_query_groups": 1, "kv_channels": 8}, r"\+ 2 × num_query_groups\) × kv_channels \(48\) over .* \(2\)"),
        ({"num_moe_experts": 4, "moe_ffn_hidden_size": 40}, r"moe_ffn_hidden_size \(40\) must be"),
        ({"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 8}, "moe_shared_exp"),
        ({"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_latent_size": 24}, r"moe_latent_size \(24\) must be"),
        (LATENT | {"kv_lora_rank": 24}, r"kv_lora_rank \(24\) must be a multiple of 16 on each rank"),
        (LATENT | {"qk_pos_emb_head_dim": 8}, r"kv_lora_rank \+ qk_pos_emb_head_dim \(40\) must be"),
        (LATENT | {"v_head_dim": 4}, r"num_attention_heads × \(qk_head_dim \+ v_head_dim\) \(80\) over .* \(2\)"),
    ],
)
def test_sizes_that_fp8_products_cannot_have_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precision_checks.check_fp8_sizes(fp8_config(**({"tensor_model_parallel_size": 2} | fields)))
    for attention in ({}, LATENT):
        precision_checks.check_fp8_sizes(fp8_config(tensor_model_parallel_size=2, **attention))


def test_sizes_that_fp4_products_cannot_have_are_refused() -> None:
    precision_checks.check_precision(fp8_config(fp8=None, fp4="e2m1"))
    with pytest.raises(
        ValueError, match=r"fp4_recipe='nvfp4': ffn_hidden_size \(80\) must be .* of 32 .* set fp4=None"
    ):
        precision_checks.check_precision(fp8_config(fp8=None, fp4="e2m1", ffn_hidden_size=80))
    precision_checks.check_precision(fp8_config(ffn_hidden_size=80))


def test_weights_in_fp4_are_one_thing_in_both_configs() -> None:
    config = fp8_config(fp8=None, fp4="e2m1", fp4_param=True)
    assert minloop.build_ddp_config(config, use_distributed_optimizer=True).fp4_param_gather
    with pytest.raises(ValueError, match="fp4_param=True with fp4_param_gather=False"):
        minloop.build_ddp_config(config, use_distributed_optimizer=True, fp4_param_gather=False)
    with pytest.raises(ValueError, match=r"fp4_param=True with use_distributed_optimizer=False: .* casts .* to FP4"):
        minloop.build_ddp_config(config)
    with pytest.raises(ValueError, match="fp4_param=False with fp4_param_gather=True"):
        minloop.build_ddp_config(small_config(), use_distributed_optimizer=True, fp4_param_gather=True)
    with pytest.raises(ValueError, match=r"^A weights kept in FP4 \(fp4_param=True\): set fp4_param=False"):
        precision_checks.refuse_fp8_weights(config, "A")


def test_delayed_scaling_looks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minloop.config.check_config", lambda _: None)  # which wants a GPU for FP8
    fields: dict[str, Any] = {"bf16": True, "fp8": "hybrid", "transformer_impl": "transformer_engine"}
    fields["apply_rope_fusion"] = False
    config = small_config(**fields, fp8_recipe="delayed")
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (1024, "max")
    assert small_config(**fields, fp8_recipe="delayed", fp8_amax_history_len=16).fp8_amax_history_len == 16
    assert small_config(**fields, fp8_recipe="tensorwise").fp8_amax_history_len == 1


def test_weights_in_fp8_are_one_thing_in_all_three_configs() -> None:
    config = fp8_config(fp8_param=True, fp8_recipe="tensorwise")
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    assert ddp_config.fp8_param_gather
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1e-3)
    assert optimizer_config.fp8_recipe == "tensorwise"
    precision_checks.check_optimizer_precision(optimizer_config, config, ddp_config)
    optimizer_config.fp8_recipe = None
    with pytest.raises(ValueError, match=r"fp8_recipe is None, but weights are kept in FP8 .* by 'tensorwise'"):
        precision_checks.check_optimizer_precision(optimizer_config, config, ddp_config)
    delayed = fp8_config(fp8_param=True, fp8_recipe="delayed")
    aware = minloop.build_optimizer_config(delayed, ddp_config, lr=1e-3)
    aware.use_precision_aware_optimizer = aware.store_param_remainders = True
    with pytest.raises(ValueError, match="weights in FP8 have no remainders; set store_param_remainders=False"):
        check_agreement(aware, delayed, ddp_config)
    with pytest.raises(ValueError, match="fp8_param=True with use_distributed_optimizer=False"):
        minloop.build_ddp_config(config)
    with pytest.raises(ValueError, match="fp8_param=True with fp8_param_gather=False"):
        minloop.build_ddp_config(config, use_distributed_optimizer=True, fp8_param_gather=False)


def test_the_gpu_part_of_an_optimizer_on_the_cpu_waits_for_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    hybrid: Any = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
    torch.optim.Optimizer.__init__(hybrid, [parameter], {"lr": 1.0})

    def make_parts(_: Any) -> None:
        hybrid.gpu_optimizer, hybrid._d2h_stream = torch.optim.SGD([parameter], lr=1.0), f"stream {len(order)}"
        hybrid.gpu_optimizer.register_step_post_hook(lambda *_: order.append("step"))

    make_parts(hybrid)
    hybrid.register_load_state_dict_post_hook(make_parts)  # as mcore does
    outer: Any = SimpleNamespace(optimizer=hybrid)
    await_gradients(outer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=order.append))
    hybrid.gpu_optimizer.step()
    torch.optim.Optimizer.load_state_dict(hybrid, torch.optim.Optimizer.state_dict(hybrid))
    hybrid.gpu_optimizer.step()
    assert order == ["stream 0", "step", "stream 2", "step"]


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True with bf16=False and fp16=False"),
        (
            {"fp8_param": True},
            {"exp_avg_sq_dtype": torch.float16},
            "exp_avg_sq_dtype=torch.float16 with fp8_param=True",
        ),
        ({"fp8_param": True, "fp8_recipe": "delayed"}, {}, "set store_param_remainders=False"),
        ({"fp8_param": True}, {"exp_avg_dtype": torch.bfloat16}, None),
    ],
)
def test_what_a_precision_aware_optimizer_would_get_wrong_is_refused(
    fields: dict[str, Any], options: dict[str, Any], message: str | None
) -> None:
    names = {"bf16": bool(fields), "fp16": False, "fp8_param": False, "fp8_recipe": "tensorwise"}
    config: Any = SimpleNamespace(**names | fields)
    moments = {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}
    given: Any = SimpleNamespace(optimizer_cpu_offload=False, store_param_remainders=True, **moments)
    vars(given).update(options)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_precision_aware(given, config)


def test_an_optimizer_on_the_cpu_says_what_it_needs() -> None:
    config = small_config(bf16=True)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    given = minloop.build_optimizer_config(config, ddp_config, lr=1e-3, **offload)
    with pytest.raises(ValueError, match="set use_precision_aware_optimizer=True"):
        precision_checks.check_optimizer_precision(given, config, ddp_config)
    given = minloop.build_optimizer_config(config, ddp_config, lr=1e-3, **offload, use_precision_aware_optimizer=True)
    precision_checks.check_optimizer_precision(given, config, ddp_config)
    given.optimizer_offload_fraction = 0.0
    with pytest.raises(ValueError, match=r"optimizer_offload_fraction=0.0 moves nothing"):
        precision_checks.check_optimizer_precision(given, config, ddp_config)


def test_advice_where_fp8_will_lose() -> None:
    assert "hidden_size (64) below 2048" in precision_checks.fp8_advice(fp8_config())[0]
    assert precision_checks.fp8_advice(fp8_config(hidden_size=4096)) == []
    assert precision_checks.fp8_advice(small_config()) == []


def _trained(directory: str, fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of training, and of one batch in evaluation: after it, after another step, and as loaded from there."""
    sharded = {"use_distributed_optimizer": True}
    state = small_state(lr=1e-3, **MODEL, **fields, ddp=sharded)
    loader = text_loader(state, 4)  # of 128 tokens, the blocks of the blockwise recipe
    batch = next(text_loader(state, 4))
    losses = [loss for loss, _ in train(state, loader, 20, 4)]
    evaluations = [minloop.eval_step(state, [batch], num_microbatches=1).loss.item()]
    losses += [loss for loss, _ in train(state, loader, 1, 4)]
    evaluations += [minloop.eval_step(state, [batch], num_microbatches=1).loss.item()]
    minloop.save_checkpoint(directory, state)
    minloop.shutdown_distributed()
    loaded = small_state(seed=99, lr=1e-3, **MODEL, **fields, ddp=sharded)
    minloop.load_checkpoint(directory, loaded)
    evaluations += [minloop.eval_step(loaded, [batch], num_microbatches=1).loss.item()]
    minloop.shutdown_distributed()
    return losses, evaluations


@pytest.mark.gpu
@pytest.mark.parametrize("fields", RECIPES, ids=lambda fields: "_".join(map(str, fields.values())))
def test_fp8_trains_like_bf16_and_its_cached_weights_are_never_stale(fields: dict[str, Any], tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if not HAVE_TE:
        with pytest.raises(RankError, match="FP8 needs Transformer Engine"):
            run_ranks(1, _trained, str(tmp_path), fields)
        return
    ((losses, evaluations),) = run_ranks(1, _trained, str(tmp_path), fields)
    ((usual, _),) = run_ranks(1, _trained, str(tmp_path / "bf16"), {})
    assert losses[-1] == pytest.approx(usual[-1], rel=0.05)
    assert evaluations[0] != evaluations[1]
    kept = 0 if "fp8_param" in fields else 2e-3  # weights in FP8 follow from the master weights
    assert evaluations[2] == pytest.approx(evaluations[1], rel=kept, abs=0)


def _copies_in_fp8() -> str:
    """What `check_replicas` says of weights in FP8 once one of them is doubled on one rank; before, nothing."""
    state = small_state(**MODEL, **RECIPES[-1], ddp={"use_distributed_optimizer": True})
    train(state, text_loader(state, 4), 1, 4)
    minloop.check_replicas(state)
    with minloop.gathered_parameters(state.chunks), torch.no_grad():
        weight: Any = next(p for p in state.chunks[0].parameters() if is_float8tensor(p))
        if torch.distributed.get_rank() == 1:
            weight.copy_(2 * weight.dequantize())
    with pytest.raises(RuntimeError) as error:
        minloop.check_replicas(state)
    minloop.shutdown_distributed()
    return str(error.value)


@pytest.mark.gpu
def test_copies_of_weights_in_fp8_are_compared() -> None:
    if not HAVE_TE:
        pytest.skip("FP8 needs Transformer Engine")
    for said in run_ranks(2, _copies_in_fp8):
        assert "differs between data and context parallel ranks 0 and 1" in said


def _scales(state: minloop.TrainState) -> list[torch.Tensor]:
    modules: list[Any] = [module for module in state.chunks[0].modules() if hasattr(module, "fp8_meta")]
    held = [states for module in modules if (states := module.get_fp8_meta_tensors())]
    return [tensor for states in held for pair in states.values() for tensor in pair]


def _scales_around_evaluations() -> list[list[torch.Tensor]]:
    state = small_state(**MODEL, **RECIPES[0])
    loader, found = text_loader(state, 4), list[list[torch.Tensor]]()
    for steps in (0, 2):
        train(state, loader, steps, 4)
        found.append(_scales(state))
        minloop.eval_step(state, loader, num_microbatches=1)
        found.append(_scales(state))
    minloop.shutdown_distributed()
    return found


@pytest.mark.gpu
def test_an_evaluation_moves_no_scales() -> None:
    if not HAVE_TE:
        pytest.skip("FP8 needs Transformer Engine")
    ((nothing, initial, trained, evaluated),) = run_ranks(1, _scales_around_evaluations)
    assert not nothing
    assert all(tensor.unique().item() in (0, 1) for tensor in initial)  # largest values, scales
    assert len(trained) == len(evaluated) == len(initial) > 0
    assert not all(torch.equal(one, other) for one, other in zip(initial, trained, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(trained, evaluated, strict=True))
