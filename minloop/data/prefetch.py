"""The next batches on their way to the device while the step runs."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch

from minloop.data.batch import Batch, CheckedBatch, check_token_ids, to_device


class PositionedLoader(Protocol):
    """A `Loader`, or what does the same."""

    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: Mapping[str, int], /) -> None: ...


class Prefetcher:
    """An iterator of batches on the device, with the position of those handed out; made by `prefetch_to_device`."""

    def __init__(self, loader: PositionedLoader, vocab_size: int, depth: int) -> None:
        self._loader, self._vocab_size, self._depth = loader, vocab_size, depth
        self._stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._begin()

    def _begin(self) -> None:
        self._state = self._loader.state_dict()
        self._ahead: deque[tuple[CheckedBatch, Any, dict[str, int]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CheckedBatch:
        self._fill()
        if not self._ahead:
            raise StopIteration
        batch, ready, self._state = self._ahead.popleft()
        if ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(ready)
            for value in batch.values():
                if value.is_cuda:
                    value.record_stream(stream)  # its memory is the side stream's, and is in use here
        return batch

    def _fill(self) -> None:
        # The one handed out next, and those on their way meanwhile. Without a device there is nothing to hide.
        while len(self._ahead) < (1 if self._stream is None else self._depth + 1):
            try:
                batch = next(self._loader)
            except StopIteration:
                return
            check_token_ids(batch, self._vocab_size)
            ready = None
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    # The boundaries of packed sequences are read by the CPU.
                    kept = {name: value for name, value in batch.items() if name == "cu_seqlens"}
                    batch = to_device(batch, torch.cuda.current_device()) | kept
                    ready = self._stream.record_event()
            self._ahead.append((CheckedBatch(batch), ready, self._loader.state_dict()))

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far over all data parallel ranks; those on their way do not count."""
        return self._state["consumed_samples"]

    def state_dict(self) -> dict[str, int]:
        """The loader's, after the last batch that was handed out."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The loader's; batches on their way are thrown away."""
        self._loader.load_state_dict(state)
        self._begin()


def prefetch_to_device(loader: PositionedLoader, *, vocab_size: int, depth: int = 2) -> Prefetcher:
    """Return an iterator of the loader's batches that copies the next `depth` to the device on a stream of its own.

    Token ids are checked against the model's `vocab_size` before the copy, so the step need not wait for it. Take
    batches, and the position for a checkpoint, from the result alone. On the CPU it reads when asked.

    Raises:
        ValueError: depth is not positive; when iterated, a token id outside the vocabulary.
    """
    if depth < 1:
        raise ValueError(f"depth ({depth}) must be positive")
    return Prefetcher(loader, vocab_size, depth)
