"""Reading a checkpoint's files without running anything that they hold, in one process, with or without a group.

Three kinds of file hold pickles: `.metadata` (one), the .distcp files (one in every object and tensor), and common.pt
of older mcore. PyTorch unpickles the first and mcore the objects without restriction, so that whoever wrote the folder
could run code here. Below, only plain data and the classes that a checkpoint needs are built.
"""

import copy
import functools
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
    Metadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout  # pyright: ignore[reportPrivateUsage]

FORMAT = CheckpointingConfig("torch_dist", 1)
EARLIER = "load an earlier checkpoint"
READERS = 8
"""Threads that read files; each holds one part of a tensor in memory."""
COMMON = "common_state/shard_0_1"
"""mcore's key of everything in a checkpoint that is no tensor and the same on every rank."""

METADATA_CLASSES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(dcp, name) for name in dcp.__all__},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # the folder where it was saved
    ("pathlib._local", "PosixPath"): PurePosixPath,  # the same, by Python 3.13
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): torch_strategy.MCoreMetadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): torch_strategy.MCoreSavePlan,
}
"""What `.metadata` may name, beside dtypes."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: damaged, of another format or not to be trusted. The message names the file."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint tells of itself before any tensor is read.

    Attributes:
        path: its directory.
        metadata: PyTorch's record of every tensor and object: shape, dtype, and where its parts lie.
        common: everything that is no tensor and the same on every rank.
    """

    path: Path
    metadata: Metadata
    common: dict[str, Any]


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Read everything but the tensors.

    Raises:
        CheckpointError: a file is missing, damaged or of another format, or holds more than plain data.
    """
    check_format(path)
    metadata = read_metadata(path)
    return SavedCheckpoint(path, metadata, read_common(path, metadata))


def check_format(path: Path) -> None:
    """Raise CheckpointError unless metadata.json says that this is a checkpoint of the format `torch_dist`."""
    file = path / "metadata.json"
    with _named(file):
        content = json.loads(file.read_text())
        backend, version = content["sharded_backend"], content.get("sharded_backend_version", 1)
    if (backend, version) != (FORMAT.sharded_backend, FORMAT.sharded_backend_version):
        raise CheckpointError(
            f"{file} says sharded_backend={backend!r}, version {version}; only {FORMAT.sharded_backend!r}, version "
            f"{FORMAT.sharded_backend_version}, can be read: save it so with the mcore that wrote it"
        )


def read_metadata(path: Path) -> Metadata:
    """Read `.metadata` with nothing but the classes it needs.

    Raises:
        CheckpointError: missing, damaged, or naming any other class or file outside the directory.
    """
    file = path / ".metadata"
    with _named(file), file.open("rb") as stream:
        metadata = _MetadataUnpickler(stream).load()
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        if not all(isinstance(x, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata) for x in tensors.values()):
            raise ValueError("it describes something that is neither a tensor nor an object")
        for index, place in places.items():
            if Path(place.relative_path).name != place.relative_path or min(place.offset, place.length) < 0:
                raise ValueError(f"it places {index.fqn} in {place.relative_path}, which is no file of the checkpoint")
    return metadata


def read_common(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Read what is no tensor and the same on every rank, tensors in it onto the CPU.

    Raises:
        CheckpointError: missing, damaged, or not plain data.
    """
    legacy = path / "common.pt"
    if legacy.is_file():  # by mcore before 0.17; mcore prefers it too
        with legacy.open("rb") as stream:
            common = load_plain(stream, legacy)
    else:
        place = next((place for index, place in metadata.storage_data.items() if index.fqn == COMMON), None)
        if place is None:
            raise CheckpointError(f"{path} holds no {COMMON!r} and no common.pt: it is no checkpoint of mcore's")
        with _named(path / place.relative_path):
            data = read_slice(path, place)
        (common,) = load_plain(io.BytesIO(data), path / place.relative_path)
    if not isinstance(common, dict):
        raise CheckpointError(
            f"{path}: what it holds beside tensors is a {type(common).__name__}, not a dict; {EARLIER}"
        )
    return cast("dict[str, Any]", common)


def read_slice(path: Path, place: Any) -> bytes:
    """Read the bytes of one stored object or part of a tensor."""
    with (path / place.relative_path).open("rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.length)


def load_plain(stream: IO[bytes], file: Path) -> Any:
    """`torch.load` of plain data, tensors onto the CPU; what mcore and the user declared safe for PyTorch is let in.

    Raises:
        CheckpointError: damaged, or a pickle that names anything else; `file` is named in it.
    """
    with _named(file):
        return torch.load(stream, map_location="cpu", weights_only=True)


@contextmanager
def read_safely(saved: SavedCheckpoint) -> Generator[None]:
    """While inside, mcore reads this checkpoint with the restrictions above, and takes from `saved` what it holds.

    mcore 0.19 takes no reader as an argument: the two functions with which it opens a checkpoint are replaced.
    """

    def common(checkpoint_dir: Any) -> dict[str, Any]:
        return copy.deepcopy(saved.common)

    def reader(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> FileSystemReader:
        return _Reader(saved)

    own: tuple[Any, Any] = serialization.load_common_state_dict, torch_strategy._get_filesystem_reader  # pyright: ignore[reportPrivateUsage]
    serialization.load_common_state_dict, torch_strategy._get_filesystem_reader = common, reader  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        serialization.load_common_state_dict, torch_strategy._get_filesystem_reader = own  # pyright: ignore[reportPrivateUsage]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if (module_name, global_name) not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return METADATA_CLASSES[module_name, global_name]


class _Reader(FileSystemReader):
    """PyTorch's reader, with metadata read before, objects as plain data, and the file named in every error."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        super().__init__(saved.path)
        self._saved = saved

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._saved.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        vars(planner)["load_bytes"] = functools.partial(self._load_bytes, planner)
        per_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            per_file[self.storage_data[item.storage_index].relative_path].append(item)
        with ThreadPoolExecutor(READERS) as pool:
            plans = {name: replace(plan, items=items) for name, items in per_file.items()}
            files = [pool.submit(self._read_file, name, part, planner) for name, part in plans.items()]
        for file in files:
            file.result()
        return super().read_data(replace(plan, items=[]), planner)

    def _read_file(self, name: str, plan: LoadPlan, planner: LoadPlanner) -> None:
        with _named(self._saved.path / name), torch.no_grad():
            super().read_data(plan, planner)

    def _load_bytes(self, planner: Any, item: ReadItem, value: io.BytesIO) -> None:
        name = self.storage_data[item.storage_index].relative_path
        planner.state_dict[item.dest_index.fqn] = load_plain(value, self._saved.path / name)


@contextmanager
def _named(file: Path) -> Generator[None]:
    """Turn whatever goes wrong with a file into a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {EARLIER}") from None
    except Exception as error:  # garbage makes readers raise anything
        text = str(error)
        foreign = re.search(r"it names (\S+)|GLOBAL (\S+)", text)
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise CheckpointError(
                f"{file} is refused: it asks for {foreign[1] or foreign[2]}, which is no part of a checkpoint, and "
                "loading it could run code of whoever wrote it; nothing of it was run. If you know the writer and it "
                "is a class of plain data, allow it with torch.serialization.add_safe_globals"
            ) from None
        own_words = re.search(r"WeightsUnpickler error: (.*)", text)  # within PyTorch's advice to load it all the same
        reason = own_words[1] if own_words else text.partition("\n")[0] or "it ends too early"
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {reason[:200]}); {EARLIER}") from error
