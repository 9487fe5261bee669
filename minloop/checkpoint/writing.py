"""What mcore does in a save, taken apart: planned by all ranks, copied off the device, written on threads, finished.

Planning runs collectives on the default group and must stay between training steps. Writing runs none. mcore's own way
of joining the parts drops the reason of a failed write, and leaves the other ranks waiting if its first rank fails.
"""

import contextlib
import hashlib
import io
import os
import queue
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import WriteBucket
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _write_item,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.storage import WriteResult

from minloop.checkpoint.manifest import ALGORITHM, FileRecord
from minloop.messages import without_log_lines, without_warnings

WRITERS = 2
"""Threads, and files, of a rank. One serialises about 1 GB/s, or 0.6 with checksums; they run beside training's own."""


class Written(NamedTuple):
    """What one file of a rank is: where in it which tensor lies, and the file's size and digest."""

    results: list[WriteResult]
    record: FileRecord


class Plan(TorchDistSaveShardedStrategy):
    """mcore's plan of a save: which rank writes which tensor into which file."""

    def __init__(self, sharded: dict[str, Any], unfinished: Path, content: dict[str, Any], replicas: Any) -> None:
        """Make the plan; every rank calls it.

        Args:
            sharded: mcore's sharded state dict.
            content: mcore's content metadata, saved along.
            replicas: the process group over which equal tensors lie: its ranks share the work of writing them.
        """
        super().__init__(thread_count=WRITERS)
        self.writer: Any = None
        self.metadata: Any = None
        strategy = FullyParallelSaveStrategyWrapper(self, replicas) if replicas.size() > 1 else self
        quiet = without_log_lines("megatron.core.dist_checkpointing.strategies.torch", "deprecated")
        with without_warnings(), quiet, _results_stay_in_process():
            dist_checkpointing.save(
                sharded,
                str(unfinished),
                cast("Any", strategy),
                content_metadata=content,
                async_sharded_save=True,
                async_strategy="mcore",
            )

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> Any:
        self.writer, self.metadata, _ = save_state_dict_ret
        return AsyncRequest(None, (), [])

    def start_writing(self, *, detached: bool, checksums: bool) -> list[Future[Written]]:
        """Copy this rank's tensors to the CPU and start to write them, on threads that end by themselves.

        Args:
            detached: copy what lies on the CPU already, too, so that training may go on changing it.
        """
        pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="minloop checkpoint")
        try:
            buckets = _copies(self.writer.write_buckets, detached)
            return [pool.submit(_write, bucket, self.writer.transforms, checksums) for bucket in buckets]
        except Exception as error:  # no memory, say; the other ranks must hear of it
            return [pool.submit(_raise, error)]
        finally:
            pool.shutdown(wait=False)

    def finish(self, directory: Path, written: list[Written]) -> None:
        """Write mcore's own records of the whole, after all ranks' files. On the first rank."""
        self.writer.finish(self.metadata, [file.results for file in written])
        save_config(CheckpointingConfig(self.backend, self.version), str(directory))


def _copies(buckets: list[WriteBucket], detached: bool) -> list[WriteBucket]:
    """Copy tensors to the CPU, those on a GPU through pinned memory, which PyTorch keeps for the next save."""
    copies: list[WriteBucket] = []
    for path, name, (objects, tensors) in buckets:
        copied: list[Any] = []
        while tensors:  # taken away one by one, so that what mcore itself copied is freed on the way
            item, tensor = tensors.pop()
            if tensor.device.type != "cpu":
                tensor = tensor.to("cpu", non_blocking=True)
            elif detached:
                tensor = tensor.clone()
            copied.append((item, tensor))
        copies.append((path, name, (objects, copied)))
    torch.cuda.synchronize()
    return copies


def _raise(error: Exception) -> Written:
    raise error


def _write(bucket: WriteBucket, transforms: Any, checksums: bool) -> Written:
    path, name, (objects, tensors) = bucket
    with Path(path).open("wb") as file:
        stream = _Stream(file, checksums)
        format = SerializationFormat.TORCH_SAVE
        results = [_write_item(transforms, stream, data, item, name, format) for item, data in objects + tensors]
        stream.finish()
    return Written(results, FileRecord(name, stream.tell(), stream.digest()))


class _Stream(io.IOBase):
    """A file for `torch.save`, which must not see it fail.

    PyTorch 2.11 answers a full disk with "unexpected pos 704 vs 598", and with a segmentation fault when Python's
    garbage collector comes upon its writer. Here the first error is kept until `finish`.
    """

    def __init__(self, file: BinaryIO, checksums: bool) -> None:
        self._file = file
        self._size = 0
        self._hash = hashlib.new(ALGORITHM) if checksums else None
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        if self._hash is not None:
            self._hash.update(data)
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...

    def finish(self) -> None:
        """Have all that was written on the disk; raise what went wrong."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())

    def digest(self) -> str | None:
        return self._hash.hexdigest() if self._hash else None


@contextlib.contextmanager
def _results_stay_in_process() -> Generator[None]:
    """Let mcore plan with a plain queue in the place of its own.

    Its own queue belongs to a manager process that it spawns, which imports the user's script once more and outlives
    the save; nothing is written in another process here.
    """
    own = filesystem_async._results_queue  # pyright: ignore[reportPrivateUsage]
    filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        filesystem_async._results_queue = own  # pyright: ignore[reportPrivateUsage]
