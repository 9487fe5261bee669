"""Files of text, read in order, in chunks of about a megabyte, from any position: JSON Lines, Parquet, plain text."""

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

CHUNK_BYTES = 1 << 20  # enough that handing a chunk to a process costs nothing beside its work, little enough to hold

Format = Literal["jsonl", "parquet", "text"]
FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Position:
    """Where a chunk begins: `record` (from 0) of input number `file`, at byte `offset` of its uncompressed lines."""

    file: int = 0
    record: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Chunk:
    """Records that lie together.

    Attributes:
        path: the file that they are of.
        start: where the first of them is.
        end: where the next chunk begins.
        records: lines of JSON, rows {column: value}, or one text file's bytes.
        bytes_read: of the inputs as they lie on the disk, up to here.
    """

    path: Path
    start: Position
    end: Position
    records: list[Any]
    bytes_read: int


def format_of(path: Path) -> Format:
    """By the name, without .gz or .zst: .jsonl, .ndjson and .json hold a record a line; unknown names are text."""
    suffix = Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix
    return FORMATS.get(suffix.lower(), "text")


def check_inputs(paths: Sequence[Path], keys: Sequence[str]) -> None:
    """Refuse what can be seen not to work before it is read.

    Raises:
        ValueError: no file, one that is not there, or a Parquet file without a column of `keys`.
        RuntimeError: pyarrow is needed and not there.
    """
    if not paths or not keys:
        raise ValueError(f"no inputs, or no keys: {list(map(str, paths))}, {list(keys)}")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file: inputs are files of text, JSON Lines or Parquet")
        kind = format_of(path)
        if kind == "text" and len(keys) > 1:
            raise ValueError(f"{path} is plain text, one document, which has no keys {', '.join(keys)}: give one key")
        if kind == "parquet":
            names = _pyarrow("parquet", path).read_schema(path).names
            if absent := [key for key in keys if key not in names]:
                raise ValueError(f"{path} has no column {', '.join(absent)}, only {', '.join(names)}")
        elif path.suffix == ".zst":
            _pyarrow("", path)


def read_chunks(paths: Sequence[Path], keys: Sequence[str], start: Position) -> Iterator[Chunk]:
    """Yield the records of all files from `start` on.

    Raises:
        ValueError: a compressed file or a Parquet file is damaged or cut short.
    """
    before = sum(path.stat().st_size for path in paths[: start.file])
    for index, path in enumerate(paths[start.file :], start.file):
        position = start if index == start.file else Position(index)
        reader = {"jsonl": _lines, "parquet": _rows, "text": _whole}[format_of(path)]
        try:
            for records, end, read in reader(path, keys, position):
                yield Chunk(path, position, end, records, before + read)
                position = end
        except (OSError, EOFError, ValueError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # the system's own, which names the file
            raise ValueError(f"{path} cannot be read to its end ({error}): it is damaged, or cut short") from error
        before += path.stat().st_size


_Piece = tuple[list[Any], Position, int]


def _lines(path: Path, keys: Sequence[str], start: Position) -> Iterator[_Piece]:
    with path.open("rb") as raw, _uncompressed(path, raw) as stream:
        _skip(stream, raw, start.offset)
        position = start
        while lines := stream.readlines(CHUNK_BYTES):
            position = Position(start.file, position.record + len(lines), position.offset + sum(map(len, lines)))
            yield lines, position, raw.tell()


def _whole(path: Path, keys: Sequence[str], start: Position) -> Iterator[_Piece]:
    if start.record == 0:
        with path.open("rb") as raw, _uncompressed(path, raw) as stream:
            yield [stream.read()], Position(start.file, 1), raw.tell()


def _rows(path: Path, keys: Sequence[str], start: Position) -> Iterator[_Piece]:
    parquet = _pyarrow("parquet", path)
    with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        position, size, total = start, path.stat().st_size, file.metadata.num_rows
        rows, held, skipped = [], 0, 0
        for batch in file.iter_batches(batch_size=64, columns=list(keys)):  # few rows, as each may be large
            skip = min(batch.num_rows, max(0, start.record - skipped))
            skipped, batch = skipped + batch.num_rows, batch.slice(skip)
            rows, held = rows + batch.to_pylist(), held + batch.nbytes
            if rows and (held >= CHUNK_BYTES or position.record + len(rows) == total):
                position = Position(start.file, position.record + len(rows))
                yield rows, position, size * position.record // total
                rows, held = [], 0


def _uncompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        arrow = _pyarrow("", path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw), "zstd"), CHUNK_BYTES)
    return raw


def _skip(stream: IO[bytes], raw: IO[bytes], offset: int) -> None:
    if stream is raw:
        stream.seek(offset)
        return
    while offset:
        if not (skipped := len(stream.read(min(offset, CHUNK_BYTES)))):
            raise EOFError("it is shorter than it was")
        offset -= skipped


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise RuntimeError(f"{path} needs pyarrow ({error}): pip install minloop[data]") from error
