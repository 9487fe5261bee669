"""A worker's batches on their way to the process that trains.

A tensor that is pickled between processes lies in shared memory, and its file descriptor is passed through a connection
made for it: about 0.4 ms each on a CPU core, whatever its size, in part in the process that trains. A batch of tokens
is four small tensors, and by value, through the DataLoader's pipe, they take together as long as one such descriptor.
"""

from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from minloop.data.batch import Batch

BY_VALUE_BYTES = 1 << 20  # in a larger batch the copies cost more than the descriptors


class SentBatch:
    """A batch that is pickled by value."""

    def __init__(self, batch: Batch) -> None:
        self._parts: dict[str, tuple[numpy.ndarray, torch.dtype, torch.Size]] = {
            # numpy has no bfloat16, and bytes are what is sent
            name: (value.contiguous().view(torch.uint8).numpy(), value.dtype, value.shape)
            for name, value in batch.items()
        }

    def batch(self) -> Batch:
        return {
            name: torch.from_numpy(data).view(dtype).view(shape) for name, (data, dtype, shape) in self._parts.items()
        }

    def pin_memory(self) -> Batch:
        """What the DataLoader's pinning thread calls."""
        return {name: value.pin_memory() for name, value in self.batch().items()}


def collate_to_send(samples: list[Any]) -> Any:
    """Return the batch of `samples` as `default_collate` makes it, in a `SentBatch` if it is small tensors alone."""
    batch: Any = default_collate(samples)
    if isinstance(batch, dict) and all(isinstance(value, torch.Tensor) for value in batch.values()):
        small = sum(value.nbytes for value in batch.values()) <= BY_VALUE_BYTES
        return SentBatch(batch) if small else batch
    return batch


def received(sent: Any) -> Batch:
    """The batch that a worker sent, or that came without one."""
    return sent.batch() if isinstance(sent, SentBatch) else sent
