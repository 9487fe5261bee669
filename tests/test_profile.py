"""Profiles: of the steps and on the ranks that were asked, and of no others."""

import json
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from small import SEQUENCE_LENGTH, small_state, text_loader, train

import minloop


def profiled(directory: str) -> None:
    state = small_state(tensor_model_parallel_size=2)
    loader = text_loader(state)
    with minloop.profiled_steps(state, directory, steps=range(1, 3), ranks=[1]) as before_step:
        for _ in range(4):
            before_step()
            train(state, loader, 1)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(ValueError, match="tool='nsys' profiles a GPU"),
        minloop.profiled_steps(state, directory, steps=range(9), tool="nsys"),
    ):
        pass
    unknown: Any = "nsight"
    with (
        pytest.raises(ValueError, match="'nsight' is neither 'torch' nor 'nsys'"),  # on ranks that profile nothing, too
        minloop.profiled_steps(state, directory, steps=range(9), tool=unknown),
    ):
        pass
    minloop.shutdown_distributed()


def test_the_steps_asked_are_profiled_on_the_rank_asked(tmp_path: Path):
    run_ranks(2, profiled, str(tmp_path))
    written = {path.name for path in tmp_path.iterdir()} - {"rank1.memory.pickle"}  # that of a GPU
    assert written == {"rank1.kernels.txt", "rank1.trace.json"}
    trace: Any = json.loads((tmp_path / "rank1.trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert {name for name in names if name.startswith("iteration ")} == {"iteration 1", "iteration 2"}
    assert "aten::addmm" in names or "aten::mm" in names
    assert "Self CPU" in (tmp_path / "rank1.kernels.txt").read_text()


def never_profiled(directory: str) -> None:
    state = small_state()
    with minloop.profiled_steps(state, directory, steps=range(100, 102)) as before_step:
        before_step()
        train(state, text_loader(state), 1)
    state.iteration = 60
    with minloop.profiled_steps(state, directory, steps=range(50, 52)) as before_step:  # an earlier process did
        before_step()
    with pytest.raises(ValueError, match=r"ranks \[1\] are none of this run's, which are 0 to 0"):
        minloop.profiled_steps(state, directory, steps=range(9), ranks=[0, 1]).__enter__()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with minloop.profiled_steps(state, directory, steps=range(60, 61)) as before_step:
        before_step()
        train(state, text_loader(state), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # what a full disk is to the files
        before_step()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        train(state, text_loader(state), 1)
    minloop.shutdown_distributed()


def test_a_profile_that_does_not_come_about_is_said_and_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_ranks(1, never_profiled, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    said = capfd.readouterr()
    assert "nothing was profiled: the run came by no step of range(100, 102)" in said.out + said.err
    assert "range(50, 52)" not in said.out + said.err
    for name in ("rank0.trace.json", "rank0.kernels.txt"):
        assert f"{name} could not be written, training goes on without it: " in said.out + said.err


def on_a_gpu(directory: str) -> dict[str, float]:
    state = small_state()
    loader, timer = text_loader(state), minloop.StepTimer(state, sequence_length=SEQUENCE_LENGTH)
    for tool in ("torch", "nsys"):
        with minloop.profiled_steps(state, directory, steps=range(100), tool=tool) as before_step:
            before_step()
            train(state, loader, 50)
    lap = timer.lap()
    minloop.shutdown_distributed()
    return lap


@pytest.mark.gpu
def test_a_gpus_memory_and_energy_are_told(tmp_path: Path):
    (lap,) = run_ranks(1, on_a_gpu, str(tmp_path))
    assert sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir()) == [
        "kernels.txt", "memory.pickle", "trace.json"
    ]  # fmt: skip
    assert "Self CUDA" in (tmp_path / "rank0.kernels.txt").read_text()
    assert lap["mem-reserved-bytes"] >= lap["mem-allocated-bytes"] > 0
    assert lap["power/gpu"] > 10
