"""LoRA adapters: only they train, alike in every layout; merged, saved alone and loaded back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small import VOCAB_SIZE, small_config, small_state, text_loader, train

import minloop

ADAPTERS = ["*_lora.*"]


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


def _save_base(directory: str) -> None:
    state = small_state(gated_linear_unit=True)
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
            torch.testing.assert_close(torch.tensor(results), torch.tensor(expected), rtol=1e-5, atol=1e-5)
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


def test_adapters_are_merged_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(2, _merge_and_load, str(tmp_path))


def _refusals() -> None:
    config = small_config()
    groups = minloop.init_distributed(config, seed=1)
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_sequence_length": 32}
    with pytest.raises(ValueError, match="the model has no layers linear_other"):
        minloop.build_gpt_model(config, groups, before_wrapping=minloop.lora(targets=["linear_other"]), **options)
    with pytest.raises(ValueError, match=r"rank \(0\)"):
        minloop.lora(rank=0)
    with pytest.raises(ValueError, match="decoder is a TransformerBlock: adapters are for mcore's own linear layers"):
        minloop.build_gpt_model(config, groups, before_wrapping=minloop.lora(targets=["decoder"]), **options)
    minloop.shutdown_distributed()


def test_layers_without_adapters_are_refused() -> None:
    run_ranks(1, _refusals)
