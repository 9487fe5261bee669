"""Checkpoints in odd circumstances: what could not be loaded is not saved, and what fails leaves nothing changed."""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small import failure_of, small_state, text_loader, train
from torch.distributed.checkpoint.metadata import Metadata

import minloop
from minloop.checkpoint import commit, content, load
from minloop.checkpoint import directory as tree
from minloop.checkpoint.reading import SavedCheckpoint

LAYOUT: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2}


def damage(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)


class Position:
    """A loader that has whatever position it is given."""

    def __init__(self, position: Any) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return self.position() if callable(self.position) else self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


def gone() -> dict[str, int]:
    if dist.get_rank() == 1:
        raise OSError("the data are gone")
    return {"at": 1}


def save_odd_positions(directory: str) -> list[str]:
    state = small_state(**LAYOUT, lr=numpy.float64(1e-3), init_method_std=numpy.float64(0.02))
    odd = [{"at": Path}, {"at": [gone]}, gone, {"at": dist.get_rank()}, numpy.arange(3)]
    failures = [failure_of(minloop.save_checkpoint, directory, state, Position(position)) for position in odd]
    failures += [failure_of(minloop.save_checkpoint, directory, state, keep_newest=kept) for kept in (1.5, True)]
    state.iteration = dist.get_rank()
    failures.append(failure_of(minloop.save_checkpoint, directory, state))
    assert not os.path.lexists(directory)  # found before anything is written
    state.iteration, state.optimizer.param_groups[0]["lr"] = numpy.int64(3), numpy.float64(0.5)  # pyright: ignore[reportAttributeAccessIssue]: a user's slip
    for position in ({"at": numpy.int64(7), "rates": [(numpy.float32(0.5), float("nan"))]}, [1, 2]):
        minloop.save_checkpoint(directory, state, {"x": Position(position)})
        loaded = Position(None)
        minloop.load_checkpoint(directory, state, {"x": loaded})
        assert repr(loaded.position) in ("{'at': 7, 'rates': [(0.5, nan)]}", "[1, 2]")
    assert type(state.iteration) is int
    minloop.shutdown_distributed()
    return failures


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    failures, others = run_ranks(2, save_odd_positions, str(tmp_path / "run"))
    assert failures == others
    known, local, lost, differs, array, half, truth, counted = failures
    assert "ValueError: loaders.train.at is a builtins.type: this could not be loaded again" in known
    assert "loaders.train.at[0] is a builtins.function" in local
    assert lost == "RuntimeError: on rank 1: OSError: the data are gone"
    assert "loaders.train.at: 0 on rank 0, 1 here" in differs
    assert "into one state_dict of the loader" in differs
    assert "iteration: 0 on rank 0, 1 here" in counted
    assert counted.endswith("every rank takes the same steps, and sets the state's counters alike")
    assert "numpy.ndarray" in array
    assert "keep_newest=1.5: a whole number" in half
    assert "keep_newest=True" in truth


def save_among_links(directory: str) -> list[list[str]]:
    state, run, names = small_state(**LAYOUT), Path(directory, "run"), list[list[str]]()

    def save(iteration: int) -> None:
        state.iteration = iteration
        minloop.save_checkpoint(run, state, keep_newest=2)
        names.append(sorted(path.name.removeprefix("iter_000000") for path in run.glob("iter*")))

    def move(iteration: int) -> None:
        shutil.move(run / f"iter_000000{iteration}", f"{directory}/moved{iteration}")
        (run / f"iter_000000{iteration}").symlink_to(f"../moved{iteration}")

    save(1)
    save(2)
    move(1)
    save(3)  # deletes the link to 1
    move(3)
    save(3)
    (run / "iter_0000004").symlink_to("nowhere")
    (run / "iter_0000009.unfinished").write_text("a file")
    save(4)
    minloop.shutdown_distributed()
    return names


def test_links_in_the_place_of_checkpoints_stop_no_save(tmp_path: Path) -> None:
    (names,) = run_ranks(1, save_among_links, str(tmp_path))
    assert names == [["1"], ["1", "2"], ["2", "3"], ["2", "3"], ["3", "4"]]
    assert minloop.verify_checkpoint(tmp_path / "moved1") == []
    assert minloop.verify_checkpoint(tmp_path / "moved3") == []


def save_without_room_for_the_tracker(directory: str) -> str:
    os.chdir(directory)
    state = small_state(**LAYOUT)
    first = minloop.save_checkpoint("iter_0000001_again", state)  # a run's directory that is named like a checkpoint
    assert first == Path(directory, "iter_0000001_again", "iter_0000000")
    state.iteration = 1
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(commit, "write_durably", side_effect=full):
        failed = failure_of(minloop.save_checkpoint, "iter_0000001_again", state, keep_newest=1)
    assert minloop.latest_checkpoint(first.parent) == first
    assert minloop.load_checkpoint("iter_0000001_again", state) == first.relative_to(directory)
    state.iteration = 1
    pending = minloop.start_save("iter_0000001_again", state, keep_newest=1)
    os.chdir("/")  # while it is written
    pending.wait()
    assert minloop.latest_checkpoint(first.parent) == first.with_name("iter_0000001") == pending.directory
    minloop.shutdown_distributed()
    return failed


def test_full_at_the_tracker_and_elsewhere_in_the_end(tmp_path: Path) -> None:
    (failed,) = run_ranks(1, save_without_room_for_the_tracker, str(tmp_path))
    assert failed == "RuntimeError: on rank 0: OSError: [Errno 28] No space left on device"


def load_and_fail(directory: str) -> list[str]:
    state = small_state(**LAYOUT, hidden_dropout=0.1)
    loader = text_loader(state)
    train(state, loader, 1)
    streams = content.rng_streams()
    size = 5056 if torch.cuda.is_available() else 16  # of the other kind's generators
    of_another = {"cuda_rng_state": torch.zeros(size, dtype=torch.uint8), "rng_tracker_states": {}}
    with mock.patch.object(content, "rng_streams", return_value=streams | of_another):
        minloop.save_checkpoint(directory, state, loader)
    minloop.load_checkpoint(directory, state, loader)  # on another kind of device
    messages = [failure_of(minloop.load_checkpoint, directory, state, {"train": loader, "other": loader})]
    loader.load_state_dict(before := loader.state_dict() | {"consumed_samples": 16})
    with mock.patch.object(content, "are_of_this_device", side_effect=ValueError("late")):
        messages.append(failure_of(minloop.load_checkpoint, directory, state, loader))
    assert loader.state_dict() == before
    minloop.shutdown_distributed()
    return messages


@pytest.fixture(scope="module")
def failures_and_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    run = tmp_path_factory.mktemp("odd") / "run"
    return run_ranks(1, load_and_fail, str(run))[0], run


def test_a_load_that_fails_leaves_loaders_where_they_were(failures_and_run: tuple[list[str], Path]) -> None:
    unknown, late = failures_and_run[0]
    assert "no position of a loader called 'other'" in unknown
    assert late == "ValueError: late"


def test_a_directory_of_checkpoints_is_none_and_damage_is_not_exported(
    failures_and_run: tuple[list[str], Path],
) -> None:
    run = failures_and_run[1]
    assert "is no checkpoint but holds some" in minloop.verify_checkpoint(run)[0]
    with pytest.raises(FileNotFoundError, match="name one of them"):
        minloop.read_run_config(run)
    checkpoint = run / "iter_0000001"
    shard = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    damage(shard)
    with pytest.raises(minloop.CheckpointError, match="is not what was saved"):
        minloop.export_weights(run, run / "exported")
    assert not (run / "exported").exists()


def test_a_newest_that_is_gone_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (1, 2):
        run = tree.iteration_directory(tmp_path, iteration)
        run.mkdir()
        (run / "metadata.json").touch()
    (tree.iteration_directory(tmp_path, 1) / ".metadata").touch()
    (tmp_path / tree.TRACKER).write_text("2")
    with caplog.at_level(logging.WARNING, "minloop"):
        assert tree.candidates(tmp_path) == [tmp_path / "iter_0000001"]
    assert "iter_0000002 is damaged (it lacks .metadata)" in caplog.text
    assert "iter_0000001 is tried in its place" in caplog.text
    (tmp_path / tree.TRACKER).write_text("9" * 5000)
    assert tree.candidates(tmp_path) == [tmp_path / "iter_0000001"]


def test_latest_looks_again_if_what_it_found_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(iteration: int) -> Path:
        run = tree.iteration_directory(tmp_path, iteration)
        run.mkdir()
        for name in tree.NEEDED:
            (run / name).touch()
        return run

    def faults(path: Path) -> list[str]:
        if path.name == "iter_0000001":  # the run saves the next one and deletes this one
            make(2)
            shutil.rmtree(path)
            return ["gone"]
        return []

    make(1)
    with mock.patch.object(tree, "structural_faults", faults), caplog.at_level(logging.WARNING, "minloop"):
        assert tree.latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert not caplog.text


def test_the_newest_sound_one_is_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(**LAYOUT)
    loader = text_loader(state)
    for _ in range(2):
        train(state, loader, 1)
        minloop.save_checkpoint(tmp_path, state, loader)
    newest = tmp_path / "iter_0000002"
    damage(max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size))
    with caplog.at_level(logging.WARNING, "minloop"):
        assert minloop.export_weights(tmp_path, tmp_path / "exported").exists()
        minloop.load_checkpoint(tmp_path, state)
    assert "iter_0000001 is tried in its place" in caplog.text
    assert "holds positions of loaders that were not given, train: their data begin anew" in caplog.text
    with pytest.raises(minloop.CheckpointError, match=f"or {tmp_path}, of which the newest sound one is taken"):
        minloop.load_checkpoint(newest, state, loader)
    with pytest.raises(TypeError, match="the loader 'train' is a list_iterator without state_dict"):
        minloop.save_checkpoint(tmp_path / "more", state, iter([]))  # pyright: ignore[reportArgumentType]
    damage(max((tmp_path / "iter_0000001").glob("*.distcp"), key=lambda file: file.stat().st_size))
    with pytest.raises(minloop.CheckpointError, match=r"none of 2 checkpoints in .* is sound; of the oldest: "):
        minloop.load_checkpoint(tmp_path, state, loader)
    minloop.shutdown_distributed()


@pytest.mark.parametrize("counters", [{"iteration": -2}, {"iteration": True}, {"consumed_samples": "16"}])
def test_counters_that_are_none_are_refused(counters: dict[str, Any]) -> None:
    found = {"iteration": 2, "consumed_samples": 16} | counters
    opened = SavedCheckpoint(Path("run/iter_0000002"), Metadata({}), {"iteration": found["iteration"]})
    name, value = next(iter(counters.items()))
    with pytest.raises(minloop.CheckpointError, match=f"{name}={value!r}, no count"):
        load._check_counters(opened, found)
