"""LoRA adapters: only they train, alike in every layout; merged, saved alone and loaded back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from ranks import run_ranks
from small import VOCAB_SIZE, WIDE, rounding, small_config, small_state, text_loader, train

import minloop
from minloop.embedding.lora import COLUMN, NORMED, LoRA

ADAPTERS = ["*_lora.*"]
ZERO1 = {"use_distributed_optimizer": True}
FSDP2 = {"reshard_after_forward": True}


def _adapted(directory: str | None = None, **options: Any) -> minloop.TrainState:
    """A state with adapters, on the base weights in `directory`, and adapters' first weights that no layout changes."""
    state = small_state(gpt={"before_wrapping": minloop.lora(rank=4)}, gated_linear_unit=True, **options)
    if directory is not None:
        minloop.load_weights(directory, state, allow_missing=ADAPTERS)
        minloop.load_full_parameters(state, _drawn(state), only=ADAPTERS)
    return state


def _drawn(state: minloop.TrainState) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shapes = {name: value.shape for name, value in minloop.named_full_parameters(state, only=ADAPTERS)}
    return [(name, torch.randn(shapes[name], generator=generator) * 0.1) for name in sorted(shapes)]


def _save_base(directory: str, **options: Any) -> None:
    state = small_state(gated_linear_unit=True, **options)
    minloop.save_checkpoint(directory, state)
    minloop.shutdown_distributed()


def _train(directory: str, options: dict[str, Any]) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    state = _adapted(directory, **options)
    names = {name for chunk in state.chunks for name, p in chunk.named_parameters() if p.requires_grad}
    assert names
    assert all("_lora." in name for name in names)
    trained = sum(p.numel() for chunk in state.chunks for p in chunk.parameters() if p.requires_grad)
    assert sum(buffer.numel_unpadded for chunk in state.chunks for buffer in chunk.buffers) == trained
    before = dict(minloop.named_full_parameters(state))
    before = {name: value.clone() for name, value in before.items()}
    results = train(state, text_loader(state), 4)
    after = dict(minloop.named_full_parameters(state))
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "_lora." in name}
    minloop.check_replicas(state)
    minloop.shutdown_distributed()
    return results, {name: after[name] for name in changed}


def test_only_adapters_train_and_alike_in_every_layout(tmp_path: Path) -> None:
    run_ranks(1, _save_base, str(tmp_path))
    ((expected, weights),) = run_ranks(1, _train, str(tmp_path), {})
    assert expected[-1][0] < expected[0][0]
    for options in (
        {"ddp": {"use_distributed_optimizer": True}},  # which gathers weights as each module is called
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "ddp": {"use_distributed_optimizer": True}},
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ):
        for results, theirs in run_ranks(2, _train, str(tmp_path), options):
            torch.testing.assert_close(torch.tensor(results), torch.tensor(expected), rtol=rounding(1e-5), atol=1e-5)
            assert theirs.keys() == weights.keys()


def _merge_and_load(directory: str) -> None:
    state = _adapted(tensor_model_parallel_size=2, bf16=False)
    tokens = torch.arange(64).reshape(2, 32) % VOCAB_SIZE
    base = minloop.forward_logits(state, tokens)
    minloop.load_full_parameters(state, _drawn(state), only=ADAPTERS)
    adapted = minloop.forward_logits(state, tokens)
    assert (adapted - base).abs().max() > 1e-2
    saved = minloop.save_checkpoint(directory, state)
    adapters = dict(minloop.named_full_parameters(state, only=ADAPTERS))
    weights = dict(minloop.named_full_parameters(state))
    minloop.merge_lora(state.chunks)
    torch.testing.assert_close(minloop.forward_logits(state, tokens), adapted, rtol=1e-5, atol=1e-5)
    assert not any("_lora" in name for name, _ in minloop.named_full_parameters(state))
    with pytest.raises(ValueError, match="no adapters to merge"):
        minloop.merge_lora(state.chunks)
    minloop.shutdown_distributed()

    other = _adapted(pipeline_model_parallel_size=2, seed=9)
    assert 0 < len(adapters) < len(weights)
    minloop.load_full_parameters(other, weights.items())
    torch.testing.assert_close(minloop.forward_logits(other, tokens), adapted, rtol=1e-5, atol=1e-5)
    minloop.shutdown_distributed()
    other = _adapted(seed=9)
    minloop.load_checkpoint(saved, other)
    torch.testing.assert_close(minloop.forward_logits(other, tokens), adapted, rtol=1e-5, atol=1e-5)
    minloop.shutdown_distributed()
    _load_without(saved, tokens, base)


def _load_without(saved: Path, tokens: torch.Tensor, base: torch.Tensor) -> None:
    """Adapters are left out on purpose, or not at all."""
    fewer: dict[str, Any] = {"gpt": {"before_wrapping": minloop.lora(rank=4, targets=["linear_qkv"])}}
    layouts: list[dict[str, Any]] = [{"pipeline_model_parallel_size": 2}, {"ddp": {"use_distributed_optimizer": True}}]
    for options, lost in ((fewer, 6), (dict[str, Any](), 8)):
        for layout in layouts:
            state = small_state(gated_linear_unit=True, seed=9, **options, **layout)
            message = rf"holds {lost} tensors of LoRA's adapters that this model lacks: .*linear_fc1_lora.*merge_lora"
            for load in (minloop.load_checkpoint, minloop.load_weights):
                with pytest.raises(ValueError, match=message):
                    load(saved, state)
            with pytest.raises(ValueError, match=message):
                minloop.load_checkpoint(saved, state, weights_only=True)
            if not options:
                minloop.load_weights(saved, state, skip=ADAPTERS)
                torch.testing.assert_close(minloop.forward_logits(state, tokens), base, rtol=1e-5, atol=1e-5)
            minloop.shutdown_distributed()


def test_adapters_are_merged_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(2, _merge_and_load, str(tmp_path))


def _merged_after_training(directory: str, options: dict[str, Any]) -> None:
    state = _adapted(lr=0.1, **options)
    train(state, text_loader(state), 2)  # with ZeRO-1 each rank knows its part of the update alone
    minloop.merge_lora(state.chunks)
    minloop.check_replicas(state)
    tokens = torch.arange(64).reshape(2, 32) % VOCAB_SIZE
    merged = minloop.forward_logits(state, tokens)
    batch = next(text_loader(state))
    for refused in (
        lambda: minloop.train_step(state, iter([batch]), num_microbatches=1),
        lambda: minloop.save_checkpoint(directory, state),
        lambda: minloop.load_checkpoint(directory, state),
    ):
        with pytest.raises(RuntimeError, match="merge_lora took the adapters"):
            refused()
    saved = None
    if "reshard_after_forward" in options.get("ddp", {}):
        with pytest.raises(ValueError, match=r"weights_only=True\): give the weights to a new state"):
            minloop.save_checkpoint(directory, state, weights_only=True)
    else:
        saved = minloop.save_checkpoint(directory, state, weights_only=True)
    other = small_state(seed=9, gated_linear_unit=True, **options)
    minloop.load_full_parameters(other, minloop.named_full_parameters(state))
    assert torch.equal(minloop.forward_logits(other, tokens), merged)
    minloop.shutdown_distributed()
    if saved is None:
        return
    other = small_state(seed=9, gated_linear_unit=True, **options)
    with pytest.raises(ValueError, match=r"weights_only=True\) begins with a new one"):
        minloop.load_checkpoint(saved, other)
    minloop.load_checkpoint(saved, other, weights_only=True)
    assert torch.equal(minloop.forward_logits(other, tokens), merged)
    train(other, text_loader(other), 1)
    minloop.shutdown_distributed()


@pytest.mark.parametrize(
    "options", [{"ddp": ZERO1}, {"ddp": ZERO1, "tensor_model_parallel_size": 2}, {}, {"ddp": FSDP2}]
)
def test_adapters_are_merged_after_training(tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(2, _merged_after_training, str(tmp_path), options)


def _train_on_the_middle_stage() -> list[tuple[float, float]]:
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "E|tt|L"}
    state = _adapted(num_layers=2, **stages)
    adapters = [name for chunk in state.chunks for name, _ in chunk.named_parameters() if "_lora." in name]
    assert bool(adapters) == (state.groups.pp.rank() == 1)
    return train(state, text_loader(state), 3)


def test_a_stage_without_layers_needs_no_adapters() -> None:
    first, *others = run_ranks(3, _train_on_the_middle_stage)
    assert others == [first, first]
    assert first[2][0] < first[0][0]


def _refusals() -> None:
    config = small_config()
    groups = minloop.init_distributed(config, seed=1)
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_sequence_length": 32}
    with pytest.raises(ValueError, match="the model has no layers linear_other"):
        minloop.build_gpt_model(config, groups, before_wrapping=minloop.lora(targets=["linear_other"]), **options)
    with pytest.raises(ValueError, match=r"rank \(0\)"):
        minloop.lora(rank=0)
    with pytest.raises(ValueError, match="decoder is a TransformerBlock: adapters are for column and row parallel"):
        minloop.build_gpt_model(config, groups, before_wrapping=minloop.lora(targets=["decoder"]), **options)
    experts: dict[str, Any] = {"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    shared = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "no layers linear_fc1 outside experts"),
        (shared, "linear_fc1 of shared experts does not communicate"),
    ]
    for fields, match in refused:
        with pytest.raises(ValueError, match=match):
            small_state(gpt={"before_wrapping": minloop.lora(targets=["linear_fc1"])}, **experts, **fields)
    config.use_transformer_engine_op_fuser = True
    with pytest.raises(ValueError, match="use_transformer_engine_op_fuser=True passes linear layers by"):
        minloop.build_gpt_model(config, groups, before_wrapping=minloop.lora(), **options)
    minloop.shutdown_distributed()


def test_layers_without_adapters_are_refused() -> None:
    run_ranks(1, _refusals)


class _Normed(ColumnParallelLinear):
    """What Transformer Engine's layer with a norm in it, as mcore wraps it, is to an adapter; TE itself needs a GPU."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=bias, skip_bias_add=True, **kwargs)
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32).cuda())
        self.return_layernorm_output = False

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = torch.nn.functional.rms_norm(input_, (32,), self.gain)
        out, bias = super().forward(normed)
        if not self.return_layernorm_output:
            return out, bias
        return ((out, normed), None) if bias is None else (out, bias, normed)


def _after_a_norm(sequence_parallel: bool, bias: bool) -> None:
    layout: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    config = small_config(gradient_accumulation_fusion=False, **layout)
    groups = minloop.init_distributed(config, seed=1)
    COLUMN.append(_Normed)
    NORMED.append(_Normed)
    options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.xavier_uniform_, "gather_output": False}
    fused = _Normed(32, 64, bias=bias, tp_group=groups.tp, **options)
    plain = ColumnParallelLinear(32, 64, bias=bias, skip_bias_add=True, tp_group=groups.tp, **options)
    plain.load_state_dict({name: value for name, value in fused.state_dict().items() if name != "gain"})
    adapters = [LoRA(linear, 4, 16.0, gated=False) for linear in (fused, plain)]
    torch.nn.init.normal_(adapters[0].b)
    adapters[1].load_state_dict(adapters[0].state_dict())
    generator = torch.Generator().manual_seed(groups.tp.rank() if sequence_parallel else 7)
    inputs = [torch.randn(8, 2, 32, generator=generator).cuda().requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    outputs = fused(inputs[0]), plain(torch.nn.functional.rms_norm(inputs[1], (32,), fused.gain.detach()))
    for (out, given), value, adapter in zip(outputs, inputs, adapters, strict=True):
        assert (given is None) == (not bias)
        out.square().sum().backward()
        assert value.grad is not None
        assert adapter.a.grad is not None
        assert adapter.a.grad.abs().max() > 0
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for one, other in zip(*(adapter.parameters() for adapter in adapters), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    minloop.shutdown_distributed()


@pytest.mark.parametrize(("sequence_parallel", "bias"), [(False, True), (True, False)])
def test_an_adapter_sees_what_a_norm_within_its_layer_makes(sequence_parallel: bool, bias: bool) -> None:
    run_ranks(2, _after_a_norm, sequence_parallel, bias)


def _merged_on_gpu(directory: str, options: dict[str, Any]) -> torch.Tensor:
    state = _adapted(directory, **options)
    layers = [
        type(module).__name__ for chunk in state.chunks for module in chunk.modules() if hasattr(module, "weight")
    ]
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= set(layers)
    tokens = torch.arange(64).reshape(2, 32) % VOCAB_SIZE
    adapted = minloop.forward_logits(state, tokens)
    minloop.merge_lora(state.chunks)
    merged = minloop.forward_logits(state, tokens)
    torch.testing.assert_close(merged, adapted, rtol=1e-2, atol=1e-2)
    minloop.load_weights(directory, state)
    assert (minloop.forward_logits(state, tokens) - adapted).abs().max() > 0.1
    minloop.shutdown_distributed()
    return merged.cpu()


@pytest.mark.gpu
def test_adapters_of_transformer_engines_layers_are_those_of_local_ones(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine", reason="these are its layers")
    run_ranks(1, _save_base, str(tmp_path), **WIDE)
    ((expected, _),) = run_ranks(1, _train, str(tmp_path), {**WIDE, "transformer_impl": "local"})
    layouts: list[dict[str, Any]] = [
        {},
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "ddp": {"use_distributed_optimizer": True}},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "gradient_accumulation_fusion": True},
    ]
    logits: list[torch.Tensor] = []
    for options in layouts:
        ranks = options.get("tensor_model_parallel_size", 1)
        options = {**WIDE, "transformer_impl": "transformer_engine", **options}
        for results, _ in run_ranks(ranks, _train, str(tmp_path), options):
            torch.testing.assert_close(torch.tensor(results), torch.tensor(expected), rtol=2e-2, atol=1e-3)
        logits += run_ranks(ranks, _merged_on_gpu, str(tmp_path), options)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=2e-2, atol=2e-2)
