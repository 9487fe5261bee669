"""A checkpoint's weights as one safetensors file, made offline: one process, no group, no model, bounded memory."""

import io
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minloop.checkpoint import directory
from minloop.checkpoint.describe import OPTIMIZER
from minloop.checkpoint.hf.files import WEIGHTS, write_weights
from minloop.checkpoint.reading import SavedCheckpoint, load_plain, read_checkpoint, read_slice


def export_weights(checkpoint: str | Path, target: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the weights in full into ``model.safetensors``, under the names and in the shapes of `describe_checkpoint`.

    Tensors are written as they are read: memory holds the largest one, and one of its saved parts. For the names and
    shapes that transformers expects see `save_hf_weights`.

    Args:
        checkpoint: a checkpoint, or a run's directory: then the newest undamaged one.
        target: a directory, made if need be.
        dtype: of all weights in the file; None keeps that of the checkpoint.
    Returns:
        The file.
    Raises:
        FileNotFoundError: no complete checkpoint there.
        FileExistsError: the file is there already.
        CheckpointError: a file of the checkpoint is damaged, or holds more than plain data.
        ValueError: the weights are of several dtypes, and `dtype` says not which to write.
    """
    opened = read_checkpoint(directory.resolve(checkpoint))
    weights = {
        name: tensor
        for name, tensor in opened.metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata) and not name.startswith(OPTIMIZER)
    }
    saved = {tensor.properties.dtype for tensor in weights.values()}
    if dtype is None and len(saved) != 1:
        raise ValueError(
            f"{opened.path} holds weights of {', '.join(sorted(map(str, saved)))}: say which dtype to write"
        )
    wanted = dtype or saved.pop()
    file = Path(target) / WEIGHTS
    if file.exists():
        raise FileExistsError(f"{file} is there already: delete it, or write into another directory")
    file.parent.mkdir(parents=True, exist_ok=True)
    places: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for index, place in opened.metadata.storage_data.items():
        places[index.fqn].append((tuple(index.offset or ()), place))
    tensors = (_full(opened, weights[name], places[name], wanted) for name in weights)
    shapes = {name: tuple(tensor.size) for name, tensor in weights.items()}
    write_weights(file.parent, shapes, tensors, wanted, max_shard_size=sys.maxsize)
    return file


def _full(
    opened: SavedCheckpoint, tensor: TensorStorageMetadata, places: list[tuple[Any, Any]], dtype: torch.dtype
) -> torch.Tensor:
    full = torch.empty(tensor.size, dtype=dtype)
    for offset, place in places:
        part = load_plain(io.BytesIO(read_slice(opened.path, place)), opened.path / place.relative_path)
        full[tuple(slice(first, first + length) for first, length in zip(offset, part.shape, strict=True))] = part
    return full
