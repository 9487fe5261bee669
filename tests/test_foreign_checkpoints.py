"""Checkpoints of other formats are named, with what reads them, and never taken for none; nor ours for one of them."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from small import failure_of, small_state
from torch.distributed.checkpoint.state_dict_saver import save

import minloop
from minloop.checkpoint.directory import NEEDED, TRACKER, iteration_directory
from minloop.checkpoint.foreign import foreign_format

SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2}


def legacy(path: Path) -> None:
    (path / "mp_rank_00").mkdir(parents=True)
    torch.save({"iteration": 5}, path / "mp_rank_00" / "model_optim_rng.pt")


def plain(path: Path) -> None:
    save({"weight": torch.ones(3)}, checkpoint_id=path, no_dist=True)


def zarr(path: Path) -> None:
    (path / "decoder.weight").mkdir(parents=True)
    (path / "decoder.weight" / ".zarray").write_text("{}")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    torch.save({}, path / "common.pt")


def hugging_face(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"weight": torch.ones(3)}, path / "model.safetensors")


FORMATS: dict[str, tuple[Callable[[Path], None], str]] = {
    "legacy": (legacy, "is a checkpoint in the legacy format 'torch', which only Megatron-LM reads: load it there"),
    "plain": (plain, "is a checkpoint of torch.distributed.checkpoint without mcore's metadata.json"),
    "zarr": (zarr, "is a checkpoint in the format 'zarr' of older mcore"),
    "hugging_face": (hugging_face, "holds weights of Hugging Face's (config.json, *.safetensors): load_hf_weights"),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each format a run's directory whose tracker names a checkpoint of it, and one with converted weights."""
    root = tmp_path_factory.mktemp("theirs")
    for name, (make, _) in FORMATS.items():
        make(root / name / "iter_0000005")
        (root / name / TRACKER).write_text("5")
        shutil.copytree(root / name / "iter_0000005", root / f"{name} converted" / "release")
        (root / f"{name} converted" / TRACKER).write_text("release")
    return root


def places(root: Path, name: str) -> dict[Path, Path]:
    """What a run may be pointed at, and the checkpoint that this means."""
    own, converted = root / name / "iter_0000005", root / f"{name} converted"
    return {own: own, own.parent: own, converted: converted / "release"}


def failures(root: str) -> dict[str, list[str]]:
    state, found = small_state(**SMALL), dict[str, list[str]]()
    for name in FORMATS:
        for path in places(Path(root), name):
            found[str(path)] = [
                failure_of(minloop.load_checkpoint, path, state),
                failure_of(minloop.load_checkpoint, path, state, missing_ok=True),
                failure_of(minloop.load_weights, path, state),
            ]
    dist.barrier()
    minloop.shutdown_distributed()
    return found


def test_a_run_pointed_at_another_format_is_told_which(theirs: Path) -> None:
    first, second = run_ranks(2, failures, str(theirs))
    assert first == second
    for name, (_, message) in FORMATS.items():
        for path, meant in places(theirs, name).items():
            for said in first[str(path)]:
                assert said.startswith(f"CheckpointError: {meant} {message}"), said


@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_are_named_without_a_group(theirs: Path, tmp_path: Path, name: str) -> None:
    message = FORMATS[name][1]
    for path, meant in places(theirs, name).items():
        expected = f"CheckpointError: {meant} {message}"
        assert failure_of(minloop.latest_checkpoint, path).startswith(expected)
        assert failure_of(minloop.describe_checkpoint, path).startswith(expected)
        assert failure_of(minloop.export_weights, path, tmp_path).startswith(expected)
    (fault,) = minloop.verify_checkpoint(theirs / name / "iter_0000005")
    assert message in fault


@pytest.mark.parametrize("name", ["legacy", "plain", "zarr"])
def test_hugging_faces_calls_name_other_formats(theirs: Path, name: str) -> None:
    said = failure_of(minloop.hf_config_fields, theirs / name / "iter_0000005")
    assert said.startswith("FileNotFoundError: ")
    assert f"config.json is missing: {theirs / name / 'iter_0000005'} is a checkpoint" in said


def hugging_faces_calls(path: str) -> list[str]:
    state = small_state(**SMALL)
    saved = minloop.save_checkpoint(path, state)
    said = [failure_of(minloop.load_hf_weights, state, saved), failure_of(minloop.load_hf_weights, state, path)]
    minloop.shutdown_distributed()
    return said


def test_hugging_faces_calls_name_our_checkpoints(tmp_path: Path) -> None:
    for said in run_ranks(2, hugging_faces_calls, str(tmp_path)):
        for text in said:
            assert "FileNotFoundError: " in text
            assert "is a checkpoint, or holds some: load_checkpoint and load_weights read them" in text
    assert failure_of(minloop.hf_config_fields, tmp_path / "absent").startswith("FileNotFoundError: [Errno 2]")


def empty(path: Path) -> None:
    path.mkdir(parents=True)
    for name in NEEDED:
        (path / name).touch()


def lost(root: str) -> list[str]:
    state = small_state(**SMALL)
    said = [failure_of(minloop.load_checkpoint, root, state, missing_ok=ok) for ok in (True, False)]
    dist.barrier()
    minloop.shutdown_distributed()
    return [*said, failure_of(minloop.latest_checkpoint, root)]


@pytest.mark.parametrize("left", [None, "iter_0000007"])  # which is none that the tracker's save has seen
def test_a_tracker_without_its_checkpoints_is_no_first_start(tmp_path: Path, left: str | None) -> None:
    (tmp_path / TRACKER).write_text("5\n")
    if left:
        empty(tmp_path / left)
    for said in run_ranks(2, lost, str(tmp_path)):
        for text in said:
            assert text.startswith(f"CheckpointError: {tmp_path / TRACKER} names iteration 5, and {tmp_path} holds no")


@pytest.mark.parametrize("text", ["release", "", "metadata"])
def test_a_tracker_that_names_no_iteration_is_one(tmp_path: Path, text: str) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert minloop.latest_checkpoint(tmp_path) is None
    assert failure_of(minloop.describe_checkpoint, tmp_path).startswith("FileNotFoundError: ")


def first_seen_by_others(root: str) -> str:
    """On the second rank alone the tracker names a checkpoint of another format."""
    state = small_state(**SMALL)
    path = Path(root, str(dist.get_rank()))
    path.mkdir()
    if dist.get_rank():
        (path / TRACKER).write_text("5")
        legacy(path / "iter_0000005")
    said = failure_of(minloop.load_checkpoint, path, state, missing_ok=True)
    minloop.shutdown_distributed()
    return said


def test_what_the_first_rank_alone_does_not_see_stops_all(tmp_path: Path) -> None:
    for said in run_ranks(2, first_seen_by_others, str(tmp_path), timeout=60):
        assert "is not the same directory on all ranks" in said


OURS: dict[str, dict[str, Any]] = {
    "torch_dist": {},
    "fsdp_dtensor": {"ddp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}},
    "torch_dcp": {"ddp": {"reshard_after_forward": True}},
}


def save_twice(root: str, options: dict[str, Any]) -> None:
    state = small_state(**SMALL, **options)
    for state.iteration in (1, 2):
        minloop.save_checkpoint(root, state)
    minloop.shutdown_distributed()


@pytest.mark.parametrize("gone", ["metadata.json", ".metadata", "both"])
def test_what_is_left_of_ours_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: str) -> None:
    run_ranks(1, save_twice, str(tmp_path), {})
    for name in NEEDED if gone == "both" else (gone,):
        (tmp_path / "iter_0000002" / name).unlink()
    shutil.copytree(tmp_path / "iter_0000002", tmp_path / "iter_0000003.unfinished")
    legacy(tmp_path / "iter_0000004.unfinished")
    with caplog.at_level(logging.WARNING, "minloop"):
        assert minloop.latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"
    assert "iter_0000001 is tried in its place" in caplog.text
    said = failure_of(minloop.describe_checkpoint, tmp_path / "iter_0000002")
    assert said.startswith("FileNotFoundError: ")
    assert "the save was cut short" in said


@pytest.mark.parametrize("format", OURS)
def test_no_format_of_ours_is_taken_for_another(tmp_path: Path, format: str) -> None:
    run_ranks(1, save_twice, str(tmp_path), OURS[format])
    checkpoint = iteration_directory(tmp_path, 2)
    assert json.loads((checkpoint / "metadata.json").read_text())["sharded_backend"] == format
    (checkpoint / "metadata.json").unlink()
    assert foreign_format(checkpoint) == ""
    (checkpoint / ".metadata").unlink()
    assert foreign_format(checkpoint) == ""


def save_over_another_format(root: str) -> str:
    state = small_state(**SMALL)
    state.iteration = 5
    said = failure_of(lambda: minloop.save_checkpoint(root, state))
    minloop.shutdown_distributed()
    return said


def test_a_save_deletes_no_checkpoint_of_another_format(tmp_path: Path) -> None:
    checkpoint = iteration_directory(tmp_path, 5)
    legacy(checkpoint)
    for said in run_ranks(2, save_over_another_format, str(tmp_path)):
        assert "is a checkpoint in the legacy format 'torch'" in said
        assert "save into another directory" in said
    assert (checkpoint / "mp_rank_00" / "model_optim_rng.pt").is_file()


def load_a_file(root: str) -> str:
    state = small_state(**SMALL)
    said = failure_of(lambda: minloop.load_checkpoint(Path(root) / "model.safetensors", state, missing_ok=True))
    minloop.shutdown_distributed()
    return said


def test_a_file_is_not_taken_for_no_checkpoint(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (said,) = run_ranks(1, load_a_file, str(tmp_path))
    assert "model.safetensors is a file: give the directory of a checkpoint" in said
