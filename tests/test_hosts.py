"""Hosts that own processes, default group and loop train what the main loop trains, bit for bit; a policy learns."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

import minloop

EXAMPLES = Path(__file__).parent.parent / "examples"
LAYOUTS: list[dict[str, Any]] = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]


def example(name: str) -> Any:
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "hosts")]
    return importlib.import_module(name)


def _losses_of_the_main_loop(layout: dict[str, Any]) -> list[float]:
    state = example("train").build(256, 64, seed=1234, **layout)
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=256)
    loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4, vocab_size=256)
    losses = [minloop.train_step(state, loader, num_microbatches=4).loss.item() for _ in range(4)]
    minloop.shutdown_distributed()
    return losses


def _hugging_face_loop(layout: dict[str, Any]) -> list[float]:
    return example("hugging_face_loop").main(**layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["TP2", "PP2"])
def test_hosts_train_what_the_main_loop_trains(layout: dict[str, Any]) -> None:
    expected = run_ranks(2, _losses_of_the_main_loop, layout)
    assert expected[0] == expected[1] == sorted(expected[0], reverse=True)
    assert run_ranks(2, _hugging_face_loop, layout) == expected
    if layout == LAYOUTS[0]:  # its processes import everything anew
        assert example("multiprocessing_host").main(train_iters=4, **layout) == expected[0]


def _policy_gradient(layout: dict[str, Any]) -> list[float]:
    return example("policy_gradient").main(steps=12, **layout)


def test_the_reward_of_a_policy_rises() -> None:
    (tensor, other), (pipeline, _) = (run_ranks(2, _policy_gradient, layout) for layout in LAYOUTS)
    assert tensor == other
    for rewards in (tensor, pipeline):
        assert sum(rewards[:3]) / 3 < 0.35
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def _rl_worker(directory: str, layout: dict[str, Any]) -> tuple[dict[str, float], list[float], int]:
    return example("rl_worker").main(directory, **layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["TP2", "PP2"])
def test_the_worker_of_an_rl_engine_does_what_its_controller_asks(layout: dict[str, Any], tmp_path: Path) -> None:
    (metrics, apart, sent), (other_metrics, _, nothing) = run_ranks(2, _rl_worker, str(tmp_path), layout)
    assert metrics == other_metrics
    before, updated, loaded = apart  # of actor and reference
    assert max(before, loaded) < 1e-5
    assert updated > 1e-3
    assert sent > 50_000
    assert nothing == 0
