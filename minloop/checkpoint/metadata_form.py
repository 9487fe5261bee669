"""Whether `.metadata`, once unpickled, has the form that mcore and PyTorch take for granted.

Whoever wrote the folder chose what it holds, and a flipped byte makes any value of any other: a wrong field is named
here, before anything is made of it.
"""

import math
from operator import add, gt
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

BYTES = 2**63
"""PyTorch makes no tensor of as many."""
PROPERTIES: dict[str, tuple[type, ...]] = {
    "dtype": (torch.dtype,),
    "layout": (torch.layout,),
    "requires_grad": (bool,),
    "memory_format": (torch.memory_format,),
    "pin_memory": (bool, type(None)),
}
"""What mcore hands to `torch.empty`: these and no others."""


def check_metadata(metadata: Any) -> None:
    """Check everything in a checkpoint's `Metadata` that minloop, mcore or PyTorch reads.

    Raises:
        ValueError: the message names the field.
    """
    _require(type(metadata) in (Metadata, MCoreMetadata), "it", metadata, "PyTorch's Metadata")
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    _require(type(tensors) is dict, "state_dict_metadata", tensors, "a dict")
    _require(type(places) is dict, "storage_data", places, "a dict")
    # the first mcores' dummy class has none of these
    version, meta = getattr(metadata, "version", None), getattr(metadata, "storage_meta", None)
    planned = getattr(metadata, "planner_data", None)
    _require(version is None or type(version) is str, "version", version, "a string")
    _require(meta is None or type(meta) is StorageMeta, "storage_meta", meta, "a StorageMeta")
    _require(planned is None or type(planned) is dict, "planner_data", planned, "a dict")
    for name, entry in tensors.items():
        if type(name) is not str:
            raise _error("a name in state_dict_metadata", name, "a string")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(name, entry)
        elif type(entry) is not BytesStorageMetadata:
            raise _error(f"state_dict_metadata[{name!r}]", entry, "a tensor's or an object's")
    files = set[str]()
    for index, place in places.items():
        _check_index(index, tensors)
        _check_place(index.fqn, place, files)


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    def wrong(field: str, found: Any, wanted: str) -> ValueError:
        return _error(f"state_dict_metadata[{name!r}].{field}", found, wanted)

    size: Any = entry.size
    if not _is_shape(size):
        raise wrong("size", size, "a shape")
    _check_properties(name, entry.properties)
    elements = math.prod(size) or math.prod(length or 1 for length in size)
    if elements * entry.properties.dtype.itemsize >= BYTES:
        raise wrong("size", size, "the shape of a tensor that can be")
    chunks: Any = entry.chunks
    if type(chunks) is not list:
        raise wrong("chunks", chunks, "a list")
    for number, chunk in enumerate(chunks):
        if type(chunk) is not ChunkStorageMetadata:
            raise wrong(f"chunks[{number}]", chunk, "a ChunkStorageMetadata")
        first: Any = chunk.offsets
        lengths: Any = chunk.sizes
        if not (_is_shape(first) and len(first) == len(size)):
            raise wrong(f"chunks[{number}].offsets", first, f"a place in {[*size]}")
        if not (_is_shape(lengths) and len(lengths) == len(size)):
            raise wrong(f"chunks[{number}].sizes", lengths, f"a shape within {[*size]}")
        if any(map(gt, map(add, first, lengths), size)):
            raise wrong(f"chunks[{number}].sizes", lengths, f"a shape that from {[*first]} on is within {[*size]}")


def _check_properties(name: str, properties: Any) -> None:
    field = f"state_dict_metadata[{name!r}].properties"
    _require(type(properties) is TensorProperties, field, properties, "a TensorProperties")
    values = vars(properties)
    for part, kinds in PROPERTIES.items():
        if type(value := values.get(part)) not in kinds:
            raise _error(f"{field}.{part}", value, f"a {kinds[0].__name__}")
    if len(values) != len(PROPERTIES):
        raise ValueError(f"{field} has the fields {', '.join(map(str, values))}, not {', '.join(PROPERTIES)}")
    dtype = properties.dtype
    if properties.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise _error(f"{field}.requires_grad", True, f"False, as that of all tensors of {dtype}")
    _require(
        properties.memory_format is torch.contiguous_format,
        f"{field}.memory_format",
        properties.memory_format,
        "torch.contiguous_format",
    )


def _check_index(index: Any, tensors: dict[str, Any]) -> None:
    if type(index) is not MetadataIndex:
        raise _error("a key of storage_data", index, "a MetadataIndex")
    name: Any = index.fqn
    _require(type(name) is str, "the fqn of a key of storage_data", name, "a string")
    offset: Any = index.offset
    entry = tensors.get(name)
    if type(entry) is TensorStorageMetadata:
        fits = _is_shape(offset) and len(offset) == len(entry.size)
    else:
        fits = offset is None or _is_shape(offset)
    if not fits:
        raise _error(f"the offset of storage_data[{name!r}]", offset, "that of a part")


def _check_place(name: str, place: Any, files: set[str]) -> None:
    """`files` are the names found right before."""

    def wrong(field: str, found: Any, wanted: str) -> ValueError:
        return _error(f"storage_data[{name!r}]{field}", found, wanted)

    if type(place) is not _StorageInfo:
        raise wrong("", place, "a _StorageInfo")
    values = vars(place)  # what was None has not been written
    for part in ("offset", "length"):
        if type(value := values.get(part)) is not int or not 0 <= value < BYTES:
            raise wrong(f".{part}", value, "a count of bytes")
    file = values.get("relative_path")
    if type(file) is not str:
        raise wrong(".relative_path", file, "a string")
    if file not in files and Path(file).name != file:
        raise ValueError(f"it places {name} in {file}, which is no file of the checkpoint")
    files.add(file)
    changes = values.get("transform_descriptors")
    if not (changes is None or (type(changes) in (list, tuple) and all(type(change) is str for change in changes))):
        raise wrong(".transform_descriptors", changes, "a list of strings")


def _is_shape(value: Any) -> bool:
    """A `torch.Size` holds nothing but int64."""
    return type(value) is torch.Size and (not value or min(value) >= 0)


def _require(right: bool, field: str, found: Any, wanted: str) -> None:
    if not right:
        raise _error(field, found, wanted)


def _error(field: str, found: Any, wanted: str) -> ValueError:
    """Objects are not printed: crafted ones may lack what their text is made of."""
    plain = found is None or type(found) in (bool, int, float, str, torch.Size, torch.dtype, torch.memory_format)
    shown = f"{found!r:.60}" if plain else f"a {type(found).__name__}"
    return ValueError(f"{field} is {shown}, not {wanted}")
