"""Ring attention (arXiv 2310.01889): the pattern "p2p", and part of "a2a+p2p".

Keys and values travel round the ranks of a ring, and each rank attends to those that come by with the queries it has,
as far as they may look; the outputs are merged. Backward they travel once more, followed by their gradients in fp32,
to which every rank adds its part. While one share is worked on, the next is already on its way.

For backward a rank holds its own share of queries, keys, values and outputs, no more than without context parallelism;
while it works, two shares of keys and values, and backward two of their gradients. Scores are held for one block of a
chunk's queries and a chunk's keys, [b, np, s / 2cp, s / 2cp], unless torch's flash kernel runs: on a GPU, in bf16 or
fp16, without dropout, `attention_mask` and packed sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from minloop.layers.cp_blocks import Block, block_backward, block_forward, merge
from minloop.layers.cp_layout import chunks_of
from minloop.layers.kernels import EVERYTHING, Band, Boundaries, Options, packed_mask

_KEYS, _GRADIENTS = 1, 2
"""Tags of messages: gloo tells by them what is on its way at the same time."""


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band,
    options: Options,
    group: dist.ProcessGroup,
    allowed: Tensor | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Attend to the whole sequence with this rank's earlier and later chunks of queries, [s/cp, b, np, hn].

    Args:
        key: [s/cp, b, ng, hn], those of the same tokens; value [s/cp, b, ng, hv].
        allowed: [b, np, s/cp, s], where this rank's queries may look, in place of the band.
        boundaries: of packed sequences in the whole.
    """
    ring = _Ring(group, band, options, allowed, boundaries)
    return _RingAttention.apply(query, key, value, options.sinks, ring)  # pyright: ignore[reportReturnType] no types


@dataclass(frozen=True)
class _Message:
    sent: Tensor  # kept until it has left
    received: Tensor
    works: list[dist.Work]

    def arrive(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class _Ring:
    group: dist.ProcessGroup
    band: Band
    options: Options
    allowed: Tensor | None
    boundaries: Tensor | None

    def pass_on(self, tensor: Tensor, tag: int) -> _Message:
        """Send to the next rank and receive from the one before."""
        rank, size, received = self.group.rank(), self.group.size(), torch.empty_like(tensor)
        there: dict[str, Any] = {"group": self.group, "tag": tag}
        send = dist.P2POp(dist.isend, tensor, group_peer=(rank + 1) % size, **there)
        receive = dist.P2POp(dist.irecv, received, group_peer=(rank - 1) % size, **there)
        return _Message(tensor, received, dist.batch_isend_irecv([send, receive]))

    def shares(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(step, keys, values) of each rank, its own first; meanwhile the next are on their way."""
        here = torch.cat((key.flatten(), value.flatten()))
        for step in range(self.group.size()):
            message = self.pass_on(here, _KEYS) if step + 1 < self.group.size() else None
            yield step, *_split(here, key, value)
            if message is not None:
                here = message.arrive()

    def blocks(self, step: int, tokens: int) -> Iterator[Block]:
        """What this rank's queries can see of the keys that are here at `step`, chunk by chunk."""
        source = (self.group.rank() - step) % self.group.size()
        for query_place, query_chunk in enumerate(chunks_of(self.group)):
            for key_place, key_chunk in enumerate((source, 2 * self.group.size() - 1 - source)):
                block = self._block(query_place, query_chunk, key_place, key_chunk, tokens // 2)
                if block is not None:
                    yield block

    def _block(self, query_place: int, query_chunk: int, key_place: int, key_chunk: int, length: int) -> Block | None:
        rows, columns = (slice(place * length, (place + 1) * length) for place in (query_place, key_place))
        if self.allowed is not None:
            mask = self.allowed[..., rows, key_chunk * length : (key_chunk + 1) * length]
            return Block(rows, columns, EVERYTHING, mask=mask)
        ahead = query_chunk - key_chunk
        if self.boundaries is not None:
            if ahead < 0:
                return None
            starts = self.boundaries // (2 * self.group.size())
            if ahead and self.band.left is not None:
                mask = packed_mask(length, length, self.band, Boundaries(starts, starts), ahead)
                return Block(rows, columns, EVERYTHING, mask=mask)
            return Block(rows, columns, EVERYTHING if ahead else self.band, starts)
        band = self.band.ahead(ahead * length)
        # What is left of the block, once queries that see no key and keys that no query sees are off, is a square too.
        unseen, blind = (0 if side is None else max(0, -side) for side in band)
        if max(unseen, blind) >= length:
            return None
        rows = slice(rows.start + blind, rows.stop - unseen)
        columns = slice(columns.start + unseen, columns.stop - blind)
        left, right = band.ahead(blind - unseen)
        left, right = (None if side is None or side >= length - 1 else side for side in (left, right))
        return Block(rows, columns, Band(left, right))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*query.shape[:3], value.size(-1), dtype=dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        ctx.ring, ctx.random_state = ring, _random_state(query.device) if ring.options.dropout else None
        generator = _generator(query.device, ctx.random_state)
        for step, keys, values in ring.shares(key, value):
            for block in ring.blocks(step, len(query)):
                rows, columns = block.rows, block.columns
                part = block_forward(query[rows], keys[columns], values[columns], block, ring.options, generator)
                output[rows], lse[rows] = merge(output[rows], lse[rows], *part)
        if generator is not None:
            _set_random_state(query.device, generator.get_state())
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(dtype))
            output, lse = output * (lse - total).exp().unsqueeze(-1), total
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] one output
        query, key, value, output, lse, sinks = ctx.saved_tensors
        ring: _Ring = ctx.ring
        generator = _generator(query.device, ctx.random_state)
        delta = (gradient.to(lse.dtype) * output).sum(-1)
        d_query = torch.zeros_like(query, dtype=lse.dtype)
        message = None
        for step, keys, values in ring.shares(key, value):
            mine = lse.new_zeros(key.numel() + value.numel())
            d_keys, d_values = _split(mine, key, value)
            for block in ring.blocks(step, len(query)):
                rows, columns = block.rows, block.columns
                own = (gradient[rows], query[rows], keys[columns], values[columns])
                parts = block_backward(*own, output[rows], lse[rows], delta[rows], block, ring.options, generator)
                for total, part in zip((d_query[rows], d_keys[columns], d_values[columns]), parts, strict=True):
                    total += part
            if message is not None:
                mine += message.arrive()
            message = ring.pass_on(mine, _GRADIENTS)
        assert message is not None
        d_key, d_value = _split(message.arrive(), key, value)
        d_sinks = None if sinks is None else -((sinks - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


def _split(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what is as large as `key` and `value` end to end."""
    keys, values = both.split((key.numel(), value.numel()))
    return keys.view(key.shape), values.view(value.shape)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _generator(device: torch.device, state: Tensor | None) -> torch.Generator | None:
    """A generator that draws as the default one did in that state."""
    return None if state is None else torch.Generator(device).set_state(state)
