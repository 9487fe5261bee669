"""Indexed text on the disk, Megatron-LM's .bin and .idx: written piece by piece, checked before it is used.

An .idx is b"MMIDIDX\\0\\0", the version 1 (uint64), the type of the ids (uint8), the number n of sequences and that of
document boundaries (uint64), then n lengths (int32), n offsets in the .bin (int64) and the boundaries (int64, the
number of sequences before each document, from 0 to n). mcore's `IndexedDatasetBuilder` writes the same, from Python
lists of all sequences; here memory does not grow with the data, and a file that was begun can be gone on with.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
from megatron.core.datasets.indexed_dataset import DType, get_bin_path, get_idx_path

_MAGIC, _VERSION, _HEADER = b"MMIDIDX\x00\x00", 1, struct.Struct("<9sQBQQ")
_BLOCK = 1 << 20  # numbers converted at a time


def check_untaken(prefix: str) -> None:
    """Raise ValueError if there are files under `prefix`, or what mcore has cached for such files."""
    for taken in (Path(get_idx_path(prefix)), Path(prefix)):
        if taken.exists():
            # Sample indices cached under the prefix would go on being used for new data: they are keyed on its path.
            raise ValueError(f"{taken} exists: choose another output_prefix, or delete {prefix}, {prefix}.bin and .idx")


class IndexedWriter:
    """Writes documents to ``prefix``.bin, .lengths and .documents, from which `finish` makes ``prefix``.idx."""

    def __init__(self, prefix: str, dtype: type[numpy.number], sizes: dict[str, int] | None = None) -> None:
        """`sizes`: go on with files that were begun, cut to these lengths in bytes, which `flush` returned."""
        self._prefix, self._dtype = prefix, dtype
        self._files: dict[str, IO[bytes]] = {}
        for suffix in ("bin", "lengths", "documents"):
            path = Path(f"{prefix}.{suffix}")
            self._files[suffix] = path.open("r+b" if sizes else "wb")  # closed by `close`
            if sizes:
                if path.stat().st_size < sizes[suffix]:
                    raise ValueError(f"{path} has lost what was written: begin anew, with resume=False")
                self._files[suffix].truncate(sizes[suffix])
                self._files[suffix].seek(sizes[suffix])

    @property
    def sequences(self) -> int:
        return self._files["lengths"].tell() // 4

    @property
    def tokens(self) -> int:
        return self._files["bin"].tell() // DType.size(self._dtype)

    def write(self, ids: bytes, lengths: numpy.ndarray, sequences: numpy.ndarray) -> None:
        """Append documents.

        Args:
            ids: of all of them, in the writer's type.
            lengths: of their sequences, in tokens.
            sequences: how many each document has.
        """
        ends = self.sequences + numpy.cumsum(sequences, dtype=numpy.int64)
        self._files["bin"].write(ids)
        self._files["lengths"].write(lengths.astype("<i4").tobytes())
        self._files["documents"].write(ends.astype("<i8").tobytes())

    def flush(self) -> dict[str, int]:
        """Wait until all is on the disk; return the lengths of the files."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {suffix: file.tell() for suffix, file in self._files.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self) -> None:
        """Write the .idx, whole on the disk when this returns."""
        sequences, documents = self.sequences, self._files["documents"].tell() // 8
        self.flush()
        with Path(f"{self._prefix}.idx").open("wb") as index:
            code = DType.code_from_dtype(self._dtype)
            index.write(_HEADER.pack(_MAGIC, _VERSION, code, sequences, documents + 1))
            for block in self._blocks("lengths", "<i4"):
                index.write(block.tobytes())
            offset = 0
            for block in self._blocks("lengths", "<i4"):
                ends = offset + numpy.cumsum(block, dtype=numpy.int64) * DType.size(self._dtype)
                index.write(numpy.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
                offset = int(ends[-1])
            index.write(struct.pack("<q", 0))
            for block in self._blocks("documents", "<i8"):
                index.write(block.tobytes())
            index.flush()
            os.fsync(index.fileno())

    def _blocks(self, suffix: str, dtype: str) -> Iterator[numpy.ndarray]:
        with Path(f"{self._prefix}.{suffix}").open("rb") as file:
            while (block := numpy.fromfile(file, dtype, _BLOCK)).size:
                yield block


@dataclass(frozen=True)
class IndexHeader:
    """What the first 34 bytes of an .idx say."""

    dtype: type[numpy.number]
    sequences: int
    documents: int


def check_indexed(prefix: str | Path) -> IndexHeader:
    """Read the header of `prefix`.idx and compare the sizes of both files with it; takes no time, whatever their size.

    Raises:
        ValueError: a file is missing, the .idx is of another format or version, either is shorter than the header and
            the last sequence say, or there is no token; mcore would assert, or fail when that sequence is read.
    """
    idx, binary = Path(get_idx_path(str(prefix))), Path(get_bin_path(str(prefix)))
    for path in (idx, binary):
        if not path.is_file():
            raise ValueError(f"{path} does not exist: a prefix names two files, {binary.name} and {idx.name}")
    with idx.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size or not start.startswith(_MAGIC):
            raise ValueError(f"{idx} is no index: it does not begin with {_MAGIC!r} and a header")
        _, version, code, sequences, boundaries = _HEADER.unpack(start)
        if version != _VERSION or code not in [member.value for member in DType]:
            raise ValueError(
                f"{idx} is of version {version}, type {code}: only version {_VERSION} is read; write it anew"
            )
        expected = _HEADER.size + 12 * sequences + 8 * boundaries
        # A multimodal index has one more byte a sequence.
        if idx.stat().st_size not in (expected, expected + sequences):
            raise ValueError(f"{idx} has {idx.stat().st_size} bytes, and by its header {expected}: it is cut short")
        if not sequences:
            raise ValueError(f"{prefix} holds no sequence: there is nothing to train on")
    dtype: Any = DType.dtype_from_code(code)
    header = IndexHeader(dtype, sequences, boundaries - 1)
    size = bytes_before(prefix, header, sequences)
    if binary.stat().st_size < size:
        raise ValueError(f"{binary} has {binary.stat().st_size} bytes, and by {idx.name} {size}: it is cut short")
    if not size:
        raise ValueError(f"{prefix} holds no token, and {sequences} sequences: there is nothing to train on")
    return header


def bytes_before(prefix: str | Path, header: IndexHeader, sequence: int) -> int:
    """Where the first `sequence` sequences end in `prefix`.bin, by the .idx; they have tokens if that is above 0."""
    if not sequence:
        return 0
    with Path(get_idx_path(str(prefix))).open("rb") as file:
        file.seek(_HEADER.size + 4 * (sequence - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * header.sequences + 8 * (sequence - 1))
        (offset,) = struct.unpack("<q", file.read(8))
    return offset + length * DType.size(header.dtype)
