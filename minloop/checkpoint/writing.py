"""What mcore does in a save, taken apart: planned by all ranks, copied off the device, written on threads, finished.

Planning runs collectives on the default group and must stay between training steps. Writing runs none. mcore's own way
of joining the parts drops the reason of a failed write, and leaves the other ranks waiting if its first rank fails.
"""

import contextlib
import hashlib
import io
import mmap
import os
import queue
from collections.abc import Generator, Iterator
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

from minloop.checkpoint.full_names import TORCH_DIST
from minloop.checkpoint.holes import holes_in_optimizers_allowed
from minloop.checkpoint.integrity import ALGORITHM, FileRecord
from minloop.messages import without_log_lines, without_warnings

MOST_WRITERS = 14
ALIGNMENT = 4096
_kept: list[mmap.mmap] = []
"""The memory for copies, from one save to the next."""


def writers() -> int:
    """Threads, and files, of this rank: its share of the cores, but for two that training goes on with.

    One serialises about 6 GB/s, or 1.5 with checksums, holding no lock of Python's.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(MOST_WRITERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 2))


class Written(NamedTuple):
    """What one file of a rank is: where in it which tensor lies, and the file's size and digest."""

    results: list[WriteResult]
    record: FileRecord


class Plan(TorchDistSaveShardedStrategy):
    """mcore's plan of a save: which rank writes which tensor into which file."""

    def __init__(
        self,
        sharded: dict[str, Any],
        unfinished: Path,
        content: dict[str, Any],
        replicas: Any,
        format: str = TORCH_DIST,
    ) -> None:
        """Make the plan; every rank calls it.

        Args:
            sharded: mcore's sharded state dict.
            content: mcore's content metadata, saved along.
            replicas: the process group over which equal tensors lie: its ranks share the work of writing them.
            format: that of the names in `sharded`, noted in metadata.json.
        """
        super().__init__(thread_count=writers())
        self._format = format
        self.writer: Any = None
        self.metadata: Any = None
        strategy = FullyParallelSaveStrategyWrapper(self, replicas) if replicas.size() > 1 else self
        quiet = without_log_lines("megatron.core.dist_checkpointing.strategies.torch", "deprecated")
        with without_warnings(), quiet, _results_stay_in_process(), holes_in_optimizers_allowed():
            dist_checkpointing.save(
                sharded,
                str(unfinished),
                cast("Any", strategy),
                content_metadata=content,
                validate_access_integrity=False,  # `check_parts` has
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
        pool = ThreadPoolExecutor(self.thread_count, thread_name_prefix="minloop checkpoint")
        files: list[Future[Written]] = []
        try:
            for bucket in _copied(self.writer.write_buckets, detached):
                files.append(pool.submit(_write, bucket, self.writer.transforms, checksums))
        except Exception as error:  # no memory, say; the other ranks must hear of it
            files.append(pool.submit(_raise, error))
        finally:
            pool.shutdown(wait=False)
        return files

    def finish(self, directory: Path, written: list[Written]) -> None:
        """Write mcore's own records of the whole, after all ranks' files. On the first rank."""
        self.writer.finish(self.metadata, [file.results for file in written])
        save_config(CheckpointingConfig(self._format, self.version), str(directory))


def _copied(buckets: list[WriteBucket], detached: bool) -> Iterator[WriteBucket]:
    """Copy tensors to the CPU, all at the rate of the bus; yield each bucket when its copies have arrived."""

    def stays(tensor: torch.Tensor) -> bool:
        return not tensor.numel() or (tensor.device.type == "cpu" and not detached)

    moved = [tensor for _, _, (_, tensors) in buckets for _, tensor in tensors if not stays(tensor)]
    room = _room(sum(map(_aligned_size, moved)), pinned=torch.cuda.is_available())
    del moved
    start, arriving = 0, list[tuple[WriteBucket, torch.cuda.Event]]()
    for path, name, (objects, tensors) in buckets:
        copies: list[Any] = []
        while tensors:  # taken away one by one, so that what mcore itself copied is freed on the way
            item, tensor = tensors.pop()
            if not stays(tensor):
                # a storage of its own for each: `torch.save` writes a view's whole storage
                place = torch.frombuffer(room, dtype=torch.uint8, count=tensor.nbytes, offset=start)
                start += _aligned_size(tensor)
                tensor = place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            copies.append((item, tensor.cpu()))
        arrived = torch.cuda.Event()
        arrived.record()
        arriving.append(((path, name, (objects, copies)), arrived))
    for bucket, arrived in arriving:
        arrived.synchronize()
        yield bucket


def _aligned_size(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _room(size: int, *, pinned: bool) -> mmap.mmap:
    """Memory for the copies of one save, that of the save before if it is large enough.

    PyTorch's own pinned memory would be up to twice as much, as it rounds every tensor up to a power of two.
    """
    if _kept and len(_kept[0]) >= size:
        return _kept[0]
    cudart: Any = torch.cuda.cudart() if pinned else None
    if _kept and pinned:
        cudart.cudaHostUnregister(_address(_kept[0]))
    _kept.clear()
    room = mmap.mmap(-1, max(size, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer faults; no copy of it in workers that load data
        with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without it
            room.madvise(getattr(mmap, advice))
    if pinned:
        torch.cuda.check_error(int(cudart.cudaHostRegister(_address(room), len(room), 0)))
    _kept.append(room)
    return room


def _address(room: mmap.mmap) -> int:
    return torch.frombuffer(room, dtype=torch.uint8).data_ptr()


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
