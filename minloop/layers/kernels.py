"""The ways to compute attention on one rank: torch's fused kernels, its flash kernel on bands, and sinks written out.

Queries are [sq, b, np, hn], keys [sk, b, ng, hn] and values [sk, b, ng, hv], where ng divides np; outputs are
[sq, b, np, hv]. Masks are bool, True where a query may look, and broadcast to [b, np, sq, sk].
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

_HALF = (torch.bfloat16, torch.float16)


class Band(NamedTuple):
    """How many keys a query may look back and ahead; -1 is all. The last query is level with the last key."""

    left: int
    right: int


EVERYTHING, CAUSAL = Band(-1, -1), Band(-1, 0)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float,
    kernels: Sequence[SDPBackend],
) -> Tensor:
    """`scaled_dot_product_attention` through the first of `kernels` that can run; off a GPU torch chooses."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    on_gpu = query.device.type == "cuda"
    grouped = k.size(1) != q.size(1)
    if grouped and on_gpu and (mask is not None or query.dtype not in _HALF):
        # The memory-efficient kernel, the only one that may be left then, knows no groups.
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        grouped = False
    with sdpa_kernel(list(kernels), set_priority=True) if on_gpu else contextlib.nullcontext():
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    return output.permute(2, 0, 1, 3)


def flash_can_run(query: Tensor, value: Tensor) -> bool:
    """Whether `flash` can take these: on a GPU since Ampere, in bf16 or fp16."""
    size = query.size(-1)
    if query.device.type != "cuda" or query.dtype not in _HALF or size % 8 or size > 256 or value.size(-1) > size:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash(query: Tensor, key: Tensor, value: Tensor, band: Band, boundaries: Tensor | None, scale: float) -> Tensor:
    """Flash attention in a band, without a mask in memory. `boundaries` are those of sequences packed at b = 1."""
    sq, sk, batch, size = len(query), len(key), query.size(1), value.size(-1)
    if boundaries is None:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        query_starts, key_starts = starts * sq, starts * sk
    else:
        query_starts = key_starts = boundaries
    value = F.pad(value, (0, query.size(-1) - size))
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    window = (band.left, band.right)
    output: Any = varlen_attn(q, k, v, query_starts, key_starts, sq, sk, scale=scale, window_size=window)
    return output[..., :size].unflatten(0, (batch, sq)).transpose(0, 1)


def with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sinks: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    fp32_factor: float,
) -> Tensor:
    """Attention whose softmax has one more term, exp(sinks[head]), in the denominator; all scores are in memory.

    Args:
        sinks: [np], the logits that take attention without giving a value (arXiv 2309.17453; zero is
            https://www.evanmiller.org/attention-is-off-by-one.html).
        fp32_factor: the part of `scale` that is applied to the scores once they are in fp32.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = (q * (scale / fp32_factor)) @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * fp32_factor
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype)
    return (F.dropout(weights, dropout) @ v).permute(2, 0, 1, 3)


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
    sq: int, sk: int, band: Band, allowed: Tensor | None, boundaries: Tensor | None, device: torch.device
) -> Tensor | None:
    """The mask of a band, of packed sequences and of what the caller allows, together; None where all is visible."""
    masks: list[Tensor] = [] if band == EVERYTHING else [_band_mask(sq, sk, band, device)]
    if boundaries is not None:
        sequence = torch.bucketize(torch.arange(sq, device=device), boundaries[1:], right=True)
        masks.append(sequence[:, None] == sequence)
    if allowed is not None:
        masks.append(allowed)
    mask = functools.reduce(torch.logical_and, masks) if masks else None
    if allowed is None or mask is None:
        return mask
    return mask | ~mask.any(dim=-1, keepdim=True)  # a padding token sees everything, as a softmax of nothing is NaN


@functools.lru_cache(maxsize=4)  # layers share them: with context parallelism and windows in some layers there are four
def _band_mask(sq: int, sk: int, band: Band, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could not serve training later
        mask = torch.ones(sq, sk, dtype=torch.bool, device=device)
        if band.right >= 0:
            mask = mask.tril(sk - sq + band.right)
        return mask.triu(sk - sq - band.left) if band.left >= 0 else mask
