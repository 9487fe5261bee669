"""Hugging Face's directories of safetensors files: read by slices, written as a stream of tensors."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minloop.checkpoint.hf.config import read_json
from minloop.disk import sync

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def require_dtype(dtype: Any) -> torch.dtype:
    """Return `dtype`; raise ValueError if weights are not written in it."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: weights are written as {', '.join(map(str, DTYPES))}")
    return dtype


class WeightFiles:
    """The tensors in a directory's safetensors files, of which only what is asked for is read.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
        ValueError: a file is damaged, or named outside the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, Any] = {}
        for name in self._names(directory):
            file = self._open(directory / name)
            self._file_of |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str, place: tuple[slice, ...]) -> torch.Tensor:
        """Read one block of a tensor, on the CPU, in the dtype it is stored in."""
        return self._file_of[name].get_slice(name)[place]

    @staticmethod
    def _names(directory: Path) -> list[str]:
        if not (directory / INDEX).exists():
            return [WEIGHTS]
        names = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        if outside := [name for name in names if name in ("", "..") or Path(name).name != name]:
            raise ValueError(f"{directory / INDEX} names a file outside its directory: {outside[0]!r}")
        return names

    @staticmethod
    def _open(path: Path) -> Any:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the weights must be there as safetensors")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def write_weights(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[torch.Tensor],
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    """Write tensors one after the other as they come, in files of at most `max_shard_size` bytes and at least a tensor.

    Args:
        shapes: of all tensors, by name, in the order in which they come.
        tensors: on the CPU, of `dtype`; none is kept.
    """
    shards = _shards(shapes, dtype, max_shard_size)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [WEIGHTS]
    coming = iter(tensors)
    for file_name, shard in zip(names, shards, strict=True):
        with (directory / file_name).open("wb") as file:
            file.write(_header(shard, dtype))
            for _ in shard:
                file.write(next(coming).contiguous().view(-1).view(torch.uint8).numpy())
        sync(directory / file_name)
    if len(shards) > 1:
        total = sum(_bytes(shape, dtype) for shape in shapes.values())
        weight_map = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write one JSON object as transformers does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    sync(path)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_size: int
) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = _bytes(shape, dtype)
        if shards[-1] and filled + size > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return shards


def _header(shard: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """What a safetensors file begins with: the length of a JSON object, and the object, which says where tensors lie.

    Written here, and not by the package, which wants all of a file's tensors at once.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shard.items():
        stop = start + _bytes(shape, dtype)
        entries[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return struct.pack("<Q", len(text)) + text
