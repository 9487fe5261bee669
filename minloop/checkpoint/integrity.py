"""Whether a checkpoint's files are what was saved: sizes always, contents on request.

The list of files, written last, is mcore's integrity.json (`dist_checkpointing.load(verify_integrity=True)` reads it)
plus their sizes; without checksums "algorithm" is null and "files" is empty:

    {"algorithm": "sha256", "files": {"__0_0.distcp": "<hex digest>", …}, "bytes": {"__0_0.distcp": 81920, …}}

Without it, sizes are checked by `.metadata`, which says where every part of every tensor ends, and contents by the
CRC-32 that PyTorch stores with every part (and ignores when it loads: a flipped byte would become a weight).
"""

import hashlib
import io
import json
import math
import re
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from minloop.checkpoint.foreign import foreign_format
from minloop.checkpoint.full_names import OPTIMIZER_STATE
from minloop.checkpoint.reader_errors import is_of_the_reader, name_file
from minloop.checkpoint.reading import (
    READERS,
    CheckpointError,
    check_format,
    named_errors,
    read_common,
    read_metadata,
    read_slice,
    with_common_names,
)
from minloop.disk import sync, write_durably

MANIFEST = "integrity.json"
ALGORITHM = "sha256"
OBJECT = re.compile(r"[^/]*/shard_\d+(\.\d+)*_\d+(\.\d+)*")
"""Names of objects, which mcore takes apart: ".../shard_<place>_<of how many>"."""


class FileRecord(NamedTuple):
    """Of one file: its name, its size in bytes, and its hex digest if asked for."""

    name: str
    size: int
    digest: str | None


def record_file(path: Path, checksums: bool) -> FileRecord:
    """Make a file durable and record it as it can now be read."""
    sync(path)
    digest = None
    if checksums:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, ALGORITHM).hexdigest()
    return FileRecord(path.name, path.stat().st_size, digest)


def write_manifest(checkpoint: Path, records: list[FileRecord], checksums: bool) -> None:
    """Write the manifest of a checkpoint: its ranks' `records` and every other file now in it.

    Raises:
        RuntimeError: a file that a rank wrote is not seen here, or not in its size.
    """
    for record in records:
        path = checkpoint / record.name
        size = path.stat().st_size if path.is_file() else None
        if size != record.size:
            raise RuntimeError(
                f"{path} was written with {record.size} bytes and is {'absent' if size is None else f'{size} bytes'}: "
                "the directory was removed or changed while saving, or does not lie in storage that all ranks share"
            )
    written = {record.name for record in records} | {MANIFEST}
    others = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.name not in written)
    records = records + [record_file(path, checksums) for path in others]
    content = {
        "algorithm": ALGORITHM if checksums else None,
        "files": {record.name: record.digest for record in records if record.digest},
        "bytes": {record.name: record.size for record in records},
    }
    write_durably(checkpoint / MANIFEST, json.dumps(content, indent=1))


def verify_checkpoint(directory: str | Path, *, contents: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint, one line for each file or tensor; an empty list means nothing is.

    Works on one process, without a group, a GPU or the model, and runs nothing that the files hold.

    Args:
        directory: one checkpoint ("…/iter_0000005").
        contents: read every file and compare it with its digest, or, where none was saved, with PyTorch's CRC-32;
            False looks at names and sizes only.
    Raises:
        OSError, MemoryError: it cannot be read here and now (rights, open files, memory), which is no fault of its.
    """
    path = Path(directory)
    if not (path / "metadata.json").exists() and any(path.glob("iter_*")):
        return [f"{path} is no checkpoint but holds some: verify one of them, such as latest_checkpoint() returns"]
    whole = (path / ".metadata").exists() and (path / "metadata.json").exists()
    if not whole and (said := foreign_format(path)):
        return [f"{path} {said}"]
    if faults := structural_faults(path):
        return faults
    if not contents:
        return []
    return content_faults(path, files_to_verify(path, without_digest=True))


def structural_faults(path: Path) -> list[str]:
    """Faults that show without reading tensors: of names, sizes, format, and the records of what lies where.

    Raises:
        OSError, MemoryError: of the reader's, see `reader_errors`.
    """
    try:
        format = check_format(path)
        metadata = read_metadata(path)
        if absent := _wrong_sizes(path, metadata):
            return absent
        with_common_names(path, format, metadata, read_common(path, metadata))
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:  # another process deletes it, or its disk is broken
        if is_of_the_reader(error):
            raise
        return [f"{path} cannot be read: {error}"]
    return [*_incomplete_tensors(path, metadata)]


def files_to_verify(path: Path, *, without_digest: bool) -> list[str]:
    """Names of the files whose contents can be verified: those with a digest and, if asked for, the other .distcp."""
    names = [*read_manifest(path)[1]]
    if without_digest:
        names += sorted(file.name for file in path.glob("*.distcp") if file.name not in names)
    return names


def content_faults(path: Path, names: Iterable[str]) -> list[str]:
    """Read the files called `names`; return a line for each that differs from what was saved.

    Raises:
        CheckpointError: integrity.json or `.metadata` cannot be read.
        OSError, MemoryError: of the reader's, see `reader_errors`.
    """
    _, digests, algorithm = read_manifest(path)
    metadata = read_metadata(path)

    def fault(name: str) -> str:
        try:
            if name in digests:
                return _wrong_digest(path / name, digests[name], algorithm)
            return _wrong_crc(path, name, metadata)
        except Exception as error:  # garbage makes readers raise anything
            if is_of_the_reader(error):
                name_file(error, path / name)
                raise
            return f"{path / name} cannot be read: {error}"

    with ThreadPoolExecutor(READERS) as pool:
        return [text for text in pool.map(fault, names) if text]


def read_manifest(path: Path) -> tuple[dict[str, int], dict[str, str], str]:
    """Return what integrity.json tells: bytes of files, hex digests of files, and the digests' algorithm.

    Raises:
        CheckpointError: it is there but not what it should be.
    """
    file = path / MANIFEST
    if not file.exists():
        return {}, {}, ""
    with named_errors(file):
        content: dict[str, Any] = json.loads(file.read_text())
        sizes = {str(name): int(size) for name, size in content.get("bytes", {}).items()}
        digests = {str(name): str(digest) for name, digest in content["files"].items()}
        algorithm = str(content.get("algorithm") or ALGORITHM)
        if any(Path(name).name != name for name in sizes | digests):
            raise ValueError("it names files outside the checkpoint")
        if digests and algorithm not in hashlib.algorithms_guaranteed:
            raise ValueError(f"hashlib knows no algorithm {algorithm!r}")
        return sizes, digests, algorithm


def _wrong_sizes(path: Path, metadata: Metadata) -> list[str]:
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    exact = read_manifest(path)[0]
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    faults: list[str] = []
    for name in sorted(ends.keys() | exact.keys()):
        size, expected = sizes.get(name), exact.get(name)
        if size is None:
            faults.append(f"{path / name} is missing")
        elif expected is not None and size != expected:
            faults.append(f"{path / name} has {size} bytes, saved were {expected}")
        elif size < ends.get(name, 0):
            faults.append(f"{path / name} has {size} bytes, its tensors end at {ends[name]}: it was cut short")
    return faults


def _incomplete_tensors(path: Path, metadata: Metadata) -> Iterable[str]:
    places = {(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            if (name, ()) not in places:
                yield f"{path / '.metadata'} says of the object {name} not where it lies"
            if not OBJECT.fullmatch(name):
                yield f"{path / '.metadata'} names an object {name!r}, without the place that mcore's names end with"
            continue
        stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks if (name, tuple(chunk.offsets)) in places)
        # an optimizer holds nothing of layers that are frozen
        held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        expected = held if name.startswith(OPTIMIZER_STATE) else math.prod(tensor.size)
        if stored != expected:
            yield f"{path / '.metadata'} places {stored} of the {expected} elements of {name}"


def _wrong_digest(file: Path, digest: str, algorithm: str) -> str:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, algorithm).hexdigest()
    return (
        "" if found == digest else f"{file} is not what was saved: its {algorithm} is {found[:12]}…, not {digest[:12]}…"
    )


def _wrong_crc(path: Path, name: str, metadata: Metadata) -> str:
    for index, place in metadata.storage_data.items():
        if place.relative_path != name or place.transform_descriptors:
            continue
        try:
            with zipfile.ZipFile(io.BytesIO(read_slice(path, place))) as archive:
                wrong = archive.testzip()
        except zipfile.BadZipFile as error:
            wrong = str(error)
        if wrong:
            return f"{path / name} is not what was saved: the CRC-32 of {index.fqn} is wrong ({wrong})"
    return ""
