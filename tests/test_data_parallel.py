"""What gradients are summed and counted by: one config of all chunks, and marks of weights that nothing initialised."""

import copy
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small import shared_state, small_config, text_loader, train

import minloop


def chunks_of_two_configs() -> None:
    config = small_config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    groups = minloop.init_distributed(config, seed=1)
    ddp_config = minloop.build_ddp_config(config)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=32)
    wrapped: list[Any] = [*minloop.wrap_ddp(chunks, ddp_config, groups)]
    optimizer = minloop.build_optimizer(wrapped, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    wrapped[1].config = copy.deepcopy(wrapped[1].config)
    with pytest.raises(RuntimeError, match="the chunks hold different config objects"):
        minloop.TrainState(wrapped, optimizer, None, config, groups)
    minloop.shutdown_distributed()


def test_chunks_share_one_config() -> None:
    run_ranks(2, chunks_of_two_configs)


def steps_from(directory: str, first: bool, perform_initialization: bool) -> list[tuple[float, float]]:
    options: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "perform_initialization": perform_initialization,
        "num_layers": 2,
    }
    state = shared_state(directory, first, **options)
    history = train(state, text_loader(state), 2)
    minloop.shutdown_distributed()
    return history


def test_weights_that_were_not_initialised_count_alike(tmp_path: Path) -> None:
    expected = run_ranks(2, steps_from, str(tmp_path), True, True)
    assert run_ranks(2, steps_from, str(tmp_path), False, False) == expected
