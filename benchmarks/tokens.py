"""The tokens that every peer trains on: sample i is the same for all, whatever its data loader.

Uniform tokens would teach nothing, and losses that stay at ln(vocab_size) agree whatever a peer computes. These are
skewed (the fourth power of a uniform number, about Zipf's law), so that the loss falls by 1.6 within the first steps.
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.shapes import Shape

SEED = 20_000_000


def sample(index: int, sequence_length: int, vocab_size: int) -> Tensor:
    """Return sample `index` of the endless data: int64 [sequence_length + 1], inputs and labels one apart."""
    generator = torch.Generator().manual_seed(SEED + index)
    uniform = torch.rand(sequence_length + 1, generator=generator, dtype=torch.float64)
    return (uniform.square().square() * vocab_size).long()


def batch(shape: Shape, step: int) -> Tensor:
    """Return the samples of optimizer step `step` (from 0): int64 [global_batch_size, sequence_length + 1]."""
    first = step * shape.global_batch_size
    return torch.stack(
        [sample(first + i, shape.sequence_length, shape.vocab_size) for i in range(shape.global_batch_size)]
    )


def microbatches(shape: Shape, step: int, rank: int, gpus: int) -> list[Tensor]:
    """Return what data parallel rank `rank` reads in one step: int64 [micro_batch_size, sequence_length + 1] each.

    Sample j of a step is in microbatch j // (micro_batch_size * gpus), as megatron.core's own sampler deals them.
    """
    shape.num_microbatches(gpus)
    rows = batch(shape, step).split(shape.micro_batch_size)
    return list(rows[rank::gpus])


class TokenDataset(Dataset[dict[str, Tensor]]):
    """The samples as a dataset in megatron.core's form: tokens, labels, loss_mask and position_ids, each [s]."""

    def __init__(self, shape: Shape, length: int):
        self.shape, self.length = shape, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = sample(index, self.shape.sequence_length, self.shape.vocab_size)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.shape.sequence_length),
            "position_ids": torch.arange(self.shape.sequence_length),
        }
