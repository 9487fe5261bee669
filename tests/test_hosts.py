"""Hosts that own processes, default group and loop train what the main loop trains, bit for bit; a policy learns."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
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


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Hosts set variables in the process that starts theirs, which must not reach other tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize("layout", LAYOUTS, ids=["TP2", "PP2"])
@pytest.mark.usefixtures("own_environment")
def test_hosts_train_what_the_main_loop_trains(layout: dict[str, Any], tmp_path: Path) -> None:
    expected = run_ranks(2, _losses_of_the_main_loop, layout)
    assert expected[0] == expected[1] == sorted(expected[0], reverse=True)
    assert run_ranks(2, _hugging_face_loop, layout) == expected
    # their processes import everything anew, and take a GPU each
    if layout == LAYOUTS[0] and torch.cuda.device_count() != 1:
        assert example("multiprocessing_host").main(train_iters=4, **layout) == expected[0]
        assert example("fabric_host").main(train_iters=4, directory=str(tmp_path), **layout) == expected[0]
        assert list(tmp_path.rglob("metrics.csv"))


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs a GPU for each of two workers")
@pytest.mark.slow  # most of it is the start of Ray's processes, each of which imports pandas and pyarrow
@pytest.mark.usefixtures("own_environment")
def test_ray_train_trains_what_the_main_loop_trains(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="it is the host; the dev dependencies have it")
    ray_host, layout = example("ray_host"), LAYOUTS[0]
    # workers import the function that they run
    os.environ |= {"PYTHONPATH": str(EXAMPLES / "hosts"), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # one process less
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    try:
        losses = ray_host.main(train_iters=4, storage_path=str(tmp_path), **layout)
    finally:
        ray.shutdown()
    assert losses == run_ranks(2, _losses_of_the_main_loop, layout)[0]


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
