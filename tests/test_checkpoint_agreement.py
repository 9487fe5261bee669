"""What ranks, runs and other tools do to a checkpoint at the same time: one outcome on all ranks, nothing lost."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small import failure_of, small_state, text_loader, train

import minloop
from minloop.checkpoint import directory as tree

SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2}


class Position:
    def __init__(self, position: Any) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return {"at": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["at"]


def save_what_differs(directory: str) -> list[str]:
    state, rank = small_state(**SMALL), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    torch.rand(100 + rank, generator=generator)
    middle = torch.arange(2000) + (torch.arange(2000) == 1000) * rank
    digits = torch.tensor(1.0 + rank * 2**-20, dtype=torch.float64)  # prints like 1.0
    differing = [generator.get_state(), middle, digits, [1, {"deep": middle}], torch.zeros(2, 3 + rank)]
    said = [failure_of(minloop.save_checkpoint, directory, state, Position(value)) for value in differing]
    same = {"nan": torch.tensor([float("nan")]), "half": torch.ones(3, dtype=torch.bfloat16), "set": {1, 2}}
    said.append(failure_of(minloop.save_checkpoint, directory, state, Position(same)))
    minloop.shutdown_distributed()
    return said


def test_tensors_of_loaders_are_compared_whole(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_what_differs, str(tmp_path))
    assert first == second
    assert all("ValueError: " in said and "loaders.train.at" in said for said in first[:-1])
    assert first[-1] == "no error"


def add_nothing(module: torch.nn.Module) -> None:
    module.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3)))


def save_without_elements(directory: str) -> str:
    said = failure_of(minloop.save_checkpoint, directory, small_state(gpt={"before_wrapping": add_nothing}, **SMALL))
    assert not [*Path(directory).iterdir()]
    minloop.shutdown_distributed()
    return said


def test_what_mcore_finds_on_the_first_rank_all_raise(tmp_path: Path) -> None:
    for said in run_ranks(2, save_without_elements, str(tmp_path), timeout=60):
        assert said.startswith("ValueError: nothing has no elements, [0, 3]")


def test_a_state_torn_by_an_interrupt_is_not_saved(tmp_path: Path) -> None:
    state = small_state(**SMALL)
    loader = text_loader(state)
    train(state, loader, 1)
    minloop.save_checkpoint(tmp_path, state, loader)
    step = type(state.optimizer).step

    def interrupted(self: Any) -> None:
        step(self)
        raise KeyboardInterrupt

    with mock.patch.object(type(state.optimizer), "step", interrupted), pytest.raises(KeyboardInterrupt):
        train(state, loader, 1)
    with pytest.raises(RuntimeError, match="the step after iteration 1 ended in its midst"):
        minloop.save_checkpoint(tmp_path, state, loader)
    minloop.load_checkpoint(tmp_path, state, loader)
    train(state, loader, 1)
    assert minloop.save_checkpoint(tmp_path, state, loader).name == "iter_0000002"
    minloop.shutdown_distributed()


@pytest.mark.parametrize("name", ["iter_00000001", "iter_0000000001", "iter_٠٠٠٠٠٠١"])
def test_directories_of_other_names_hide_nothing(tmp_path: Path, name: str) -> None:
    for path in (tree.iteration_directory(tmp_path, 1), tmp_path / f"iter_0000001{tree.REPLACED}"):
        path.mkdir()
        for needed in tree.NEEDED:
            (path / needed).touch()
    (tmp_path / name).mkdir()
    assert tree.complete_checkpoints(tmp_path) == {1: tmp_path / "iter_0000001"}
    (tmp_path / "iter_0000001" / tree.NEEDED[0]).unlink()  # cut short while it replaced the other
    assert tree.complete_checkpoints(tmp_path) == {1: tmp_path / f"iter_0000001{tree.REPLACED}"}
    assert [*tree.complete_checkpoints(tmp_path / "none")] == []


def test_what_another_run_replaces_meanwhile_is_looked_for_again(tmp_path: Path) -> None:
    state = small_state(**SMALL)
    for state.iteration in (1, 2):
        minloop.save_checkpoint(tmp_path / str(state.iteration), state)
    shutil.move(tmp_path / "1" / "iter_0000001", tmp_path / "run" / "iter_0000001")
    mark = tree.mark_in_use

    def replaced(path: Path) -> None:
        if path.name == "iter_0000001":
            shutil.move(tmp_path / "2" / "iter_0000002", tmp_path / "run" / "iter_0000002")
            shutil.rmtree(path)
        mark(path)

    with mock.patch.object(tree, "mark_in_use", replaced):
        assert minloop.load_checkpoint(tmp_path / "run", state).name == "iter_0000002"
    minloop.shutdown_distributed()


def load_if_there_is_one(directory: str) -> list[str]:
    state = small_state(**SMALL)
    run = Path(directory, "run")
    found = [minloop.load_checkpoint(run, state, missing_ok=True), minloop.save_checkpoint(run, state)]
    blind = mock.patch.object(tree, "latest_checkpoint", return_value=None)  # asked, it would say None
    with blind if dist.get_rank() else mock.MagicMock():
        found.append(minloop.load_checkpoint(run, state, missing_ok=True))
    incomplete = run / "iter_0000009"
    if dist.get_rank() == 0:
        incomplete.mkdir()
    dist.barrier()
    said = failure_of(minloop.load_checkpoint, incomplete, state, missing_ok=True)
    minloop.shutdown_distributed()
    return [*(path.name if path else "none" for path in found), said]


def test_all_ranks_load_or_none_does(tmp_path: Path) -> None:
    for none, saved, loaded, said in run_ranks(2, load_if_there_is_one, str(tmp_path)):
        assert (none, saved, loaded) == ("none", "iter_0000000", "iter_0000000")
        assert said.startswith("FileNotFoundError: ")
        assert "iter_0000009 is incomplete" in said


def test_checkpoints_that_are_all_damaged_are_not_none(tmp_path: Path) -> None:
    state = small_state(**SMALL)
    saved = minloop.save_checkpoint(tmp_path, state)
    shard = max(saved.glob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(minloop.CheckpointError, match=r"none of 1 checkpoints in .* is sound; of the oldest: "):
        minloop.latest_checkpoint(tmp_path)
    minloop.shutdown_distributed()
