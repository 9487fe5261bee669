"""Optimizers beside training: a state for evaluation alone needs one, which then holds nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small import SEQUENCE_LENGTH, VOCAB_SIZE, small_config, small_state, text_loader, train

import minloop
from minloop.data_parallel import reduced_gradients

KINDS: dict[str, dict[str, Any]] = {
    "DDP bf16": {"bf16": True},
    "ZeRO-1": {"ddp": {"use_distributed_optimizer": True}},
    "Megatron FSDP": {
        "ddp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    },
    "FSDP2": {"ddp": {"reshard_after_forward": True}},
}


def freeze(module: torch.nn.Module) -> None:
    module.requires_grad_(False)


def evaluate_frozen(directory: str) -> dict[str, tuple[float, float, int]]:
    """Losses of a trained state and of a frozen one that loaded its weights; bytes of the latter's training."""
    found: dict[str, tuple[float, float, int]] = {}
    for kind, options in KINDS.items():
        state = small_state(num_layers=2, **options)
        train(state, text_loader(state), 1)
        minloop.save_checkpoint(f"{directory}/{kind}", state)
        trained = minloop.eval_step(state, text_loader(state), num_microbatches=2).loss.item()
        minloop.shutdown_distributed()
        state = small_state(seed=99, num_layers=2, gpt={"before_wrapping": freeze}, **options)
        minloop.load_checkpoint(f"{directory}/{kind}", state, weights_only=True)
        loaded = minloop.eval_step(state, text_loader(state), num_microbatches=2).loss.item()
        held = [
            *reduced_gradients(state.chunks),
            *(p for group in state.optimizer.param_groups for p in group["params"]),
        ]
        found[kind] = trained, loaded, sum(tensor.nbytes for tensor in held)
        minloop.shutdown_distributed()
    return found


def test_a_frozen_model_is_evaluated_without_memory_for_training(tmp_path: Path) -> None:
    for kind, (trained, loaded, held) in run_ranks(2, evaluate_frozen, str(tmp_path))[0].items():
        assert (loaded, held) == (trained, 0), kind


def state_without_optimizer() -> None:
    config = small_config()
    groups = minloop.init_distributed(config, seed=1)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=SEQUENCE_LENGTH)
    wrapped, none = minloop.wrap_ddp(chunks, minloop.build_ddp_config(config), groups), None
    with pytest.raises(TypeError, match=r"needs an optimizer, for evaluation alone, too: use build_optimizer; freeze"):
        minloop.TrainState(wrapped, none, None, config, groups)  # pyright: ignore[reportArgumentType]
    minloop.shutdown_distributed()


def test_a_state_without_optimizer_says_what_evaluation_needs() -> None:
    run_ranks(1, state_without_optimizer)
