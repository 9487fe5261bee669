"""Batches in an order that does not depend on how many ranks read them, with a position to resume from.

The samples form one sequence: epoch after epoch of the dataset, each reshuffled if asked. Of every micro_batch_size ×
data parallel size consecutive samples, data parallel rank r takes the r-th micro batch, as in Megatron-LM. So a global
batch holds the same samples under any data parallel size and micro batch size, and the number of samples consumed is
all that a run has to remember.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.data import DataLoader, Dataset

from minloop.data.batch import Batch
from minloop.data.transport import collate_to_send, received
from minloop.signals import pass_over_stop_signals

SMALL_SHARED_MEMORY = (
    "Workers hand on batches of more than 1 MiB through /dev/shm, which is full or too small (df -h /dev/shm; 64 MB in "
    "a container unless told otherwise): start it with --ipc=host or --shm-size=16g, or give build_loader num_workers=0"
)


@dataclass(frozen=True)
class SampleOrder:
    """Which samples make the micro batches of one data parallel rank."""

    dataset_length: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    shuffle: bool
    seed: int
    wrap: bool
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size ({self.micro_batch_size}) must be positive")
        if self.dataset_length < self.chunk_size:
            raise ValueError(
                f"the dataset has {self.dataset_length} samples, fewer than micro_batch_size "
                f"({self.micro_batch_size}) × data parallel size ({self.data_parallel_size}) = {self.chunk_size}: use "
                "a larger dataset, a smaller micro batch or fewer data parallel ranks"
            )
        if self.global_batch_size is not None and self.dataset_length < self.global_batch_size:
            raise ValueError(
                f"the dataset has {self.dataset_length} samples, fewer than one global_batch_size "
                f"({self.global_batch_size}): use a larger dataset or a smaller batch"
            )

    @property
    def chunk_size(self) -> int:
        """Samples that all data parallel ranks take together, one micro batch each."""
        return self.micro_batch_size * self.data_parallel_size

    def batches(self, consumed_samples: int) -> Iterator[list[int]]:
        """Yield the dataset indices of this rank's micro batches, beginning after `consumed_samples` samples."""
        order: Sequence[int] | numpy.ndarray = range(self.dataset_length)
        drawn, whole = None, self.global_batch_size or self.chunk_size
        for chunk in itertools.count(consumed_samples, self.chunk_size):
            if not self.wrap and chunk + self.chunk_size > self.dataset_length // whole * whole:
                return
            first = chunk + self.data_parallel_rank * self.micro_batch_size
            batch: list[int] = []
            for position in range(first, first + self.micro_batch_size):
                epoch, index = divmod(position, self.dataset_length)
                if self.shuffle and epoch != drawn:
                    order, drawn = self._shuffled(epoch), epoch
                batch.append(int(order[index]))
            yield batch

    def _shuffled(self, epoch: int) -> numpy.ndarray:
        # numpy promises that RandomState's streams never change. default_rng's may, and then no run could be resumed.
        return numpy.random.RandomState([self.seed, epoch]).permutation(self.dataset_length)


class Loader:
    """An iterator of `Batch` that knows its position; made by `build_loader`."""

    def __init__(
        self, dataset: Dataset[Any], order: SampleOrder, *, consumed_samples: int = 0, num_workers: int = 0
    ) -> None:
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative")
        self._dataset = dataset
        self._order = order
        self._consumed_samples = consumed_samples
        self._num_workers = num_workers
        self._batches: Iterator[Any] | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far over all data parallel ranks; those that workers have prefetched do not count."""
        return self._consumed_samples

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._start()
        try:
            batch = received(next(self._batches))
        except RuntimeError as error:  # torch's names neither the place nor an option; a worker's death is its cause
            if "shared memory" in f"{error} {error.__cause__}":
                error.add_note(SMALL_SHARED_MEMORY)
            raise
        self._consumed_samples += self._order.chunk_size
        return batch

    def _start(self) -> Iterator[Any]:
        # The DataLoader draws its workers' seeds from `generator`. Left out, it would draw from torch's default
        # generator, which on the CPU backend is also the model's: dropout would depend on when the data was read.
        loader = DataLoader(
            self._dataset,
            batch_sampler=self._order.batches(self._consumed_samples),
            num_workers=self._num_workers,
            collate_fn=collate_to_send if self._num_workers else None,
            worker_init_fn=pass_over_stop_signals,
            generator=torch.Generator().manual_seed(self._order.seed),
            pin_memory=torch.cuda.is_available(),
        )
        return iter(loader)

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in: the same on every rank, and for every layout."""
        return {"consumed_samples": self._consumed_samples, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue exactly after the position in `state`, which may come from another layout or micro batch size.

        Raises:
            ValueError: `state` is a position in another sequence of samples; the differing fields are named.
        """
        differing = [
            f"{name}: {state.get(name)} saved, {value} here"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"the saved data position is one in other data ({'; '.join(differing)}): build the loader as it was, "
                "or choose a position in this one by build_loader(consumed_samples=...) and do not load the saved one"
            )
        self._consumed_samples = operator.index(state["consumed_samples"])
        self._batches = None

    def _identity(self) -> dict[str, int]:
        shuffle_seed = {"seed": self._order.seed} if self._order.shuffle else {}
        return {"dataset_length": self._order.dataset_length, "shuffle": int(self._order.shuffle), **shuffle_seed}


def build_loader(
    dataset: Dataset[Any],
    groups: ProcessGroupCollection,
    *,
    micro_batch_size: int,
    consumed_samples: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    wrap: bool = True,
    global_batch_size: int | None = None,
    num_workers: int = 0,
) -> Loader:
    """Return the loader of this rank's micro batches, on the CPU (in pinned memory if there is a GPU).

    Every rank reads for itself, and all ranks of one data parallel index read the same: the order is a function of the
    arguments alone. So no broadcast delays a step: ranks of a node share the pages that they read, and on two CPU ranks
    reading is 13 times as fast as one rank's reading and broadcasting (benchmarks/data.py). On pipeline stages that
    need no tokens the position advances as everywhere. Evaluation takes a loader of its own, and reading one leaves
    all others, and the random streams, as they are: a new one for every evaluation begins at the same place.

    Args:
        dataset: a map-style dataset with a length, whose samples are dicts of tensors without the [b] of `Batch`:
            mcore's, your own, or one of Hugging Face's `datasets`, ``with_format("torch")``.
        micro_batch_size: samples per batch, on one data parallel rank.
        consumed_samples: where to begin, in samples over all data parallel ranks.
        shuffle: read every epoch in another order, a permutation drawn from `seed` and the epoch. `GPTDataset` has
            shuffled its samples already.
        wrap: after the last sample go on with the next epoch, in mid-batch if need be, for ever. Otherwise stop when
            fewer than micro_batch_size × data parallel size samples are left, after the same batch on every rank.
        global_batch_size: samples of a step; then the dataset must have that many, and without `wrap` the end is that
            of the last whole global batch: no step is left without its last microbatches.
        num_workers: processes that read ahead; 0 reads when asked. It has no influence on what is read.
    Raises:
        ValueError: micro_batch_size is not positive, consumed_samples is negative, or the dataset is smaller than
            micro_batch_size × data parallel size, or than global_batch_size.
    """
    order = SampleOrder(
        dataset_length=len(cast(Sized, dataset)),
        micro_batch_size=micro_batch_size,
        data_parallel_rank=groups.dp.rank(),
        data_parallel_size=groups.dp.size(),
        shuffle=shuffle,
        seed=seed,
        wrap=wrap,
        global_batch_size=global_batch_size,
    )
    return Loader(dataset, order, consumed_samples=consumed_samples, num_workers=num_workers)


def num_microbatches(global_batch_size: int, micro_batch_size: int, groups: ProcessGroupCollection) -> int:
    """Return how many micro batches each data parallel rank takes for one global batch, both sizes in samples.

    Raises:
        ValueError: the global batch is not a multiple of micro_batch_size × data parallel size.
    """
    data_parallel_size = groups.dp.size()
    if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (micro_batch_size * data_parallel_size):
        raise ValueError(
            f"global_batch_size ({global_batch_size}) must be a positive multiple of micro_batch_size "
            f"({micro_batch_size}) × data parallel size ({data_parallel_size})"
        )
    return global_batch_size // (micro_batch_size * data_parallel_size)


def ramped_batch_size(
    global_batch_size: int, consumed_samples: int, *, start: int, increment: int, ramp_samples: int
) -> int:
    """Return the samples of the next step while the batch grows, as by Megatron-LM's --rampup-batch-size.

    From `start` it grows in steps of `increment`, each used for the same number of samples, to `global_batch_size`,
    which is reached after `ramp_samples`. Give the result to `num_microbatches`, before each step (for other schedules
    see mcore's `StepBatchsizeNumMicroBatchesCalculator`):

        size = minloop.ramped_batch_size(1024, state.consumed_samples, start=64, increment=64, ramp_samples=10**6)

    Raises:
        ValueError: increment, ramp_samples or start is not positive, or from start increments do not lead to the size.
    """
    grows = global_batch_size - start
    if min(start, increment, ramp_samples) < 1 or grows < 0 or grows % increment:
        raise ValueError(
            f"start ({start}), increment ({increment}) and ramp_samples ({ramp_samples}) must be positive, and start "
            f"plus a multiple of increment be global_batch_size ({global_batch_size})"
        )
    if consumed_samples >= ramp_samples or not grows:
        return global_batch_size
    return start + consumed_samples * (grows // increment) // ramp_samples * increment
