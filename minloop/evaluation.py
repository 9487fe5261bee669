"""Evaluation beside training, over several sets of data."""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minloop.data import Batch
from minloop.losses import Report, reduce_reports
from minloop.microbatches import Microbatches, require_iterator
from minloop.schedule import ForwardStep, forward_backward
from minloop.state import TrainState
from minloop.step import evaluating, gpt_forward_step


@dataclass(frozen=True)
class Evaluation:
    """What one set of data gave, equal on every rank.

    Attributes:
        loss: in nats per token, the first of `losses`.
        losses: name → mean over all tokens of the set that count (loss mask respected), as the forward step reports it.
        perplexity: e to the power of `loss`; inf where a float cannot hold it.
        bits_per_byte: of the text, which does not depend on the tokenizer; None without `bytes_per_token`.
        num_tokens: tokens that counted, over all ranks.
        num_samples: samples read, over all ranks.
    """

    loss: float
    losses: dict[str, float]
    perplexity: float
    bits_per_byte: float | None
    num_tokens: float
    num_samples: int


def evaluate(
    state: TrainState,
    loaders: Mapping[str, Iterator[Batch]],
    *,
    num_microbatches: int,
    eval_iters: int | Mapping[str, int] = 1,
    bytes_per_token: float | Mapping[str, float] | None = None,
    forward_step: ForwardStep = gpt_forward_step,
    micro_batch_size: int | None = None,
    seq_length: int | None = None,
) -> dict[str, Evaluation]:
    """Compute the losses of several sets of data with the weights as they are; training goes on as if nothing had been.

    Dropout is off, no random stream is drawn from, and no loader of training is read. A loader that knows its position
    (`Loader`) is put back to where it stood: every evaluation sees the same samples. Other iterators go on.

    Args:
        loaders: by name; each with its own batch shape, if need be.
        num_microbatches: of one iteration, per data parallel rank.
        eval_iters: iterations; one number, or one for each set. A `Loader` that wraps begins anew where the set is
            shorter, and counts its samples again.
        bytes_per_token: bytes of the set's text divided by its tokens; one number, or one for each set.
        forward_step, micro_batch_size, seq_length: as in `train_step`.
    Raises:
        ValueError: a set that `eval_iters` or `bytes_per_token` lacks, or for which it is not positive; and as
            `train_step`.
        TypeError: a loader is a list or the like, which would begin anew at every iteration.
        RuntimeError: the data ended before.
    """
    results: dict[str, Evaluation] = {}
    iters = {name: _of_set("eval_iters", eval_iters, name) for name in loaders}
    ratios = {} if bytes_per_token is None else {n: _of_set("bytes_per_token", bytes_per_token, n) for n in loaders}
    with evaluating(state), torch.no_grad():
        for name, loader in loaders.items():
            require_iterator(loader)
            reports: list[Report] = []
            num_samples = 0
            with _said_of(name), _put_back(loader):
                for _ in range(iters[name]):
                    batches = Microbatches(loader, num_microbatches, micro_batch_size, seq_length)
                    reports += forward_backward(state, batches, forward_step, forward_only=True)
                    num_samples += batches.micro_batch_size * num_microbatches * state.groups.dp.size()
            results[name] = _evaluation(*reduce_reports(state, reports, forward_step), num_samples, ratios.get(name))
    return results


def _of_set[T: float](field: str, value: T | Mapping[str, T], name: str) -> T:
    if isinstance(value, Mapping):
        if name not in value:
            raise ValueError(f"{field} has {', '.join(value)}, but not {name!r}: give one number, or one for each set")
        value = value[name]
    if not value > 0:
        raise ValueError(f"{field} ({value}) of {name!r} must be positive")
    return value


@contextlib.contextmanager
def _said_of(name: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"It is the set {name!r} that was evaluated.")
        raise


@contextlib.contextmanager
def _put_back(loader: Any) -> Generator[None]:
    """Leave a loader that knows its position where it stood, whatever happens."""
    position = loader.state_dict() if hasattr(loader, "load_state_dict") else None
    try:
        yield
    finally:
        if position is not None:
            loader.load_state_dict(position)


def _evaluation(
    losses: dict[str, torch.Tensor], tokens: torch.Tensor, num_samples: int, bytes_per_token: float | None
) -> Evaluation:
    *values, num_tokens = torch.stack([*losses.values(), tokens]).tolist()
    loss = values[0]
    return Evaluation(
        loss=loss,
        losses=dict(zip(losses, values, strict=True)),
        perplexity=torch.tensor(loss, dtype=torch.float64).exp().item(),
        bits_per_byte=None if bytes_per_token is None else loss / math.log(2) / bytes_per_token,
        num_tokens=num_tokens,
        num_samples=num_samples,
    )
