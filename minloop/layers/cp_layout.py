"""How context parallel ranks hold a sequence: two chunks each, and how the whole is put together from their shares.

mcore deals a sequence out in 2*cp chunks, chunks r and 2*cp-1-r to rank r (`get_batch_on_this_cp_rank`): under a causal
mask all ranks then have the same work. Packed sequences are dealt out so one by one, as Transformer Engine's
`thd_get_partitioned_indices` does. Of neighbouring ranks the shares together are again two chunks, of a smaller group.

`boundaries` [n + 1] say where packed sequences begin and end in the whole, from 0 to its number of tokens; each is a
multiple of 2*cp tokens long. None: what is dealt out is one sequence.
"""

import torch
from megatron.core import tensor_parallel
from torch import Tensor


def packed_share(boundaries: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """Which of `tokens` packed tokens rank `rank` of `size` holds: [tokens / size], int64, in the rank's order."""
    return _inverse(_places_in_shares(boundaries, tokens, size)).chunk(size)[rank]


def to_natural_order(shares: Tensor, size: int, boundaries: Tensor | None = None) -> Tensor:
    """The shares of `size` ranks, laid end to end along the first dimension, in the order of the whole."""
    if boundaries is not None:
        return shares[_places_in_shares(boundaries, len(shares), size)]
    chunks = shares.chunk(2 * size)
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])))


def to_shares(whole: Tensor, size: int, boundaries: Tensor | None = None) -> Tensor:
    """The inverse of `to_natural_order`."""
    if boundaries is not None:
        return whole[_inverse(_places_in_shares(boundaries, len(whole), size))]
    chunks = whole.chunk(2 * size)
    return torch.cat([chunk for rank in range(size) for chunk in (chunks[rank], chunks[-1 - rank])])


def gather_sequence(local: Tensor, group: torch.distributed.ProcessGroup, boundaries: Tensor | None = None) -> Tensor:
    """All-gather the ranks' shares [s/cp, ...] into the whole [s, ...] in its natural order.

    The backward reduce-scatters: a rank gets the sum over all ranks of the gradients of its share.
    """
    gathered = tensor_parallel.gather_from_sequence_parallel_region(local.contiguous(), group=group)
    return to_natural_order(gathered, group.size(), boundaries)


def chunks_of(group: torch.distributed.ProcessGroup) -> tuple[int, int]:
    """The numbers of this rank's earlier and later chunks, of 2 * size."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def split_share(share: Tensor, boundaries: Tensor | None, size: int) -> Tensor:
    """A rank's earlier and then its later chunks: of packed sequences those of all sequences, end to end."""
    return share if boundaries is None else share[_halves(boundaries, len(share), size)]


def join_share(halves: Tensor, boundaries: Tensor | None, size: int) -> Tensor:
    """The inverse of `split_share`."""
    return halves if boundaries is None else halves[_inverse(_halves(boundaries, len(halves), size))]


def _places_in_shares(boundaries: Tensor, tokens: int, size: int) -> Tensor:
    """Where each token of the whole is in the ranks' shares, laid end to end."""
    token = torch.arange(tokens, device=boundaries.device)
    sequence = torch.bucketize(token, boundaries[1:], right=True)
    start, length = boundaries.long()[sequence], boundaries.long().diff()[sequence] // (2 * size)
    chunk, offset = (token - start) // length, (token - start) % length
    rank = torch.minimum(chunk, 2 * size - 1 - chunk)
    return rank * (tokens // size) + start // size + offset + torch.where(chunk < size, 0, length)


def _halves(boundaries: Tensor, tokens: int, size: int) -> Tensor:
    """For each token of a share, its sequences split into earlier and later chunks, where it is in the share."""
    half = boundaries.long() // (2 * size)
    token = torch.arange(tokens // 2, device=boundaries.device)
    sequence = torch.bucketize(token, half[1:], right=True)
    earlier = token + half[sequence]  # a sequence has begun at twice its place among the earlier chunks
    return torch.cat((earlier, earlier + half.diff()[sequence]))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
