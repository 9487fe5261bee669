"""Reading a checkpoint's files without running anything that they hold, in one process, with or without a group.

Four kinds of file hold pickles: `.metadata` (one), the .distcp files (one in every object and tensor), common.pt of
older mcore, and train_state.pt of Megatron-Bridge. PyTorch unpickles the first and mcore the objects without
restriction, so that whoever wrote the folder could run code here. Below, only plain data and the classes that a
checkpoint needs are built.
"""

import io
import json
import pickle
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from minloop.checkpoint.full_names import FORMATS, TORCH_DIST, as_stored, as_torch_dist
from minloop.checkpoint.metadata_form import check_metadata
from minloop.checkpoint.pickles import MetadataUnpickler, NotPlainError, enums_sealed
from minloop.checkpoint.reader_errors import is_of_the_reader, name_file
from minloop.checkpoint.records import wrong_records

VERSION = 1
EARLIER = "load an earlier checkpoint"
READERS = 8
"""Threads that read files; each holds one part of a tensor in memory."""
COMMON = "common_state/shard_0_1"
"""mcore's key of everything in a checkpoint that is no tensor and the same on every rank."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, of another format or not to be trusted. The message names the file."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint tells of itself before any tensor is read.

    Attributes:
        path: its directory.
        metadata: PyTorch's record of every tensor and object: shape, dtype, and where its parts lie.
        common: everything that is no tensor and the same on every rank.
        format: of the files, see `full_names`; `metadata` has the names of "torch_dist" in any case.
        stacked: how many dimensions more than in the files a tensor has, by name.
    """

    path: Path
    metadata: Metadata
    common: dict[str, Any]
    format: str = TORCH_DIST
    stacked: dict[str, int] = field(default_factory=dict[str, int])


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Read everything but the tensors.

    Raises:
        CheckpointError: a file is missing, damaged or of another format, or holds more than plain data.
        OSError, MemoryError: as `named_errors`.
    """
    format = check_format(path)
    metadata = read_metadata(path)
    return with_common_names(path, format, metadata, read_common(path, metadata))


def with_common_names(path: Path, format: str, metadata: Metadata, common: dict[str, Any]) -> SavedCheckpoint:
    """Put together what was read, with the names of "torch_dist"; raise CheckpointError if their table is no such."""
    if format == TORCH_DIST:
        return SavedCheckpoint(path, metadata, common)
    if "names" not in common.get("minloop", {}):
        raise CheckpointError(
            f"{path} is of the format {format!r} and holds no table of its names: of this format, only what "
            "save_checkpoint wrote can be read"
        )
    try:
        names = as_stored(common["minloop"]["names"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"minloop.names is no table of names ({type(error).__name__}: {error})"
        raise CheckpointError(f"{path} is damaged: {reason}; {EARLIER}") from error
    with named_errors(path / ".metadata"):
        metadata, stacked = as_torch_dist(metadata, names)
    return SavedCheckpoint(path, metadata, common, format, stacked)


def check_format(path: Path) -> str:
    """Return what metadata.json says of the format, one of `FORMATS`; raise CheckpointError if it is no such."""
    file = path / "metadata.json"
    with named_errors(file):
        content = json.loads(file.read_text())
        backend, version = content["sharded_backend"], content.get("sharded_backend_version", 1)
    if backend not in FORMATS or version != VERSION:
        raise CheckpointError(
            f"{file} says sharded_backend={backend!r}, version {version}; only {', '.join(FORMATS)}, version "
            f"{VERSION}, can be read: save it so with the mcore that wrote it"
        )
    return backend


def read_metadata(path: Path) -> Metadata:
    """Read `.metadata` with nothing but the classes it needs.

    Raises:
        CheckpointError: missing, damaged, or naming any other class or file outside the directory.
        OSError, MemoryError: as `named_errors`.
    """
    file = path / ".metadata"
    with named_errors(file):
        content = file.read_bytes()
        try:
            metadata = MetadataUnpickler(io.BytesIO(content)).load()
        except MemoryError as error:  # a flipped byte asks for any amount
            bytearray(200 * len(content))  # raises it again where a sound one's objects find no room either
            raise ValueError("it asks for more memory than it can need") from error
        check_metadata(metadata)
    return metadata


def read_common(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Read what is no tensor and the same on every rank, tensors in it onto the CPU.

    Raises:
        CheckpointError: missing, damaged, not plain data, or without the form that its records have.
    """
    file = path / "common.pt"
    if file.is_file():  # by mcore before 0.17; mcore prefers it too
        with named_errors(file), file.open("rb") as stream:
            common = load_plain(stream, file)
    else:
        place = next((place for index, place in metadata.storage_data.items() if index.fqn == COMMON), None)
        if place is None:
            raise CheckpointError(f"{path} holds no {COMMON!r} and no common.pt: it is no checkpoint of mcore's")
        file = path / place.relative_path
        with named_errors(file):
            (common,) = load_plain(io.BytesIO(read_slice(path, place)), file)
    if not isinstance(common, dict):
        raise CheckpointError(
            f"{file}: what it holds beside tensors is a {type(common).__name__}, not a dict; {EARLIER}"
        )
    if wrong := [*wrong_records(cast("dict[str, Any]", common))]:
        raise CheckpointError(f"{file} is damaged: {'; '.join(wrong[:5])}; {EARLIER}")
    return cast("dict[str, Any]", common)


def read_slice(path: Path, place: Any) -> bytes:
    """Read the bytes of one stored object or part of a tensor."""
    with (path / place.relative_path).open("rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.length)


def read_part(saved: SavedCheckpoint, index: MetadataIndex) -> torch.Tensor:
    """Read a stored part of a tensor, onto the CPU, with the dimensions that `saved.metadata` has.

    Raises:
        CheckpointError: as `load_plain`.
    """
    place = saved.metadata.storage_data[index]
    part: torch.Tensor = load_plain(io.BytesIO(read_slice(saved.path, place)), saved.path / place.relative_path)
    return part[(None,) * saved.stacked.get(index.fqn, 0)]


def load_plain(stream: IO[bytes], file: Path) -> Any:
    """`torch.load` of plain data, tensors onto the CPU; what mcore and the user declared safe for PyTorch is let in.

    Raises:
        CheckpointError: damaged, or a pickle that names anything else; `file` is named in it.
    """
    with named_errors(file), enums_sealed():
        return torch.load(stream, map_location="cpu", weights_only=True)


@contextmanager
def named_errors(file: Path) -> Generator[None]:
    """Turn whatever goes wrong with a file into a CheckpointError that names it.

    Errors of the reader's (its rights, open files, memory: `reader_errors`) are raised as they are, the file named.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {EARLIER}") from None
    except Exception as error:  # garbage makes readers raise anything
        if is_of_the_reader(error):
            name_file(error, file)
            raise
        text = str(error)
        changed = re.search(r"Can only \w+ .* but got .*|Trying to call reduce .*", text)  # by PyTorch
        if isinstance(error, NotPlainError) or (isinstance(error, pickle.UnpicklingError) and changed):
            raise CheckpointError(
                f"{file} is refused ({changed[0] if changed else text}): it holds more than plain data, and loading it "
                "could run code of whoever wrote it; nothing of it was run"
            ) from None
        foreign = re.search(r"GLOBAL (\S+)", text)
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise CheckpointError(
                f"{file} is refused: it asks for {foreign[1]}, which is no part of a checkpoint, and "
                "loading it could run code of whoever wrote it; nothing of it was run. If you know the writer and it "
                "is a class of plain data, allow it with torch.serialization.add_safe_globals"
            ) from None
        own_words = re.search(r"WeightsUnpickler error: (.*)", text)  # within PyTorch's advice to load it all the same
        reason = own_words[1] if own_words else text.partition("\n")[0] or "it ends too early"
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {reason[:200]}); {EARLIER}") from error
