"""The microbatches of one step, as mcore's schedules want them."""

import itertools
from collections.abc import Iterable
from typing import Any


def require_iterator(data: Any) -> None:
    """Raise TypeError unless `data` goes on where it stood."""
    if iter(data) is not data:
        raise TypeError(
            f"{type(data).__name__} begins anew whenever it is iterated, so every step would see the same batches: "
            "pass an iterator, made once with iter(...), or minloop's Loader"
        )


class Microbatches:
    """The next microbatches of a step, and their shape, read off the first; with `varying` others may differ.

    `iteration` is what the step will be logged as.
    """

    def __init__(
        self,
        data: Iterable[Any],
        count: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        *,
        varying: bool = False,
        iteration: int | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"num_microbatches ({count}) must be at least 1")
        self.count, self._data, self._iteration = count, iter(data), iteration
        self._taken: list[Any] = []
        self._from_batch = not varying and (micro_batch_size is None or seq_length is None)
        if micro_batch_size is None or seq_length is None:
            first: Any = self._next(0)
            self._data = itertools.chain([first], self._data)
            rows, length = first["tokens"].shape
            micro_batch_size, seq_length = micro_batch_size or int(rows), seq_length or int(length)
        self.micro_batch_size: int = micro_batch_size
        self.seq_length: int = seq_length

    def _next(self, index: int) -> Any:
        try:
            return next(self._data)
        except StopIteration:
            where = "" if self._iteration is None else f" at iteration {self._iteration}"
            raise RuntimeError(
                f"the data ended{where}: it held {index} of the {self.count} microbatches of this step; end the "
                "loop before it, or give data that go on, such as build_loader(..., wrap=True)"
            ) from None

    def take(self) -> list[Any]:
        """All of them, read before the step begins: data that ends or does not fit stops nothing half-way.

        They are read once: a step that is computed again gets the same ones.
        """
        taken = self._taken
        for index in range(len(taken), self.count):
            batch = self._next(index)
            if self._from_batch and (shape := tuple(batch["tokens"].shape)) != (self.micro_batch_size, self.seq_length):
                raise ValueError(
                    f"microbatch {index} holds tokens {list(shape)}, the first one [{self.micro_batch_size}, "
                    f"{self.seq_length}]: a step's microbatches must be of one shape on all ranks (drop_last=True), or "
                    "give micro_batch_size and seq_length to train_step and set variable_seq_lengths=True"
                )
            taken.append(batch)
        return taken
