"""Damaged and crafted checkpoints: one named error on every rank, the state as it was, and nothing executed."""

import errno
import io
import json
import logging
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from ranks import run_ranks
from small import small_state, text_loader
from torch.distributed.checkpoint.metadata import MetadataIndex

import minloop
from minloop.checkpoint.extra_state import check_extra_states, letting_checked_states_in
from minloop.checkpoint.reading import read_checkpoint

LAYOUT: dict[str, Any] = {"num_layers": 2, "tensor_model_parallel_size": 2}
TENSOR = "output_layer.weight"


def save_twice(directory: str) -> None:
    state = small_state(**LAYOUT)
    for _ in range(2):
        state.iteration += 1
        minloop.save_checkpoint(directory, state, text_loader(state))
    minloop.shutdown_distributed()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with the checkpoints of iterations 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_twice, str(directory))
    return directory


def try_to_load(attempts: list[tuple[str, bool | None]]) -> list[tuple[str, str, bool, float]]:
    """Of each attempt: the error's type, its message (or the directory loaded), whether the state changed, seconds."""
    outcomes: list[tuple[str, str, bool, float]] = []
    state = small_state(seed=77, **LAYOUT)
    for path, verify in attempts:
        before, start = [p.detach().clone() for p in state.chunks[0].parameters()], time.monotonic()
        try:
            kind, text = "", str(minloop.load_checkpoint(path, state, text_loader(state), verify=verify))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        unchanged = all(map(torch.equal, before, state.chunks[0].parameters()))
        outcomes.append((kind, text, unchanged, time.monotonic() - start))
    dist.barrier()  # every rank is still in step with the others
    minloop.shutdown_distributed()
    return outcomes


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda checkpoint: (without_manifest(checkpoint), (checkpoint / name).write_bytes(content))[0]


def without_manifest(checkpoint: Path) -> None:
    (checkpoint / "integrity.json").unlink()


def cut(checkpoint: Path, manifest: bool = True) -> None:
    if not manifest:
        without_manifest(checkpoint)
    os.truncate(shard(checkpoint), shard(checkpoint).stat().st_size - 100)


def place(checkpoint: Path, fqn: str = TENSOR) -> Any:
    """Where an object, or the last part of a tensor, which only rank 1 reads, lies."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    parts = [(index.offset or (), place) for index, place in metadata.storage_data.items() if index.fqn == fqn]
    return max(parts, key=lambda part: part[0])[1]


def shard(checkpoint: Path) -> Path:
    return checkpoint / place(checkpoint).relative_path


def flip(checkpoint: Path, manifest: bool = True, fqn: str = TENSOR, at: float = 0.5) -> None:
    if not manifest:
        without_manifest(checkpoint)
    part = place(checkpoint, fqn)
    with (checkpoint / part.relative_path).open("r+b") as file:
        file.seek(part.offset + int(part.length * at))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def edit_metadata(checkpoint: Path, edit: Callable[[Any], None]) -> None:
    without_manifest(checkpoint)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    edit(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_part(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == TENSOR)]


def point_outside(metadata: Any) -> None:
    index, part = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(part, relative_path="../../etc/passwd")


def tensor_field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata[TENSOR], name, value)


def place_field(name: str, value: Any) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == TENSOR)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **{name: value})

    return edit


def rename(metadata: Any) -> None:
    metadata.state_dict_metadata[5] = metadata.state_dict_metadata.pop(TENSOR)


def rename_object(metadata: Any) -> None:
    metadata.state_dict_metadata["rng"] = metadata.state_dict_metadata.pop(EXTRA)
    index = next(index for index in metadata.storage_data if index.fqn == EXTRA)
    metadata.storage_data[MetadataIndex("rng")] = metadata.storage_data.pop(index)


def names_as_keys(metadata: Any) -> None:
    metadata.storage_data = {index.fqn: place for index, place in metadata.storage_data.items()}


def move_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata[TENSOR].chunks[0].offsets = torch.Size([200, 0])


def ask_for_memory(checkpoint: Path) -> None:
    write(".metadata", b"\x80\x05\x96" + (2**62).to_bytes(8, "little"))(checkpoint)


def craft(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Write the records anew, where mcore looks for them first."""

    def write_common(checkpoint: Path) -> None:
        without_manifest(checkpoint)
        common = read_checkpoint(checkpoint).common
        edit(common)
        torch.save(common, checkpoint / "common.pt")

    return write_common


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no dict": (lambda c: c.update(minloop=[]), "common.pt is damaged: minloop is [], not a dict; "),
    "no layout": (lambda c: c["minloop"].update(layout=2), "minloop.layout is 2, not a dict"),
    "sizes in words": (lambda c: c["minloop"]["layout"].update(tp="two"), "minloop.layout.tp is 'two', not a size"),
    "tensors": (lambda c: c["minloop"]["architecture"].update(a=torch.ones(2)), "minloop.architecture.a is tensor("),
    "kind": (lambda c: c["minloop"].update(optimizer_kind=["fp32"]), "optimizer_kind is ['fp32'], not one of fp32, "),
    "switches": (lambda c: c.update(content_metadata="x"), "content_metadata is 'x', not a dict"),
}
PROGRESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "step": (lambda c: c.update(optimizer={"state": {"common_step": "2"}}), "optimizer.state.common_step is '2', not "),
    "scale": (lambda c: c.update(optimizer=[{"grad_scaler": {"scale": 1.0}}]), "optimizer.0.grad_scaler.scale is 1.0"),
    "schedule": (lambda c: c.update(opt_param_scheduler={}), "opt_param_scheduler.num_steps is None, not a count"),
    "position": (lambda c: c["minloop"]["loaders"]["train"].pop("consumed_samples"), "minloop.loaders.train is {'"),
}
FIELDS: dict[str, tuple[Callable[[Any], None], str]] = {
    "chunks None": (tensor_field("chunks", None), "['output_layer.weight'].chunks is None, not a list"),
    "chunks of ints": (tensor_field("chunks", [1, 2]), ".chunks[0] is 1, not a ChunkStorageMetadata"),
    "chunk outside": (move_chunk, ".chunks[0].sizes is torch.Size([128, 32]), not a shape that from [200, 0] on is "),
    "size None": (tensor_field("size", None), ".size is None, not a shape"),
    "negative size": (tensor_field("size", torch.Size([-1, 32])), ".size is torch.Size([-1, 32]), not a shape"),
    "another rank": (tensor_field("size", torch.Size([256])), ".chunks[0].offsets is torch.Size([0, 0]), not a place"),
    "immense size": (tensor_field("size", torch.Size([2**62, 32])), "not the shape of a tensor that can be"),
    "properties None": (tensor_field("properties", None), ".properties is None, not a TensorProperties"),
    "dtype None": (lambda m: setattr(m.state_dict_metadata[TENSOR].properties, "dtype", None), "dtype is None, not a "),
    "an int as name": (rename, "a name in state_dict_metadata is 5, not a string"),
    "an object's name": (rename_object, ".metadata names an object 'rng'"),
    "names as keys": (names_as_keys, "not a MetadataIndex"),
    "offset 1.5": (place_field("offset", 1.5), "storage_data['output_layer.weight'].offset is 1.5, not a count"),
    "length None": (place_field("length", None), "].length is None, not a count"),
    "path None": (place_field("relative_path", None), "].relative_path is None, not a string"),
    "no places": (lambda m: setattr(m, "storage_data", None), "storage_data is None, not a dict"),
    "version": (lambda m: setattr(m, "version", 1), "version is 1, not a string"),
    "planner_data": (lambda m: setattr(m, "planner_data", [1]), "planner_data is a list, not a dict"),
    "storage_meta": (lambda m: setattr(m, "storage_meta", "x"), "storage_meta is 'x', not a StorageMeta"),
}
EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
ELSEWHERE = b'{"sharded_backend": "zarr", "sharded_backend_version": 2}'
UNKNOWN_CLASS = b"cmegatron.core.dist_checkpointing.strategies.future\nNewMetadata\n."
DAMAGES: dict[str, tuple[Callable[[Path], Any], bool | None, str]] = {
    "missing shard": (lambda c: shard(c).unlink(), None, ".distcp is missing"),
    "cut shard": (cut, None, ".distcp has "),
    "cut shard, no list of files": (lambda c: cut(c, False), None, "it was cut short"),
    "flipped byte": (flip, None, ".distcp is not what was saved: its sha256 is"),
    "flipped byte, no digests": (lambda c: flip(c, False), True, "the CRC-32 of output_layer.weight is wrong"),
    "empty .metadata": (write(".metadata", b""), None, ".metadata is damaged (EOFError"),
    "garbage .metadata": (write(".metadata", b"\x93garbage" * 99), None, ".metadata is damaged ("),
    "a later mcore's .metadata": (write(".metadata", UNKNOWN_CLASS), None, "strategies.future.NewMetadata"),
    ".metadata lacks a part": (lambda c: edit_metadata(c, drop_part), None, "elements of output_layer.weight"),
    ".metadata names other files": (lambda c: edit_metadata(c, point_outside), None, "etc/passwd, which is no file"),
    ".metadata asks for memory": (ask_for_memory, None, ".metadata is damaged (ValueError: it asks for more memory"),
    "empty metadata.json": (write("metadata.json", b""), None, "metadata.json is damaged (JSONDecodeError"),
    "garbage metadata.json": (write("metadata.json", b"[1]"), None, "metadata.json is damaged ("),
    "another format": (write("metadata.json", ELSEWHERE), None, "sharded_backend='zarr', version 2"),
    "garbage common.pt": (write("common.pt", b"garbage"), None, "common.pt is damaged ("),
    **{name: (craft(edit), None, message) for name, (edit, message) in (RECORDS | PROGRESS).items()},
    "garbage integrity.json": (lambda c: (c / "integrity.json").write_text("{"), None, "integrity.json is damaged"),
}


def test_damage_is_named_on_every_rank_and_changes_nothing(saved: Path, tmp_path: Path) -> None:
    attempts: list[tuple[str, bool | None]] = []
    for number, (damage, verify, _) in enumerate(DAMAGES.values()):
        checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / str(number) / "iter_0000002"))
        damage(checkpoint)
        attempts.append((str(checkpoint), verify))
    outcomes = run_ranks(2, try_to_load, attempts)
    for case, (_, _, message), *ranks in zip(DAMAGES, DAMAGES.values(), *outcomes, strict=True):
        for kind, text, unchanged, seconds in ranks:
            assert kind == "CheckpointError", (case, kind, text)
            assert message in text, case
            assert text == ranks[0][1]
            assert unchanged, case
            assert seconds < 30


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_field_of_metadata_is_named_and_passed_over(
    field: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit, message = FIELDS[field]
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    edit_metadata(run / "iter_0000002", edit)
    (fault,) = minloop.verify_checkpoint(run / "iter_0000002", contents=False)[:1]
    assert fault.startswith(str(run / "iter_0000002/.metadata"))
    assert message in fault
    with caplog.at_level(logging.WARNING, "minloop"):
        assert minloop.latest_checkpoint(run) == run / "iter_0000001"
    assert fault in caplog.text
    assert minloop.describe_checkpoint(run).iteration == 1


def test_ranks_pass_over_a_wrong_field_alike(saved: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    edit_metadata(run / "iter_0000002", tensor_field("chunks", None))
    for ((kind, text, *_),) in run_ranks(2, try_to_load, [(str(run), None)]):
        assert (kind, text) == ("", str(run / "iter_0000001"))


OF_THE_READER = [errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM]
READ = [".metadata", "metadata.json", "integrity.json", ".distcp"]
"""Ends of the names of files that are read."""


def fail_to_read(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError | MemoryError) -> None:
    """Let files whose names end with `name` raise `error` when opened."""

    def opening(own: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
            if str(file).endswith(name):
                if isinstance(error, OSError):
                    error.filename = str(file)
                raise error
            return own(file, *args, **kwargs)

        return opened

    monkeypatch.setattr(io, "open", opening(io.open))  # pathlib's


def calls(run: Path) -> dict[str, Callable[[], object]]:
    newest = run / "iter_0000002"
    return {
        "latest": lambda: minloop.latest_checkpoint(run),
        "verify": lambda: minloop.verify_checkpoint(newest),
        "describe": lambda: minloop.describe_checkpoint(newest),
        "describe a run": lambda: minloop.describe_checkpoint(run),
    }


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("number", OF_THE_READER)
def test_what_cannot_be_read_here_and_now_is_not_damaged(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    fail_to_read(monkeypatch, name, OSError(number, os.strerror(number)))
    for case, call in calls(saved).items():
        if name == "integrity.json" and case == "describe":  # which does not read it
            continue
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as raised:
            call()
        assert raised.value.errno == number, case
        assert str(raised.value.filename).endswith(name), case


def test_lack_of_memory_is_not_damage(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_read(monkeypatch, ".metadata", MemoryError())
    for call in calls(saved).values():
        with pytest.raises(MemoryError, match=r"no memory to read .*iter_0000002/\.metadata"):
            call()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.ELOOP])
@pytest.mark.parametrize("name", READ)
def test_what_is_missing_or_broken_is_damaged(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    fail_to_read(monkeypatch, f"iter_0000002/{name}", OSError(number, os.strerror(number)))
    if name == ".distcp":
        file = shard(saved / "iter_0000002").name
        fail_to_read(monkeypatch, f"iter_0000002/{file}", OSError(number, os.strerror(number)))
    assert minloop.verify_checkpoint(saved / "iter_0000002")
    if name != ".distcp":
        assert minloop.latest_checkpoint(saved) == saved / "iter_0000001"


def load_without_rights(directory: str) -> list[str]:
    state, outcomes = small_state(seed=77, **LAYOUT), list[str]()
    for path in (Path(directory), Path(directory) / "iter_0000002"):
        with pytest.MonkeyPatch.context() as patch:
            fail_to_read(patch, ".metadata", PermissionError(errno.EACCES, "Permission denied"))
            try:
                minloop.load_checkpoint(path, state)
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
    minloop.shutdown_distributed()
    return outcomes


def test_missing_rights_stop_a_load_on_all_ranks(saved: Path) -> None:
    for outcomes in run_ranks(2, load_without_rights, str(saved)):
        assert len(outcomes) == 2
        for text in outcomes:
            assert "PermissionError: [Errno 13] Permission denied" in text
            assert str(saved / "iter_0000002/.metadata") in text


@pytest.mark.parametrize("record", RECORDS)
def test_describing_names_a_record_without_form(record: str, saved: Path, tmp_path: Path) -> None:
    edit, message = RECORDS[record]
    checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    craft(edit)(checkpoint)
    with pytest.raises(minloop.CheckpointError, match=re.escape(message)):
        minloop.describe_checkpoint(checkpoint)


def test_what_one_rank_finds_while_reading_is_raised_on_all(saved: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    flip(checkpoint, at=0.0)  # PyTorch's file header: only rank 1 reads this part
    ((first, text, *_),), ((second, other, *_),) = run_ranks(2, try_to_load, [(str(checkpoint), False)])
    assert first == second == "CheckpointError"
    assert text == other
    assert text.startswith("on rank 1: ")
    assert f"{shard(checkpoint)} is damaged" in text
    assert "build the state anew" in text


def test_a_damaged_newest_falls_back_to_the_one_before(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut_run, flipped_run = (Path(shutil.copytree(saved, tmp_path / name)) for name in ("cut", "flipped"))
    cut(cut_run / "iter_0000002")
    flip(flipped_run / "iter_0000002")
    with caplog.at_level(logging.WARNING, "minloop"):
        assert minloop.latest_checkpoint(cut_run) == cut_run / "iter_0000001"
    assert f"{cut_run / 'iter_0000002'} is damaged" in caplog.text
    assert f"{cut_run / 'iter_0000001'} is tried in its place" in caplog.text
    assert minloop.latest_checkpoint(flipped_run) == flipped_run / "iter_0000002"
    outcomes = run_ranks(2, try_to_load, [(str(cut_run), None), (str(flipped_run), None), (str(flipped_run), False)])
    for rank in outcomes:
        assert [text for _, text, _, _ in rank] == [
            str(cut_run / "iter_0000001"),
            str(flipped_run / "iter_0000001"),
            str(flipped_run / "iter_0000002"),
        ]
    cut(cut_run / "iter_0000001")
    (((kind, text, *_),), _) = run_ranks(2, try_to_load, [(str(cut_run), None)])
    assert kind == "CheckpointError"
    assert f"{shard(cut_run / 'iter_0000001')} has" in text


def test_verify_checkpoint_lists_every_fault(saved: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    assert minloop.verify_checkpoint(checkpoint) == []
    flip(checkpoint, fqn="embedding.word_embeddings.weight")
    flip(checkpoint)
    flipped = {shard(checkpoint), checkpoint / place(checkpoint, "embedding.word_embeddings.weight").relative_path}
    assert minloop.verify_checkpoint(checkpoint, contents=False) == []
    faults = minloop.verify_checkpoint(checkpoint)
    assert {Path(fault.split()[0]) for fault in faults} == flipped
    mcores = json.loads((checkpoint / "integrity.json").read_text())
    del mcores["bytes"]
    (checkpoint / "integrity.json").write_text(json.dumps(mcores))
    assert minloop.verify_checkpoint(checkpoint) == faults
    without_manifest(checkpoint)
    assert ["CRC-32" in fault for fault in minloop.verify_checkpoint(checkpoint)] == [True] * len(flipped)


def verified_by_mcore(checkpoint: str) -> str:
    try:
        dist_checkpointing.load({}, checkpoint, verify_integrity=True)
    except CheckpointingException as error:
        return str(error)
    return "sound"


def test_mcores_own_load_verifies_by_our_manifest(saved: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / "iter_0000002"))
    assert run_ranks(2, verified_by_mcore, str(checkpoint), init="gloo") == ["sound", "sound"]
    flip(checkpoint)
    for said in run_ranks(2, verified_by_mcore, str(checkpoint), init="gloo"):
        assert "integrity verification failed for 1 file(s)" in said
        assert f"{shard(checkpoint).name}: hash mismatch" in said


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def replace_object(checkpoint: Path, name: str, content: bytes) -> None:
    """Let a stored object or tensor be `content`, put at the end of a shard."""
    file_name = shard(checkpoint).name
    with shard(checkpoint).open("ab") as file:
        start = file.tell()
        file.write(content)

    def point(metadata: Any) -> None:
        found = [(index, part) for index, part in metadata.storage_data.items() if index.fqn == name]
        assert found
        for index, part in found:
            metadata.storage_data[index] = replace(part, relative_path=file_name, offset=start, length=len(content))

    edit_metadata(checkpoint, point)


CRAFTED: dict[str, Callable[[Path, Evil], None]] = {
    ".metadata": lambda c, evil: write(".metadata", pickle.dumps(evil))(c),
    "common.pt": lambda c, evil: write("common.pt", saved_bytes(evil))(c),
    "common.pt, a bare pickle": lambda c, evil: write("common.pt", pickle.dumps(evil, protocol=2))(c),
    "common state": lambda c, evil: replace_object(c, "common_state/shard_0_1", saved_bytes([evil])),
    "random streams": lambda c, evil: replace_object(c, "minloop.rng_state/shard_0.0.0_1.2.1", saved_bytes([evil])),
    "tensor": lambda c, evil: replace_object(c, "output_layer.weight", saved_bytes(evil)),
    "extra state": lambda c, evil: replace_object(c, EXTRA, saved_bytes([evil])),
    "Transformer Engine's extra state": lambda c, evil: replace_object(
        c, EXTRA, saved_bytes([torch.frombuffer(bytearray(pickle.dumps(evil)), dtype=torch.uint8)])
    ),
}


def test_nothing_in_a_folder_is_executed(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(Evil(str(marker))))
    marker.rmdir()  # it works, unless something is done about it
    attempts: list[tuple[str, bool | None]] = []
    for number, craft in enumerate(CRAFTED.values()):
        checkpoint = Path(shutil.copytree(saved / "iter_0000002", tmp_path / str(number) / "iter_0000002"))
        craft(checkpoint, Evil(str(marker)))
        attempts.append((str(checkpoint), None))
        assert not marker.exists()
    outcomes = run_ranks(2, try_to_load, attempts)
    assert not marker.exists()
    for case, *ranks in zip(CRAFTED, *outcomes, strict=True):
        for kind, text, _, _ in ranks:
            assert kind == "CheckpointError", (case, kind, text)
            assert "posix.mkdir" in text, case
            assert "refused" in text, case
    for path, _ in attempts[:4]:
        with pytest.raises(minloop.CheckpointError, match=r"posix\.mkdir"):
            minloop.describe_checkpoint(path)
        assert minloop.verify_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["mlp.linear_fc1._extra_state", "mlp.experts.linear_fc1._extra_state12"])
def test_extra_states_of_all_names_are_checked(saved: Path, tmp_path: Path, name: str) -> None:
    content = pickle.dumps(Evil(str(tmp_path / "executed")))
    state = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(minloop.CheckpointError, match=r"is refused .*posix.mkdir"):
        check_extra_states(read_checkpoint(saved / "iter_0000002"), {name: state})
    assert not (tmp_path / "executed").exists()


def test_checked_extra_states_pass_transformer_engines_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses every pickle, and delayed FP8 scales are one; those that arrive there have been checked."""

    def refuse(*_: Any) -> bool:
        raise RuntimeError("refusing to load pickled extra state")

    module = SimpleNamespace(should_load_extra_state_pickle=refuse)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", module)  # pyright: ignore[reportArgumentType]
    with letting_checked_states_in():
        assert module.should_load_extra_state_pickle(b"", "")
    assert module.should_load_extra_state_pickle is refuse
