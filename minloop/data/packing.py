"""Samples of different lengths, several in one sequence: no token attends to another sample, and little is padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from minloop.data.batch import Batch


class PackedSamples(Dataset[Batch]):
    """A map-style dataset of packs; made by `pack_samples`."""

    def __init__(self, samples: Any, packs: list[list[int]], sequence_length: int, multiple: int) -> None:
        self._samples, self._packs = samples, packs
        self._sequence_length, self._multiple = sequence_length, multiple

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Batch:
        length, start, boundaries = self._sequence_length, 0, [0]
        pack: Batch = {name: torch.zeros(length, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        pack["loss_mask"] = torch.zeros(length)
        for number in self._packs[index]:
            sample = self._samples[number]
            end = start + len(sample["tokens"])
            for name in ("tokens", "labels", "loss_mask"):
                pack[name][start:end] = sample[name]
            start = start + _padded(len(sample["tokens"]), self._multiple)
            boundaries.append(start)
        # What is left over is a sequence of its own, without loss; mcore fills up by repeating the end.
        cu_seqlens = torch.full((length + 1,), length, dtype=torch.int32)
        cu_seqlens[: len(boundaries)] = torch.tensor(boundaries)
        sizes = cu_seqlens.diff().long()
        pack["position_ids"] = torch.arange(length) - cu_seqlens[:-1].long().repeat_interleave(sizes)
        return pack | {"cu_seqlens": cu_seqlens}


def pack_samples(
    samples: Any, *, sequence_length: int, multiple: int = 1, lengths: Sequence[int] | None = None
) -> PackedSamples:
    """Return a dataset whose samples are `samples` laid end to end, in order, as many as fit in `sequence_length`.

    Give it to `build_loader` with ``micro_batch_size=1`` and train with ``forward_step=minloop.packed_forward_step``.
    Each of its samples has `tokens`, `labels`, `position_ids`, int64 [s], that begin at 0 with every sample, and
    `loss_mask`, float32 [s], 0 on padding; and `cu_seqlens`, int32 [s + 1], the boundaries of the samples, as mcore's
    ``inter_document_masking=True`` gives them.

    Args:
        samples: map-style, with a length: dicts of `tokens`, `labels` and `loss_mask`, each [n], such as `mask_prompt`
            returns.
        sequence_length: s, the tokens of a pack.
        multiple: every sample is padded to a multiple of this: 2 × context parallel size if that is above 1, and times
            the tensor parallel size with sequence parallelism.
        lengths: n of every sample; left out, all of them are read once.
    Raises:
        ValueError: a sample is longer than `sequence_length`, or empty; that is no multiple of `multiple`; or `lengths`
            are not as many as the samples.
    """
    if multiple < 1 or sequence_length % multiple:
        raise ValueError(f"sequence_length ({sequence_length}) must be a multiple of multiple ({multiple})")
    if lengths is None:
        lengths = [len(samples[index]["tokens"]) for index in range(len(samples))]
    if len(lengths) != len(samples):
        raise ValueError(f"lengths has {len(lengths)} numbers, but there are {len(samples)} samples: give one of each")
    packs: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        needed = _padded(length, multiple)
        if length < 1:
            raise ValueError(f"sample {index} has no token: leave it out")
        if needed > sequence_length:
            raise ValueError(
                f"sample {index} has {length} tokens, {needed} with padding, more than sequence_length "
                f"({sequence_length}): cut it, or leave it out"
            )
        if needed > room:
            packs.append([])
            room = sequence_length
        packs[-1].append(index)
        room -= needed
    return PackedSamples(samples, packs, sequence_length, multiple)


def mask_prompt(prompt: Sequence[int], answer: Sequence[int]) -> Batch:
    """Return a sample of instruction data: the loss counts where a token of the answer is to be predicted.

    Args:
        prompt, answer: token ids; the answer ends with the end of document, if the model is to learn to stop.
    Returns:
        `tokens` and `labels`, int64 [n], and `loss_mask`, float32 [n]; n is one less than the ids.
    Raises:
        ValueError: prompt or answer is empty.
    """
    if min(len(prompt), len(answer)) < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens and an answer of {len(answer)}: neither may be empty")
    ids = torch.tensor([*prompt, *answer])
    loss_mask = (torch.arange(len(ids) - 1) >= len(prompt) - 1).float()
    return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": loss_mask}


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
