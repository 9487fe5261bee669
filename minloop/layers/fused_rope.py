"""`fused_single_qkv_rope` at the speed of memory: queries, keys and values out of one product, rotated on their way.

Transformer Engine's kernel computes a sine and a cosine for every element, in every layer; here they are computed once
for all layers. Imported only where there is Transformer Engine, and so a torch for GPUs, which brings Triton.
"""
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# (Triton is not with the torch for CPUs, on which types are checked, and reads no types but its own.)

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from megatron.core.transformer import attention

Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _load(mixed, query, key, value, places, kinds, step, mask, split):
    """A tile, in float32: of the three tensors if `split`, of the product otherwise."""
    if split:
        tile = tl.load(query + places[1] + step, mask=mask & kinds[0], other=0.0).to(tl.float32)
        tile += tl.load(key + places[2] + step, mask=mask & kinds[1], other=0.0).to(tl.float32)
        tile += tl.load(value + places[2] + step, mask=mask & kinds[2], other=0.0).to(tl.float32)
    else:
        tile = tl.load(mixed + places[0] + step, mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit
def _store(tile, mixed, query, key, value, places, kinds, step, mask, split):
    if split:
        tl.store(query + places[1] + step, tile, mask=mask & kinds[0])
        tl.store(key + places[2] + step, tile, mask=mask & kinds[1])
        tl.store(value + places[2] + step, tile, mask=mask & kinds[2])
    else:
        tl.store(mixed + places[0] + step, tile, mask=mask)


@triton.jit
def _rotate_token(
    mixed,  # [s, b, ng, (queries + 2) * channels]
    query,  # [s, b, ng * queries, channels]
    key,  # [s, b, ng, channels]
    value,  # [s, b, ng, channels]
    cosines,  # [s, rotary / 2], as sines
    sines,
    batch,
    groups: tl.constexpr,
    queries: tl.constexpr,  # of a group
    channels: tl.constexpr,
    rotary: tl.constexpr,  # the channels that are rotated, the first ones
    heads: tl.constexpr,  # groups * (queries + 2) and, below, half of rotary and the other channels: powers of 2
    pairs: tl.constexpr,
    rest: tl.constexpr,
    backward: tl.constexpr,  # from the gradients of the three to that of the product
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, heads)[:, None]
    group, member = head // (queries + 2), head % (queries + 2)
    kinds = member < queries, member == queries, member == queries + 1
    first = token * groups + group
    places = (token * groups * (queries + 2) + head) * channels, (first * queries + member) * channels, first * channels

    pair, exists = tl.arange(0, pairs)[None, :], group < groups
    mask = exists & (pair < rotary // 2)
    angle = (token // batch) * (rotary // 2) + pair
    cosine = tl.load(cosines + angle, mask=mask & (member <= queries), other=1.0)
    sine = tl.load(sines + angle, mask=mask & (member <= queries), other=0.0)  # values stay as they are
    if backward:
        sine = -sine
    x = _load(mixed, query, key, value, places, kinds, pair, mask, backward)
    y = _load(mixed, query, key, value, places, kinds, pair + rotary // 2, mask, backward)
    _store(x * cosine - y * sine, mixed, query, key, value, places, kinds, pair, mask, not backward)
    _store(y * cosine + x * sine, mixed, query, key, value, places, kinds, pair + rotary // 2, mask, not backward)
    if rotary < channels:
        channel = tl.arange(0, rest)[None, :] + rotary
        mask = exists & (channel < channels)
        x = _load(mixed, query, key, value, places, kinds, channel, mask, backward)
        _store(x, mixed, query, key, value, places, kinds, channel, mask, not backward)


def _launch(
    mixed: torch.Tensor, split: Split, cosines: torch.Tensor, sines: torch.Tensor, *, backward: bool = False
) -> None:
    query, key, _ = split
    s, b, groups, channels = key.shape
    queries, rotary = query.shape[2] // groups, 2 * cosines.shape[-1]
    sizes = groups * (queries + 2), rotary // 2, max(channels - rotary, 1)
    powers = [triton.next_power_of_2(size) for size in sizes]
    kernel: Any = _rotate_token
    kernel[(s * b,)](
        mixed, *split, cosines, sines, b, groups, queries, channels, rotary, *powers, backward, num_warps=8
    )


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, sizes: Sequence[int]
    ) -> Split:
        s, b, groups, _ = mixed.shape
        channels = sizes[1]
        ctx.save_for_backward(cosines, sines)
        split = (
            mixed.new_empty(s, b, groups * sizes[0] // channels, channels),
            mixed.new_empty(s, b, groups, channels),
            mixed.new_empty(s, b, groups, channels),
        )
        _launch(mixed, split, cosines, sines)
        return split

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        query, key, value = (gradient.contiguous() for gradient in gradients)
        s, b, groups, channels = key.shape
        mixed = key.new_empty(s, b, groups, (query.shape[2] // groups + 2) * channels)
        _launch(mixed, (query, key, value), *ctx.saved_tensors, backward=True)
        return mixed, None, None, None


def _cosines_sines(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first half of the angles, which the second repeats. The tensor keeps them, as mcore keeps the tensor."""
    if not hasattr(angles, "cosines_sines"):
        half = angles[:, 0, 0, : angles.shape[-1] // 2].float()
        angles.cosines_sines = half.cos(), half.sin()  # pyright: ignore[reportAttributeAccessIssue]
    return angles.cosines_sines  # pyright: ignore[reportAttributeAccessIssue]


class FusedQKVRope:
    """What mcore calls where `fused_single_qkv_rope` is set; `other`, Transformer Engine's, takes what this does not.

    Called with the product [s, b, ng, (np/ng + 2) * hn], the angles of queries and of keys, each float32 [s, 1, 1,
    rotary], and the sizes of a group's queries, key and value in the product. Returns queries [s, b, np, hn], keys
    and values [s, b, ng, hn]; the first `rotary` channels of queries and keys are rotated by halves (arXiv 2104.09864).
    """

    def __init__(self, other: Callable[..., Split]) -> None:
        self.other = other

    def __call__(
        self, mixed: torch.Tensor, of_queries: torch.Tensor, of_keys: torch.Tensor, sizes: Sequence[int], **options: Any
    ) -> Split:
        expected = (len(mixed), 1, 1, of_queries.shape[-1])
        same = of_queries is of_keys or of_queries.data_ptr() == of_keys.data_ptr()
        if options or not same or of_queries.shape != expected or not mixed.is_contiguous():
            return self.other(mixed, of_queries, of_keys, sizes, **options)
        return _QKVRope.apply(mixed, *_cosines_sines(of_queries), sizes)


def use_fused_rope() -> None:
    """Put `FusedQKVRope` where mcore's attention looks for Transformer Engine's function; once."""
    other: Any = getattr(attention, "apply_fused_qkv_rotary_pos_emb", None)
    if other is not None and not isinstance(other, FusedQKVRope):
        attention.apply_fused_qkv_rotary_pos_emb = FusedQKVRope(other)
