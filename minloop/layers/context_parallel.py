"""Context parallel attention by gathering: each rank keeps its queries and gets the keys and values of all ranks.

mcore deals a sequence out in 2*cp chunks, chunks r and 2*cp-1-r to rank r (`get_batch_on_this_cp_rank`): under a causal
mask all ranks then have the same work. The method is that of the Llama 3 paper, section 3.3.2 (arXiv 2407.21783).
"""

import torch
from megatron.core import tensor_parallel
from torch import Tensor


def gather_sequence(local: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """All-gather the ranks' shares [s/cp, ...] into the whole sequence [s, ...] in its natural order.

    The backward reduce-scatters: a rank gets the sum over all ranks of the gradients of its share.
    """
    gathered = tensor_parallel.gather_from_sequence_parallel_region(local.contiguous(), group=group)
    chunks = gathered.chunk(2 * group.size())
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])))


def chunk_ends(local_length: int, group: torch.distributed.ProcessGroup) -> tuple[int, int]:
    """Where this rank's two chunks end in the whole sequence, in tokens.

    Raises:
        ValueError: the rank's share cannot be halved.
    """
    if local_length % 2:
        raise ValueError(
            f"context_parallel_size is {group.size()} and a rank has {local_length} tokens of a sequence: its length "
            f"must be a multiple of 2 * context_parallel_size ({2 * group.size()})"
        )
    chunk = local_length // 2
    return (group.rank() + 1) * chunk, (2 * group.size() - group.rank()) * chunk
