"""The exchange of tokens for heads (DeepSpeed Ulysses, arXiv 2309.14509): the pattern "a2a", and part of "a2a+p2p".

Each rank comes with a share of the tokens and all heads, and leaves with the tokens of all and a share of the heads. It
holds as many elements as before, but keys and values that had fewer heads than there are ranks are repeated.
"""

import math

from megatron.core import tensor_parallel
from torch import Tensor
from torch.distributed import ProcessGroup

from minloop.layers.cp_layout import to_natural_order, to_shares


def repeat_groups(keys: Tensor, size: int) -> Tensor:
    """Repeat the heads of keys or values, [s, b, ng, hn], so often that `size` ranks can share them equally."""
    groups = keys.size(2)
    return keys if groups % size == 0 else keys.repeat_interleave(size // math.gcd(groups, size), dim=2)


def tokens_to_heads(share: Tensor, group: ProcessGroup, boundaries: Tensor | None) -> Tensor:
    """[s / size, b, h, hn], a share of the tokens → [s, b, h / size, hn], in natural order.

    Args:
        boundaries: of packed sequences among the s tokens.
    """
    size = group.size()
    by_rank = share.unflatten(2, (size, -1)).movedim(2, 0)
    gathered = tensor_parallel.all_to_all(group, by_rank)
    return to_natural_order(gathered.flatten(0, 1), size, boundaries)


def heads_to_tokens(whole: Tensor, group: ProcessGroup, boundaries: Tensor | None) -> Tensor:
    """The inverse of `tokens_to_heads`."""
    size = group.size()
    by_rank = to_shares(whole, size, boundaries).unflatten(0, (size, -1))
    gathered: Tensor = tensor_parallel.all_to_all(group, by_rank)
    return gathered.movedim(0, 2).flatten(2, 3)
