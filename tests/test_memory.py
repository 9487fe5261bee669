"""The memory of a step, estimated: parameters against real models in many layouts, peaks against measured ones."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small import SEQUENCE_LENGTH, VOCAB_SIZE, small_config, small_state, text_loader, train

import minloop
from minloop.parameter_count import count_parameters

GIB = 2**30
SWIGLU: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
GROUPS: dict[str, Any] = {"num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True, "add_qkv_bias": True}
EXPERTS: dict[str, Any] = SWIGLU | {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_router_load_balancing_type": "none",
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP = PP2 | {"virtual_pipeline_model_parallel_size": 2}
LAYOUT = PP2 | {"pipeline_model_parallel_layout": "Et|tttL"}
UNEVEN = PP2 | {"num_layers_in_first_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SWIGLU, {}),
    (SWIGLU | GROUPS, TP2),
    (GROUPS, PP2),
    (SWIGLU, VPP),
    (EXPERTS, LAYOUT),
    (EXPERTS, UNEVEN | {"moe_layer_freq": 2}),
    (EXPERTS, EP2),
    (EXPERTS, TP2 | {"expert_tensor_parallel_size": 1}),
    ({"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}, EP2),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"position_embedding_type": "rope"},
    {"share_embeddings_and_output_weights": True},
]


def _counts() -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    for index, (model, layout) in enumerate(CASES):
        config, options = small_config(**(model | layout)), OPTIONS[index % len(OPTIONS)]
        groups = minloop.init_distributed(config, seed=1)
        chunks = minloop.build_gpt_model(
            config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=SEQUENCE_LENGTH, **options
        )
        learned = "position_embedding_type" not in options
        count = count_parameters(
            config,
            vocab_size=VOCAB_SIZE,
            pipeline_rank=groups.pp.rank(),
            max_sequence_length=SEQUENCE_LENGTH if learned else 0,
            share_embeddings_and_output_weights=options.get("share_embeddings_and_output_weights", False),
        )
        parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        experts = [p.numel() for p in parameters.values() if not getattr(p, "allreduce", True)]
        everything = [p.numel() for chunk in chunks for p in chunk.parameters()]
        found += [(sum(everything), count.total, f"{model} {layout} {options}")]
        if layout.get("expert_model_parallel_size", 1) > 1:
            found += [(sum(experts), count.expert, f"experts of {model} {layout}")]
        minloop.shutdown_distributed()
    return found


def test_parameters_are_those_of_real_models() -> None:
    for counts in run_ranks(2, _counts):
        for real, counted, case in counts:
            assert counted == real, case


def llama(num_layers: int, **fields: Any) -> minloop.TransformerConfig:
    """Layers of Llama 3 8B as they train on a GPU."""
    sizes = {"num_layers": num_layers, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    kernels = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "bf16": True}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return minloop.build_config(**(sizes | kernels | dropout | SWIGLU | {"num_query_groups": 8} | fields))


def estimate(
    config: minloop.TransformerConfig, world_size: int, *, in_fp32: bool = True, **optimizer: Any
) -> minloop.MemoryEstimate:
    fields = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": in_fp32}
    ddp_config = minloop.build_ddp_config(copy.copy(config), **fields)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1e-4)
    for name, value in optimizer.items():  # which mcore refuses to build without Transformer Engine
        setattr(optimizer_config, name, value)
    return minloop.estimate_memory(
        config,
        ddp_config,
        optimizer_config,
        vocab_size=128_256,
        sequence_length=8192,
        micro_batch_size=1,
        world_size=world_size,
        position_embedding_type="rope",
    )


PRECISION_AWARE = {"use_precision_aware_optimizer": True, "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True}


@pytest.mark.filterwarnings("ignore:Transformer Engine cross entropy")
@pytest.mark.parametrize(
    ("measured", "layers", "gpus", "fields", "optimizer"),
    [
        (98.66, 16, 1, {}, {}),
        (90.20, 16, 1, {}, PRECISION_AWARE),
        (73.29, 16, 2, {}, {}),
        (49.44, 16, 2, TP2, {}),
        (129.3, 32, 2, {}, {}),
    ],
)
def test_peaks_are_those_measured_on_an_h200(
    measured: float, layers: int, gpus: int, fields: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """By ``torch.cuda.max_memory_allocated()`` in benchmarks/results/peers_C.json and peers_D.json."""
    assert estimate(llama(layers, **fields), gpus, **optimizer).total / GIB == pytest.approx(measured, rel=0.01)


FSDP: list[dict[str, Any]] = [
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard"},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    {"reshard_after_forward": True},
]


def _kept() -> list[tuple[int, int]]:
    """Bytes of weights, gradients and optimizer that a state of each kind keeps, as estimated and as they are."""
    found: list[tuple[int, int]] = []
    for ddp in FSDP:
        state = small_state(ddp=ddp, hidden_size=128, num_attention_heads=4, ffn_hidden_size=256, bf16=True)
        train(state, text_loader(state), 1)
        chunk: Any = state.chunks[0]
        buffer = getattr(chunk, "param_and_grad_buffer", None)
        names = ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer")
        made = [getattr(group, name) for group in buffer.parameter_groups for name in names] if buffer else []
        held = [one.data for one in made if one is not None]
        if not held or ddp.get("data_parallel_sharding_strategy") == "no_shard":
            held += [getattr(p, "_local_tensor", p).detach() for p in chunk.parameters()]
        if not buffer:
            held += [p.main_param.to_local() for p in chunk.parameters()] + held  # gradients are of the weights' dtype
        moments = [value for one in state.optimizer.optimizer.state.values() for value in one.values()]
        held += [getattr(value, "_local_tensor", value) for value in moments if torch.is_tensor(value)]
        options: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "sequence_length": SEQUENCE_LENGTH,
            "micro_batch_size": 1,
            "world_size": 2,
        }
        configs = (state.config, chunk.ddp_config, state.optimizer.config)
        expected = minloop.estimate_memory(*configs, **options)
        found.append((expected.weights + expected.gradients + expected.optimizer, sum(t.nbytes for t in held)))
        minloop.shutdown_distributed()
    return found


def test_what_fully_sharded_states_keep() -> None:
    for expected, real in run_ranks(2, _kept)[0]:
        print(expected, real)
        assert expected == pytest.approx(real, rel=0.02)


def _of_replicas(**ddp: Any) -> minloop.MemoryEstimate:
    config = minloop.build_config(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True)
    ddp_config = minloop.build_ddp_config(config, use_megatron_fsdp=True, **ddp)
    options: dict[str, Any] = {"vocab_size": 512, "sequence_length": 64, "micro_batch_size": 1, "world_size": 8}
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1.0)
    return minloop.estimate_memory(config, ddp_config, optimizer_config, **options)


def test_replicas_share_what_they_divide() -> None:
    twice: dict[str, Any] = {"num_distributed_optimizer_instances": 2}
    one, two, outer = _of_replicas(), _of_replicas(**twice), _of_replicas(outer_dp_sharding_strategy="optim", **twice)
    assert (two.weights, outer.weights) == pytest.approx((2 * one.weights,) * 2, rel=1e-3)
    assert (two.optimizer, outer.optimizer) == pytest.approx((2 * one.optimizer, one.optimizer), rel=1e-3)
    with pytest.raises(ValueError, match=r"num_distributed_optimizer_instances \(3\) does not divide the 8 data"):
        _of_replicas(num_distributed_optimizer_instances=3)
    # gradients of a whole model wait for their reduction, and no more
    unsharded = _of_replicas(data_parallel_sharding_strategy="no_shard")
    assert _of_replicas(data_parallel_sharding_strategy="optim_grads").layers <= unsharded.gradients


@pytest.mark.filterwarnings("ignore:Transformer Engine cross entropy")
def test_what_saves_memory_saves_it() -> None:
    config = llama(16)
    plain = estimate(config, 2)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = estimate(llama(16, **full), 2)
    hidden = 2 * 4096 * 8192
    assert recomputed.activations == 16 * hidden
    assert estimate(llama(16, recompute_granularity="selective", recompute_modules=["mlp"]), 2).activations == (
        plain.activations - 16 * (hidden + 3 * 2 * 14336 * 8192)
    )
    moments: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    assert estimate(config, 2, **PRECISION_AWARE, **moments).optimizer * 2 == plain.optimizer
    offloaded: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    offloaded |= PRECISION_AWARE
    assert estimate(config, 2, **offloaded).optimizer * 4 == plain.optimizer
    assert estimate(config, 2, in_fp32=False, **offloaded).optimizer * 3 == plain.optimizer  # and fp32 gradients
    eight_bits = copy.copy(config)
    eight_bits.fp8 = "hybrid"  # 27.6 thousand tokens a second with 4 GiB more, as measured
    assert (estimate(eight_bits, 2).total - plain.total) / GIB == pytest.approx(4, abs=0.5)
    eight_bits.fp8_param = True
    assert estimate(eight_bits, 2).total < plain.total


@pytest.mark.filterwarnings("ignore:Transformer Engine cross entropy")
def test_the_first_stage_holds_the_most_microbatches() -> None:
    stages = {"pipeline_model_parallel_size": 4}
    layer = estimate(llama(16), 1).activations / 16
    assert estimate(llama(16, **stages), 4).activations == 16 * layer
    virtual = llama(16, **stages, virtual_pipeline_model_parallel_size=2)
    assert estimate(virtual, 4).activations == (2 * 3 + 4 + 1) * 2 * layer
    with pytest.raises(ValueError, match=r"world size 6 is not a multiple of .* = 4: change"):
        estimate(llama(16, **stages), 6)
    with pytest.raises(ValueError, match="mtp_num_layers=1: the memory"):
        estimate(llama(16, mtp_num_layers=1), 1)
    with pytest.raises(ValueError, match="optimizer 'muon'"):
        estimate(llama(16), 1, optimizer="muon")


EP4: dict[str, Any] = {"num_moe_experts": 4, "expert_model_parallel_size": 4, "add_bias_linear": False}
FSDP2: dict[str, Any] = {"reshard_after_forward": True}


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (PP2, {"pipeline_rank": 2}, r"pipeline_rank is 2: pipeline_model_parallel_size \(2\) has the stages 0 to 1"),
        (PP2, {"pipeline_rank": -1}, "pipeline_rank is -1"),
        (EP4, {}, r"world size 2 is not a multiple of .* expert_model_parallel_size \(4\)"),
        (EP4, {"world_size": 6}, "world size 6 is not a multiple of"),
        ({}, {"world_size": 0}, "world_size is 0: give a whole number from 1 on"),
        ({}, {"world_size": -2}, "world_size is -2"),
        ({}, {"num_microbatches": 0}, "num_microbatches is 0"),
        (VPP, {"num_microbatches": 1}, r"num_microbatches \(1\) cannot be divided"),
        ({}, {"micro_batch_size": 2.5}, "micro_batch_size is 2.5"),
        ({}, {"vocab_size": 0}, "vocab_size is 0"),
        ({}, {"sequence_length": 0}, "sequence_length is 0"),
        ({"context_parallel_size": 2}, {"sequence_length": 66}, r"\(66\) must be a multiple of 2 × context"),
        (TP2, {"sequence_length": 65}, r"sequence_length \(65\) is not divisible by tensor_model_parallel_size \(2\)"),
        (TP2, {"vocab_size": 257}, r"vocab_size \(257\) is not divisible by .*: pad it to 258"),
        ({}, {"position_embedding_type": "ropes"}, "use one of learned_absolute, rope, .*: did you mean 'rope'?"),
        ({}, {"ddp": FSDP2, "share_embeddings_and_output_weights": True}, "torch FSDP2 with share_embeddings"),
        ({"changed": PP2}, {"ddp": FSDP2}, r"torch FSDP2 with pipeline_model_parallel_size \(2\)"),
        ({"changed": {"bf16": False}}, {}, "OptimizerConfig.bf16 is True, but the model was built with False"),
        ({"changed": {"cpu_offloading": True}}, {}, "cpu_offloading=True: how much it moves to the host is not"),
        ({"changed": {"fine_grained_activation_offloading": True}}, {}, "^fine_grained_.*=True: how much"),
    ],
)
def test_what_cannot_be_built_is_not_estimated(fields: dict[str, Any], options: dict[str, Any], message: str) -> None:
    changed, ddp = fields.get("changed", {}), options.get("ddp", {})  # changed after the other configs were made
    unchanged: dict[str, Any] = {"gradient_accumulation_fusion": False, "transformer_impl": "local", **fields}
    unchanged.pop("changed", None)
    config = small_config(bf16=True, **unchanged)
    ddp_config = minloop.build_ddp_config(config, **ddp)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1.0)
    for name, value in changed.items():
        setattr(config, name, value)
    usual = {"vocab_size": 256, "sequence_length": 64, "micro_batch_size": 1, "world_size": 2}
    asked: Any = usual | {name: value for name, value in options.items() if name != "ddp"}
    with pytest.raises(ValueError, match=message):
        minloop.estimate_memory(config, ddp_config, optimizer_config, **asked)
