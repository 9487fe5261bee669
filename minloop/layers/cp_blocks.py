"""One block of attention, some queries to some keys, with what it takes to merge blocks and to undo that backward.

A block's softmax runs over its own keys alone. With the logarithm of its denominator, `lse`, [sq, b, np], blocks are
merged exactly (`merge`); backward, the `lse` and the output of the whole softmax give each block's gradients. That is
how flash attention works in itself (arXiv 2205.14135) and on a ring (arXiv 2310.01889).

Queries are [sq, b, np, hn], keys [sk, b, ng, hn], values [sk, b, ng, hv] and outputs [sq, b, np, hv].
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minloop.layers.kernels import (
    Band,
    Boundaries,
    Options,
    batch_boundaries,
    build_mask,
    may_flash,
    written_out_scores,
)


@dataclass(frozen=True)
class Block:
    """Which queries of a rank look at which of the keys it has got.

    Attributes:
        rows: of the rank's queries.
        columns: of the keys; as many as rows.
        band: in which rows see columns.
        boundaries: of packed sequences among rows and columns.
        mask: [b, np, rows, columns] in place of band and boundaries, True where a query may look.
    """

    rows: slice
    columns: slice
    band: Band
    boundaries: Tensor | None = None
    mask: Tensor | None = None

    def may_flash(self, query: Tensor, value: Tensor, options: Options) -> bool:
        """Not where sequences are packed: on an H200 torch's kernel then gave other numbers."""
        return self.mask is None and self.boundaries is None and may_flash(query, value, options)

    def build_mask(self, sq: int, sk: int, device: torch.device) -> Tensor | None:
        if self.mask is not None:
            return self.mask
        both = None if self.boundaries is None else Boundaries(self.boundaries, self.boundaries)
        return build_mask(sq, sk, self.band, None, both, device)


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The output and `lse` of two blocks of keys together, for the same queries."""
    total = torch.logaddexp(lse, other_lse)
    base = _finite(total)
    return output * (lse - base).exp().unsqueeze(-1) + other * (other_lse - base).exp().unsqueeze(-1), total


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, block: Block, options: Options, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The block's output and its `lse`; -inf where a query sees nothing. `generator` draws what is dropped."""
    if block.may_flash(query, value, options):
        return _flash_forward(query, key, value, block, options.scale)
    q, k, v = _heads_first(query, key, value)
    scores = written_out_scores(q, k, options, block.build_mask(len(query), len(key), query.device))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - _finite(lse).unsqueeze(-1)).exp()
    if generator is not None:
        weights = weights * _kept(weights, options.dropout, generator)
    return (weights.to(v.dtype) @ v).permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: Block,
    options: Options,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of query, key and value.

    Args:
        gradient: of the whole output.
        output: of all blocks together; `lse` likewise.
        delta: [sq, b, np], the sum of gradient * output over a head.
        generator: in the state that it had in the forward.
    """
    if block.may_flash(query, value, options):
        return _flash_backward(gradient, query, key, value, output, lse, block, options.scale)
    groups = key.size(2)
    q, k, v = _heads_first(query, key, value)
    d = gradient.permute(1, 2, 0, 3)
    scores = written_out_scores(q, k, options, block.build_mask(len(query), len(key), query.device))
    weights = (scores - _finite(lse).permute(1, 2, 0).unsqueeze(-1)).exp()
    d_weights, kept = (d @ v.transpose(-1, -2)).to(weights.dtype), weights
    if generator is not None:
        factor = _kept(weights, options.dropout, generator)
        d_weights, kept = d_weights * factor, weights * factor
    d_scores = (weights * (d_weights - delta.permute(1, 2, 0).unsqueeze(-1)) * options.scale).to(q.dtype)
    d_query, d_key, d_value = d_scores @ k, d_scores.transpose(-1, -2) @ q, kept.to(v.dtype).transpose(-1, -2) @ d
    d_key, d_value = (x.unflatten(1, (groups, -1)).sum(2) for x in (d_key, d_value))
    d_query, d_key, d_value = (x.permute(2, 0, 1, 3) for x in (d_query, d_key, d_value))
    return d_query, d_key, d_value


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, h, hn] → [b, np, s, hn], keys and values repeated for all heads of their group."""
    times = query.size(2) // key.size(2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


def _finite(lse: Tensor) -> Tensor:
    """What to subtract from scores: 0 where there is none, as exp(-inf - -inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _kept(weights: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    return torch.empty_like(weights).bernoulli_(1 - dropout, generator=generator) / (1 - dropout)


def _flash_arguments(query: Tensor, key: Tensor, block: Block) -> tuple[list[Any], dict[str, int]]:
    """Where samples begin, their lengths, no dropout and whether causal; and the window."""
    both = batch_boundaries(query.size(1), len(query), len(key), query.device)
    left, right = (-1 if side is None else side for side in block.band)
    return [*both, len(query), len(key), 0.0, (left, right) == (-1, 0)], {
        "window_size_left": left,
        "window_size_right": right,
    }


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    batch, size = query.size(1), value.size(-1)
    arguments, window = _flash_arguments(query, key, block)
    q, k, v = (_packed(x, query.size(-1)) for x in (query, key, value))
    output, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, scale=scale, **window)
    output = output[..., :size].unflatten(0, (batch, -1)).transpose(0, 1)
    return output, lse.unflatten(1, (batch, -1)).permute(2, 1, 0)


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, size = query.size(1), value.size(-1)
    arguments, window = _flash_arguments(query, key, block)
    d, q, k, v, o = (_packed(x, query.size(-1)) for x in (gradient, query, key, value, output))
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    lse = lse.permute(2, 1, 0).flatten(1)
    gradients = torch.ops.aten._flash_attention_backward(
        d, q, k, v, o, lse, *arguments, *no_dropout, scale=scale, **window
    )
    d_query, d_key, d_value = (x.unflatten(0, (batch, -1)).transpose(0, 1) for x in gradients)
    return d_query, d_key, d_value[..., :size]


def _packed(tensor: Tensor, size: int) -> Tensor:
    """[s, b, h, d] → [b * s, h, size], padded with zeros: the flash kernel knows one size of head."""
    return F.pad(tensor, (0, size - tensor.size(-1))).transpose(0, 1).flatten(0, 1).contiguous()
