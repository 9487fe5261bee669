"""Samples that come one after the other, without a length or an index, with the loader's order and position."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.data import default_collate

from minloop.data.batch import Batch


class StreamLoader:
    """An iterator of `Batch` over a stream of samples, with a position; made by `build_stream_loader`."""

    def __init__(self, samples: Iterable[Any], micro_batch_size: int, rank: int, size: int, consumed: int) -> None:
        if micro_batch_size < 1 or consumed < 0:
            raise ValueError(
                f"micro_batch_size ({micro_batch_size}) must be positive, consumed_samples ({consumed}) not negative"
            )
        if isinstance(samples, Iterator):
            raise ValueError(
                f"a {type(samples).__name__} can be read once only, and a position is found by reading anew: give what "
                "makes one whenever it is iterated, such as an IterableDataset"
            )
        self._samples, self._micro_batch_size, self._rank, self._size = samples, micro_batch_size, rank, size
        self._consumed_samples = consumed
        self._rest: Iterator[Any] | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far over all data parallel ranks."""
        return self._consumed_samples

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._rest is None:
            self._rest = self._skip(self._consumed_samples)
        chunk = list(itertools.islice(self._rest, self._micro_batch_size * self._size))
        if len(chunk) < self._micro_batch_size * self._size:
            raise StopIteration
        self._consumed_samples += len(chunk)
        first = self._rank * self._micro_batch_size
        batch: Batch = default_collate(chunk[first : first + self._micro_batch_size])
        pin = torch.cuda.is_available()
        return {name: value.pin_memory() for name, value in batch.items()} if pin else batch

    def _skip(self, count: int) -> Iterator[Any]:
        if (skip := getattr(self._samples, "skip", None)) is not None and count:
            return iter(skip(count))
        return itertools.islice(self._samples, count, None)

    def state_dict(self) -> dict[str, int]:
        """The position: the same on every rank, and for every layout."""
        return {"consumed_samples": self._consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the position in `state`, which may come from another layout or micro batch size.

        Raises:
            ValueError: `state` is a `Loader`'s, whose samples come in an order of their own.
        """
        if others := state.keys() - self.state_dict().keys():
            raise ValueError(
                f"the saved data position is one of a Loader (it has {', '.join(sorted(others))}): build the loader as "
                "it was, or choose a position by build_stream_loader(consumed_samples=...) and do not load this one"
            )
        self._consumed_samples, self._rest = operator.index(state["consumed_samples"]), None


def build_stream_loader(
    samples: Iterable[Any], groups: ProcessGroupCollection, *, micro_batch_size: int, consumed_samples: int = 0
) -> StreamLoader:
    """Return the loader of this rank's micro batches from a stream, the same on all ranks, that can be iterated anew.

    For an iterable dataset of your own, of Hugging Face's `datasets` (``streaming=True``, ``with_format("torch")``) or
    the like. Every rank reads the whole stream and keeps its micro batches, in the order of `build_loader`; where that
    costs too much, give `train_step` an iterator of batches that the stream's library has split over the ranks itself.
    It ends where fewer than micro_batch_size × data parallel size samples are left. To go on from a position the stream
    is asked to ``skip(count)`` if it can, and read up to there if not.

    Args:
        samples: dicts of tensors without the [b] of `Batch`.
    Raises:
        ValueError: micro_batch_size is not positive, consumed_samples is negative, or samples is an iterator.
    """
    return StreamLoader(samples, micro_batch_size, groups.dp.rank(), groups.dp.size(), consumed_samples)
