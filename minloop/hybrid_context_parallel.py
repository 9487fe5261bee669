"""Hybrid context parallelism: each sample of a step goes over as many data parallel ranks as its length wants.

mcore deals the samples out so that ranks have equal work, and runs them one by one; what that needs of a step's packs
is made here. Ranks take different numbers of samples, so nothing in a forward pass may wait for all of them.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from minloop.data import Batch, CheckedBatch, check_token_ids
from minloop.everyone import over_all_ranks

KEPT = ("tokens", "labels", "loss_mask", "position_ids")


class _AlignedScheduler(BalancedCPScheduler):
    """mcore's, which now and then puts a sample on ranks that have no group, such as the third to the sixth of eight.

    Ranks with the same samples are put beside each other, the largest such blocks first: sizes are powers of two, so
    each block then begins at a multiple of its size, as the groups do.
    """

    def get_groups_and_subsamples(self, sample_id_seqlens: Any, config: Any) -> tuple[Any, list[list[list[int]]]]:
        groups, rounds = super().get_groups_and_subsamples(sample_id_seqlens, config)
        return groups, [sorted(ranks, key=lambda numbers: (-ranks.count(numbers), numbers)) for ranks in rounds]


def deal_out(
    batches: Sequence[Batch], config: TransformerConfig, groups: ProcessGroupCollection, vocab_size: int
) -> tuple[Iterator[Any] | None, Iterator[Batch]]:
    """Send the samples of a step's packs to the ranks that compute them; every rank calls it.

    Args:
        batches: packs of `pack_samples` that this rank read, [1, s].
    Returns:
        What mcore's schedule reads, which is None but on the first tensor parallel rank; and this rank's samples in the
        order in which the schedule asks for them, each [n] with `local_cp_size`, the number of ranks that share it.
    Raises:
        ValueError: batches without `cu_seqlens`, a token id outside the vocabulary; on every rank: samples of a length
            that the ranks cannot divide, or too long for all of them together.
    """
    samples = [sample for batch in batches for sample in _samples(batch, vocab_size)]
    _check_lengths([len(sample["tokens"]) for sample in samples], config, groups)
    wrapper = HybridCPDataLoaderWrapper(iter([samples]), config, groups)
    wrapper.cp_balancing_scheduler = _AlignedScheduler(config.max_seqlen_per_dp_cp_rank or 0, groups.dp_cp)
    received, rounds = next(wrapper)
    rank = groups.dp_cp.rank()
    own = (
        received[number] | {"local_cp_size": torch.tensor(sum(number in numbers for numbers in ranks))}
        for ranks in rounds
        for number in ranks[rank]
    )
    return iter([(received, rounds)]) if groups.tp.rank() == 0 else None, own


def refuse_hybrid(config: TransformerConfig, what: str) -> None:
    """Raise ValueError where outputs are asked for by the batch, and ranks have those of each other's samples."""
    if config.hybrid_context_parallel:
        raise ValueError(
            f"{what} with hybrid_context_parallel=True, which deals samples out to other ranks: build the model with "
            "hybrid_context_parallel=False, and load the weights"
        )


def _samples(batch: Batch, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """The samples of a pack, each [n] with boundaries of its own; those without loss are left out, but for one."""
    if "cu_seqlens" not in batch:
        raise ValueError(
            f"hybrid_context_parallel=True with a batch of {', '.join(sorted(batch))}: it deals out the samples of "
            "packs; train with pack_samples and forward_step=minloop.packed_forward_step"
        )
    if not isinstance(batch, CheckedBatch):
        check_token_ids(batch, vocab_size)
    bounds = batch["cu_seqlens"].flatten().unique().tolist()
    cut = [
        {name: batch[name][0, first:end] for name in KEPT} | {"cu_seqlens": torch.tensor([0, end - first])}
        for first, end in pairwise(bounds)
    ]
    return [sample for sample in cut if sample["loss_mask"].any()] or cut[:1]


def _check_lengths(lengths: list[int], config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raise ValueError on every rank if one has a sample that could not be divided."""
    size, most = groups.dp_cp.size(), config.max_seqlen_per_dp_cp_rank or 0
    multiple = 2 * size * (groups.tp.size() if config.sequence_parallel else 1)
    odd = max((length for length in lengths if length % multiple), default=0)
    found = torch.tensor([odd, max(lengths)], device=torch.cuda.current_device())
    odd, longest = over_all_ranks(found, groups).tolist()
    if odd:
        raise ValueError(
            f"hybrid_context_parallel=True with a sample of {odd} tokens, which {size} data parallel ranks may have to "
            f"divide: pad samples to multiples of {multiple}, by pack_samples(multiple={multiple})"
        )
    if longest > most * size:
        raise ValueError(
            f"a sample of {longest} tokens is more than max_seqlen_per_dp_cp_rank ({most}) on each of {size} data "
            "parallel ranks: set that higher, or cut the sample"
        )
