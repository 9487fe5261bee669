"""Checkpoints of fully sharded states: the names their files use, and the same tensors by the names all others use.

Three formats lie in PyTorch's own files (`.metadata`, `__0_0.distcp`); `metadata.json` says which one it is:

    torch_dist    DDP and ZeRO-1: mcore's, like layers stacked in one tensor "decoder.layers.mlp.linear_fc1.weight"
    fsdp_dtensor  Megatron FSDP: mcore's, every parameter by its name in the wrapped model, gated linear layers in
                  halves (_w, _v); the weights are the fp32 master weights
    torch_dcp     torch FSDP2: every parameter by its name, as `torch.distributed.checkpoint.state_dict` has it

The last two are read through a table of their names, as if they were of the first: so each loads into each.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

TORCH_DIST, FSDP_DTENSOR, TORCH_DCP = FORMATS = ("torch_dist", "fsdp_dtensor", "torch_dcp")
OPTIMIZER_STATE = "optimizer.state."
MASTER_WEIGHTS = OPTIMIZER_STATE + "param."


class Place(NamedTuple):
    """Where a file's tensor lies in one of `torch_dist`.

    Attributes:
        key: that one's name.
        numbers: of the layer and the expert, from 0, where it stacks them.
        row: the first row.
        shape: that of the whole.
    """

    key: str
    numbers: tuple[int, ...]
    row: int
    shape: tuple[int, ...]


class FileNames(NamedTuple):
    """The names in a checkpoint's files.

    Attributes:
        format: one of `FORMATS`.
        model: what weights' names begin with.
        optimizer: what names of the optimizer's tensors begin with; they end with the tensor's kind (".exp_avg").
        places: by the part of the name between them.
    """

    format: str
    model: str
    optimizer: str
    places: dict[str, Place]

    def stored(self) -> dict[str, Any]:
        """Plain data, from which `as_stored` makes the same again."""
        places = {name: [place.key, [*place.numbers], place.row, [*place.shape]] for name, place in self.places.items()}
        return {"format": self.format, "model": self.model, "optimizer": self.optimizer, "places": places}

    def weight(self, name: str) -> str:
        """A weight's name in the files."""
        return self.model + name

    def state(self, name: str, kind: str) -> str:
        """The name in the files of what the optimizer holds for a weight."""
        return f"{self.optimizer}{name}.{kind}"

    def split(self, file_name: str) -> tuple[str, str] | None:
        """(Name, kind) of a tensor in the files; kind is "" for weights. None for what has one name in all formats."""
        if file_name.startswith(self.optimizer):
            name, _, kind = file_name.removeprefix(self.optimizer).rpartition(".")
        elif file_name.startswith(self.model):
            name, kind = file_name.removeprefix(self.model), ""
        else:
            return None
        return (name, kind) if name in self.places else None


def as_stored(names: dict[str, Any]) -> FileNames:
    """Make the names of what `FileNames.stored` returned."""
    places = {
        name: Place(key, tuple(numbers), row, tuple(shape))
        for name, (key, numbers, row, shape) in names["places"].items()
    }
    return FileNames(names["format"], names["model"], names["optimizer"], places)


def as_torch_dist(metadata: Metadata, names: FileNames) -> tuple[Metadata, dict[str, int]]:
    """Return the same record of the same files with the names of `torch_dist`.

    Returns:
        The record; and how many dimensions more than in the files a tensor has, by name.
    """
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    more: dict[str, int] = {}
    trained = {split[0] for name in metadata.state_dict_metadata if (split := names.split(name)) and split[1]}

    def aliases(file_name: str) -> Iterator[tuple[str, Place]]:
        if (split := names.split(file_name)) is None:
            return
        name, kind = split
        place = names.places[name]
        yield (f"{OPTIMIZER_STATE}{kind}." if kind else "") + place.key, place
        if names.format == FSDP_DTENSOR and not kind and name in trained:
            yield MASTER_WEIGHTS + place.key, place

    entries: dict[str, Any] = metadata.state_dict_metadata
    for file_name, entry in entries.items():
        for key, place in (known := [*aliases(file_name)]):
            more[key] = len(place.numbers)
            tensor = tensors.setdefault(key, TensorStorageMetadata(entry.properties, torch.Size(place.shape), []))
            tensor.chunks += [_moved_chunk(chunk, place) for chunk in entry.chunks]
        if not known:
            tensors[file_name] = entry
    for index, stored in metadata.storage_data.items():
        for key, place in (known := [*aliases(index.fqn)]):
            storage[MetadataIndex(key, _moved(index.offset, place))] = stored
        if not known:
            storage[index] = stored
    return replace(metadata, state_dict_metadata=tensors, storage_data=storage), more


def _moved(offset: Any, place: Place) -> torch.Size:
    rows = [place.row + first for first in offset[:1]]
    return torch.Size([*place.numbers, *rows, *offset[1:]])


def _moved_chunk(chunk: ChunkStorageMetadata, place: Place) -> ChunkStorageMetadata:
    sizes = torch.Size([*(1 for _ in place.numbers), *chunk.sizes])
    return ChunkStorageMetadata(offsets=_moved(chunk.offsets, place), sizes=sizes)
