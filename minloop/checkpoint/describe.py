"""What a checkpoint holds, and its weights as one file: on any machine, without a group, a GPU or the model."""

import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from minloop.checkpoint import content, directory
from minloop.checkpoint.hf.files import WEIGHTS, require_dtype, write_weights
from minloop.checkpoint.integrity import content_faults, files_to_verify, structural_faults
from minloop.checkpoint.reading import SavedCheckpoint, read_checkpoint, read_part
from minloop.disk import sync

OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class TensorDescription:
    """A tensor of the whole model; layers that are alike are stacked in its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size without the file format's own."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class CheckpointDescription:
    """What a checkpoint holds; `print` shows it.

    Attributes:
        directory: the checkpoint's own directory.
        format: of its files: "torch_dist" (DDP, ZeRO-1), "fsdp_dtensor" (Megatron FSDP) or "torch_dcp" (torch FSDP2).
        iteration: optimizer steps taken; None if it does not say.
        layout: sizes of the groups that saved it ("tp", "cp", "ep", "expt_tp", "pp", "dp"); empty if not by minloop.
        architecture: the fields that decide shape and meaning of the weights; empty if not by minloop.
        optimizer_kind: "fp32", "float16" (DDP, fp32 master weights) or "distributed" (ZeRO-1); None if not by minloop.
        weights: tensors of the model by name.
        optimizer: tensors of the optimizer by name: moments and master weights.
        counters: consumed_samples and so on.
        file_bytes: bytes of all files.
    """

    directory: Path
    format: str
    iteration: int | None
    layout: dict[str, int]
    architecture: dict[str, Any]
    optimizer_kind: str | None
    weights: dict[str, TensorDescription]
    optimizer: dict[str, TensorDescription]
    counters: dict[str, int]
    file_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(tensor.shape) for tensor in self.weights.values())

    def __str__(self) -> str:
        def listed(fields: dict[str, Any]) -> str:
            return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None) or "-"

        width = max((len(name) for name in self.weights), default=0)
        moments: dict[str, list[TensorDescription]] = defaultdict(list)
        for name, tensor in self.optimizer.items():
            moments[".".join(name.split(".")[:3])].append(tensor)
        return "\n".join(
            [
                f"{self.directory}",
                f"format         {self.format}",
                f"iteration      {self.iteration}",
                f"counters       {listed(self.counters)}",
                f"layout         {listed(self.layout)}",
                f"architecture   {listed(self.architecture)}",
                f"optimizer      {self.optimizer_kind or '-'}",
                f"files          {_text(self.file_bytes)}",
                f"weights        {self.num_parameters:,} parameters, {_size(self.weights.values())}",
                *(f"  {name:{width}}  {tensor}" for name, tensor in sorted(self.weights.items())),
                *(f"{name}  {len(part)} tensors, {_size(part)}" for name, part in sorted(moments.items())),
            ]
        )


def describe_checkpoint(checkpoint: str | Path) -> CheckpointDescription:
    """Describe a checkpoint, or a run's newest with all its files whole; nothing that these hold is executed.

    Contents are not compared with digests: see `verify_checkpoint`.

    Raises:
        FileNotFoundError: no complete checkpoint there.
        CheckpointError: a file is damaged, of another format, or holds more than plain data.
    """
    opened = read_checkpoint(directory.resolve(checkpoint))
    tensors = {
        name: TensorDescription(tuple(tensor.size), tensor.properties.dtype)
        for name, tensor in opened.metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    saved: dict[str, Any] = opened.common.get("minloop", {})
    return CheckpointDescription(
        directory=opened.path,
        format=opened.format,
        iteration=opened.common.get("iteration"),
        layout=saved.get("layout", {}),
        architecture=saved.get("architecture", {}),
        optimizer_kind=saved.get("optimizer_kind"),
        weights={name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER)},
        optimizer={name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER)},
        counters={name: saved[name] for name in content.COUNTERS if name in saved},
        file_bytes=sum(file.stat().st_size for file in opened.path.iterdir() if file.is_file()),
    )


def export_weights(
    checkpoint: str | Path, target: str | Path, *, dtype: torch.dtype | None = None, verify: bool | None = None
) -> Path:
    """Write the weights in full into ``model.safetensors``, under the names and in the shapes of `describe_checkpoint`.

    Tensors are written as they are read: memory holds the largest one, and one of its saved parts. The file gets its
    name when it is complete. For the names and shapes that transformers expects see `save_hf_weights`.

    Args:
        checkpoint: a checkpoint, or a run's directory: then the newest one, or, if that is damaged, the one before it,
            which is said.
        target: a directory, made if need be.
        dtype: of all weights in the file, float32, bfloat16 or float16; None keeps that of the checkpoint.
        verify: as in `load_checkpoint`.
    Returns:
        The file.
    Raises:
        FileNotFoundError: no complete checkpoint there.
        FileExistsError: the file is there already.
        CheckpointError: a file of the checkpoint is damaged, or holds more than plain data.
        ValueError: the weights are of several dtypes, and `dtype` says not which to write, or one that is not written.
    """
    file = Path(target) / WEIGHTS
    if file.exists():
        raise FileExistsError(f"{file} is there already: delete it, or write into another directory")
    opened = read_checkpoint(_sound(checkpoint, verify))
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
    wanted = require_dtype(dtype or saved.pop())
    parts: dict[str, list[MetadataIndex]] = defaultdict(list)
    for index in opened.metadata.storage_data:
        parts[index.fqn].append(index)
    tensors = (_full(opened, weights[name], parts[name], wanted) for name in weights)
    shapes = {name: tuple(tensor.size) for name, tensor in weights.items()}
    unfinished = file.with_name(file.name + directory.UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir(parents=True)
    try:
        write_weights(unfinished, shapes, tensors, wanted, max_shard_size=sys.maxsize)
        (unfinished / WEIGHTS).replace(file)
        sync(file.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return file


def _sound(checkpoint: str | Path, verify: bool | None) -> Path:
    """The checkpoint that is meant, its contents compared; of a run's, the newest that is not damaged."""

    def faults_of(path: Path) -> list[str]:
        faults = structural_faults(path)
        if not faults and verify is not False:
            faults = content_faults(path, files_to_verify(path, without_digest=verify is True))
        return faults

    return directory.newest_sound(checkpoint, lambda: directory.candidates(checkpoint), faults_of)


def _full(
    opened: SavedCheckpoint, tensor: TensorStorageMetadata, parts: list[MetadataIndex], dtype: torch.dtype
) -> torch.Tensor:
    full = torch.empty(tensor.size, dtype=dtype)
    for index in parts:
        part = read_part(opened, index)
        place = zip(index.offset or (), part.shape, strict=True)
        full[tuple(slice(first, first + length) for first, length in place)] = part
    return full


def _size(tensors: Iterable[TensorDescription]) -> str:
    return _text(sum(tensor.bytes for tensor in tensors))


def _text(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
