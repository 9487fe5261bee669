"""Attention on one rank: torch's fused kernels, its flash kernel on bands, and sinks written out; `attend` chooses.

Queries are [sq, b, np, hn], keys [sk, b, ng, hn] and values [sk, b, ng, hv], where ng divides np; outputs are
[sq, b, np, hv]. Masks are bool, True where a query may look, and broadcast to [b, np, sq, sk].
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

_HALF = (torch.bfloat16, torch.float16)


class Band(NamedTuple):
    """How many keys a query may look back and ahead; None is all. The last query is level with the last key."""

    left: int | None
    right: int | None

    def ahead(self, keys: int) -> "Band":
        """The band of queries that sit `keys` keys further on."""
        left, right = self
        return Band(None if left is None else left - keys, None if right is None else right + keys)


EVERYTHING, CAUSAL = Band(None, None), Band(None, 0)


class Boundaries(NamedTuple):
    """Where packed sequences begin and end among the queries and among the keys: both [n + 1], int32, from 0 on."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Options:
    """How one layer attends.

    Attributes:
        scale: factor of the scores.
        dropout: probability.
        kernels: those that may run on a GPU, the first that can.
        sinks: [np], the logits that take attention without giving a value (arXiv 2309.17453; zero is
            https://www.evanmiller.org/attention-is-off-by-one.html).
        fp32_factor: the part of `scale` that is applied to scores that are written out once they are in fp32.
    """

    scale: float
    dropout: float
    kernels: Sequence[SDPBackend]
    sinks: Tensor | None = None
    fp32_factor: float = 1


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band,
    options: Options,
    allowed: Tensor | None = None,
    boundaries: Boundaries | None = None,
) -> Tensor:
    """Attend in `band`, within packed sequences where there are `boundaries`, to what is `allowed`, [b, np, sq, sk]."""
    sq, sk = len(query), len(key)
    left = None if band.left is None or band.left >= sk - 1 else band.left
    right = None if band.right is None or band.right >= sq - 1 else band.right
    band, whole = Band(left, right), sq == sk and (left, band.right) == CAUSAL
    if options.sinks is None and allowed is None:
        if boundaries is None and (whole or band == EVERYTHING):
            return fused(query, key, value, options, is_causal=whole)
        if may_flash(query, value, options):
            return flash(query, key, value, band, boundaries, options.scale)
    mask = build_mask(sq, sk, band, allowed, boundaries, query.device)
    if options.sinks is None:
        return fused(query, key, value, options, mask)
    return with_sinks(query, key, value, options, options.sinks, mask)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` through the first of the kernels that can run; off a GPU torch chooses."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    on_gpu = query.device.type == "cuda"
    grouped = k.size(1) != q.size(1)
    if grouped and on_gpu and (mask is not None or query.dtype not in _HALF):
        # The memory-efficient kernel, the only one that may be left then, knows no groups.
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        grouped = False
    with sdpa_kernel(list(options.kernels), set_priority=True) if on_gpu else contextlib.nullcontext():
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=is_causal,
            scale=options.scale,
            enable_gqa=grouped,
        )
    return output.permute(2, 0, 1, 3)


def may_flash(query: Tensor, value: Tensor, options: Options) -> bool:
    """Whether torch's flash kernel may run on these and can: on a GPU since Ampere, in bf16 or fp16, no dropout."""
    if SDPBackend.FLASH_ATTENTION not in options.kernels or options.dropout:
        return False
    size = query.size(-1)
    if query.device.type != "cuda" or query.dtype not in _HALF or size % 8 or size > 256 or value.size(-1) > size:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash(query: Tensor, key: Tensor, value: Tensor, band: Band, boundaries: Boundaries | None, scale: float) -> Tensor:
    """Flash attention in a band, without a mask in memory. `boundaries` are those of sequences packed at b = 1."""
    sq, sk, batch, size = len(query), len(key), query.size(1), value.size(-1)
    query_starts, key_starts = boundaries or batch_boundaries(batch, sq, sk, query.device)
    value = F.pad(value, (0, query.size(-1) - size))
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    window = (-1 if band.left is None else band.left, -1 if band.right is None else band.right)
    output: Any = varlen_attn(q, k, v, query_starts, key_starts, sq, sk, scale=scale, window_size=window)
    return output[..., :size].unflatten(0, (batch, sq)).transpose(0, 1)


def batch_boundaries(batch: int, sq: int, sk: int, device: torch.device) -> Boundaries:
    """The sequences of a batch, as if they were packed one behind the other."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Boundaries(starts * sq, starts * sk)


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, options: Options, sinks: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention whose softmax has one more term, exp(sinks[head]), in the denominator; all scores are in memory."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = written_out_scores(q, k, options, mask)
    sink = sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype)
    return (F.dropout(weights, options.dropout) @ v).permute(2, 0, 1, 3)


def written_out_scores(query: Tensor, key: Tensor, options: Options, mask: Tensor | None) -> Tensor:
    """[b, np, sq, hn], [b, np, sk, hn] → [b, np, sq, sk] in fp32 or fp64, -inf where the mask says so."""
    scores = (query * (options.scale / options.fp32_factor)) @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * options.fp32_factor
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def allowed_by(attention_mask: Tensor | None, sq: int, sk: int) -> Tensor | None:
    """mcore's mask turned round: True where a query may look, [..., sq, sk]. Raises ValueError if it does not fit."""
    if attention_mask is None:
        return None
    rows, columns = attention_mask.shape[-2:]
    if attention_mask.dtype != torch.bool or rows not in (1, sq) or columns not in (1, sk):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}: it must be bool, True where a "
            f"query may not look, and broadcast to [b, np, {sq}, {sk}]"
        )
    return ~attention_mask.expand(*attention_mask.shape[:-2], sq, sk)


def build_mask(
    sq: int, sk: int, band: Band, allowed: Tensor | None, boundaries: Boundaries | None, device: torch.device
) -> Tensor | None:
    """The mask of a band, of packed sequences and of what the caller allows, together; None where all is visible."""
    if boundaries is not None:
        mask = packed_mask(sq, sk, band, boundaries)
    else:
        mask = None if band == EVERYTHING else band_mask(sq, sk, band, device)
    if allowed is None:
        return mask
    mask = allowed if mask is None else mask & allowed
    return mask | ~mask.any(dim=-1, keepdim=True)  # a padding token sees everything, as a softmax of nothing is NaN


def packed_mask(sq: int, sk: int, band: Band, boundaries: Boundaries, chunks_ahead: int = 0) -> Tensor:
    """The mask of packed sequences, [sq, sk], in a band; queries may sit chunks of their own lengths ahead."""
    (sequence, query), (key_sequence, key) = (_places(*x) for x in zip((sq, sk), boundaries, strict=True))
    if chunks_ahead:
        query = query + (chunks_ahead * boundaries.queries.diff())[sequence]
    mask, ahead = sequence[:, None] == key_sequence, key - query[:, None]
    if band.left is not None:
        mask &= ahead >= -band.left
    return mask if band.right is None else mask & (ahead <= band.right)


def _places(tokens: int, boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each token's sequence, and its position counted from the sequence's end."""
    place = torch.arange(tokens, device=boundaries.device)
    sequence = torch.bucketize(place, boundaries[1:], right=True)
    return sequence, place - boundaries[1:][sequence]


@functools.lru_cache(maxsize=4)  # layers share them: with context parallelism and windows in some layers there are four
def band_mask(sq: int, sk: int, band: Band, device: torch.device) -> Tensor:
    """The mask of a band, [sq, sk]."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not serve training later
        mask = torch.ones(sq, sk, dtype=torch.bool, device=device)
        if band.right is not None:
            mask = mask.tril(sk - sq + band.right)
        return mask if band.left is None else mask.triu(sk - sq - band.left)
