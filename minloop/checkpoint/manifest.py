"""The list of a checkpoint's files, written last: sizes always, checksums unless switched off.

It is mcore's own `integrity.json` (`dist_checkpointing.load(verify_integrity=True)` reads it) plus the sizes:

    {"algorithm": "sha256", "files": {"__0_0.distcp": "<hex digest>", …}, "bytes": {"__0_0.distcp": 81920, …}}

Without checksums "algorithm" is null and "files" is empty.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from minloop.checkpoint.durable import sync, write_durably

MANIFEST = "integrity.json"
ALGORITHM = "sha256"


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
