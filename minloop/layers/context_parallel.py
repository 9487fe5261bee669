"""Context parallel attention by each `cp_comm_type` that mcore names: which groups a pattern talks through, and how.

- "p2p": keys and values travel round a ring, see `minloop.layers.cp_ring`.
- "a2a": tokens are exchanged for heads, see `minloop.layers.cp_ulysses`; then each rank attends alone.
- "all_gather": each rank gets the keys and values of all (the Llama 3 paper, section 3.3.2, arXiv 2407.21783).
- "a2a+p2p": an exchange within neighbours, then a ring over what they hold together.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup

from minloop.layers.cp_layout import chunks_of, gather_sequence, join_share, split_share
from minloop.layers.cp_ring import ring_attention
from minloop.layers.cp_ulysses import heads_to_tokens, repeat_groups, tokens_to_heads
from minloop.layers.kernels import EVERYTHING, Band, Boundaries, Options, attend, build_mask


@dataclass(frozen=True)
class ContextParallel:
    """The groups of one layer's pattern; the first is that of all context parallel ranks, the others may be None."""

    everyone: ProcessGroup
    heads: ProcessGroup | None = None
    ring: ProcessGroup | None = None

    @classmethod
    def from_groups(cls, cp_comm_type: str | None, groups: ProcessGroupCollection) -> Self:
        """Choose by `cp_comm_type`; None is "p2p", as for Transformer Engine.

        Raises:
            ValueError: there is no such type, or the groups for it were not made.
        """
        match cp_comm_type:
            case None | "p2p":
                return cls(groups.cp, ring=groups.cp)
            case "a2a":
                return cls(groups.cp, heads=groups.cp)
            case "all_gather":
                return cls(groups.cp)
            case "a2a+p2p":
                levels: Any = getattr(groups, "hcp", None) or ()
                if len(levels) != 2:
                    raise ValueError(
                        f"cp_comm_type='a2a+p2p' needs groups of two levels and there are {len(levels)}: set "
                        "hierarchical_context_parallel_sizes=[ranks of an all-to-all, ranks of a ring] in the config "
                        "given to init_distributed"
                    )
                heads, ring = (None if group.size() == 1 else group for group in levels)
                return cls(groups.cp, heads, ring)
            case _:
                raise ValueError(f"cp_comm_type={cp_comm_type!r}: use 'p2p', 'a2a', 'all_gather' or 'a2a+p2p'")

    def check_heads(self, heads: int) -> None:
        """Raise ValueError unless `heads` query heads of a tensor parallel rank can be dealt out."""
        if self.heads is not None and heads % self.heads.size():
            raise ValueError(
                f"an all-to-all of cp_comm_type 'a2a' or 'a2a+p2p' over {self.heads.size()} ranks deals heads out to "
                f"them, but num_attention_heads / tensor_model_parallel_size is {heads}, no multiple: use 'p2p' or "
                "'all_gather', or smaller all-to-alls by 'a2a+p2p' and hierarchical_context_parallel_sizes"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        band: Band,
        options: Options,
        allowed: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> Tensor:
        """Attend to the whole sequence with this rank's share of the queries.

        Args:
            query: [s/cp, b, np, hn], this rank's two chunks (see `minloop.layers.cp_layout`); key and value likewise.
            allowed: [b, np, s/cp, s], whose rows are this rank's and whose columns are in natural order.
            boundaries: of packed sequences in the whole.
        Returns:
            [s/cp, b, np, hv].
        Raises:
            ValueError: tokens cannot be dealt out to the ranks, or the mask not.
        """
        self._check_tokens(len(query), len(key), boundaries)
        if self.heads is None:
            return self._attend(query, key, value, band, options, allowed, boundaries)
        size, rank = self.heads.size(), self.heads.rank()
        within = None if boundaries is None else boundaries // (self.everyone.size() // size)
        key, value = repeat_groups(key, size), repeat_groups(value, size)
        query, key, value = (tokens_to_heads(x, self.heads, within) for x in (query, key, value))
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(size)[rank])
        if allowed is not None:
            if allowed.dim() > 2 and allowed.size(-3) > 1:
                raise ValueError(
                    f"an attention_mask of its own for each of {allowed.size(-3)} heads does not go with "
                    "cp_comm_type='a2a' or 'a2a+p2p', which deal heads out to ranks: use 'p2p' or 'all_gather'"
                )
            rows = allowed.movedim(-2, 0).byte()
            allowed = gather_sequence(rows, self.heads).movedim(0, -2).bool()
        output = self._attend(query, key, value, band, options, allowed, boundaries)
        return heads_to_tokens(output, self.heads, within)

    def _check_tokens(self, queries: int, keys: int, boundaries: Tensor | None) -> None:
        size = self.everyone.size()
        if queries != keys:
            raise ValueError(
                f"{queries} queries and {keys} keys on a rank with context_parallel_size {size}: both must be those of "
                "the same tokens; set context_parallel_size=1 for inference with a cache or cross attention"
            )
        if queries % 2:
            raise ValueError(
                f"context_parallel_size is {size} and a rank has {queries} tokens of a sequence: its length must be a "
                f"multiple of 2 * context_parallel_size ({2 * size})"
            )
        if boundaries is None:
            return
        even = (boundaries % (2 * size) == 0).all()
        message = (
            f"packed_seq_params with context_parallel_size {size}: every sequence must be padded to a multiple of 2 * "
            f"context_parallel_size ({2 * size}) tokens, by cu_seqlens_q_padded or cu_seqlens_q"
        )
        if boundaries.device.type == "cuda":
            torch.ops.aten._assert_async.msg(even, message)  # does not wait for the GPU
        elif not even:
            raise ValueError(message)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        band: Band,
        options: Options,
        allowed: Tensor | None,
        boundaries: Tensor | None,
    ) -> Tensor:
        if self.heads is not None and self.ring is None:
            both = None if boundaries is None else Boundaries(boundaries, boundaries)
            return attend(query, key, value, band, options, allowed, both)
        group = self.ring or self.everyone
        size = group.size()
        query = split_share(query, boundaries, size)
        if allowed is not None:
            allowed = _whole_mask(band, allowed, group)
        if self.ring is None:
            output = _gathered_attention(query, key, value, band, options, group, allowed, boundaries)
        else:
            key, value = split_share(key, boundaries, size), split_share(value, boundaries, size)
            output = ring_attention(query, key, value, band, options, group, allowed, boundaries)
        return join_share(output, boundaries, size)


def _gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Band,
    options: Options,
    group: ProcessGroup,
    allowed: Tensor | None,
    boundaries: Tensor | None,
) -> Tensor:
    """Attend with each of this rank's two chunks to as much as it may see of all keys, which are gathered."""
    key, value = gather_sequence(key, group, boundaries), gather_sequence(value, group, boundaries)
    outputs: list[Tensor] = []
    for half, (rows, chunk) in enumerate(zip(query.chunk(2), chunks_of(group), strict=True)):
        end, parts = (chunk + 1) * len(rows), 2 * group.size()
        if allowed is not None:
            output = attend(rows, key, value, EVERYTHING, options, allowed.chunk(2, dim=-2)[half])
        elif boundaries is not None:
            ends = Boundaries(boundaries // parts, boundaries // parts * (chunk + 1))
            token = torch.arange(end, device=boundaries.device)
            sequence = torch.bucketize(token, ends.keys[1:], right=True)
            seen = token + (boundaries - ends.keys)[sequence]
            output = attend(rows, key[seen], value[seen], band, options, boundaries=ends)
        else:
            first = 0 if band.left is None else max(0, end - len(rows) - band.left)
            last = len(key) if band.right is None else min(len(key), end + band.right)
            output = attend(rows, key[first:last], value[first:last], band.ahead(end - last), options)
        outputs.append(output)
    return torch.cat(outputs)


def _whole_mask(band: Band, allowed: Tensor, group: ProcessGroup) -> Tensor:
    """What is allowed of a band: [..., s/cp, s], the rows of this rank's two chunks."""
    halves: list[Tensor] = []
    for rows, chunk in zip(allowed.chunk(2, dim=-2), chunks_of(group), strict=True):
        sq, sk = rows.shape[-2:]
        mask = build_mask(sq, sk, band.ahead((chunk + 1) * sq - sk), rows, None, rows.device)
        halves += [rows if mask is None else mask]
    return torch.cat(halves, dim=-2)
