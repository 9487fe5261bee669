"""Full tensors put together from what the ranks hold, one at a time: memory for one of them and one block is enough.

What passes between ranks stays within the model's own groups, or between two ranks at a time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.checkpoint.parts import Part
from minloop.everyone import from_all_ranks

Place = tuple[slice, ...]


class Block(NamedTuple):
    """Who holds a block of a full tensor: a global rank, of a pipeline stage."""

    rank: int
    stage: int
    place: Place


class FullTensor(NamedTuple):
    """What all ranks know of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[Block]


class Stream:
    """The full tensors of what the ranks hold; every rank makes it, and calls `tensors`.

    Args:
        named: this rank's parts, each with the name of its full tensor; replicas are passed over.
        groups: of the model.
    Attributes:
        known: every full tensor by name, alike on all ranks.
        ranks: the model's, global ones.
    Raises:
        RuntimeError: parts are missing.
    """

    def __init__(self, named: Iterable[tuple[str, Part]], groups: ProcessGroupCollection) -> None:
        self._groups, self._own = groups, dict[str, list[torch.Tensor]]()
        mine: dict[str, FullTensor] = {}
        for name, part in named:
            if part.is_main:
                self._own.setdefault(name, []).append(part.tensor)
                entry = mine.setdefault(name, FullTensor(part.shape, part.tensor.dtype, []))
                entry.blocks.append(Block(dist.get_rank(), groups.pp.rank(), part.place))
        self.known: dict[str, FullTensor] = {}
        everyones = from_all_ranks((dist.get_rank(), mine), groups)
        self.ranks = sorted(rank for rank, _ in everyones)
        for _, theirs in everyones:
            for name, entry in theirs.items():
                self.known.setdefault(name, entry._replace(blocks=[])).blocks.extend(entry.blocks)
        for name, entry in self.known.items():
            if sum(_size(block.place).numel() for block in entry.blocks) != torch.Size(entry.shape).numel():
                raise RuntimeError(
                    f"the ranks' shares of {name} do not make up the whole: its sharded_state_dict is wrong"
                )

    def tensors(
        self, names: Sequence[str], *, ranks: Collection[int] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) on the global ranks that ask, all by default; on others do their part.

        Every rank iterates to the end, over the same names.

        Raises:
            ValueError: a rank that asks is none of the model's.
        """
        if outside := sorted(set(ranks or ()) - set(self.ranks)):
            raise ValueError(
                f"ranks={sorted(ranks or ())}: {outside} are not among the model's, {self.ranks}, and would not take "
                "part; let a rank of the model ask, and pass the tensors on to them in a group of the host's own"
            )
        rank = dist.get_rank()
        for name in names:
            shape, own_dtype, blocks = self.known[name]
            options: dict[str, Any] = {"dtype": dtype or own_dtype, "device": torch.cuda.current_device()}
            full = torch.empty(shape, **options) if ranks is None or rank in ranks else None
            own = iter(self._own.get(name, []))
            for block in blocks:
                if block.rank == rank:
                    value = next(own).detach().to(options["dtype"]).contiguous()
                elif ranks is None or rank in ranks:
                    value = torch.empty(_size(block.place), **options)
                else:
                    continue
                self._pass_on(value, block, ranks)
                if full is not None:
                    full[block.place] = value
            if full is not None:
                yield name, full

    def _pass_on(self, value: torch.Tensor, block: Block, ranks: Collection[int] | None) -> None:
        """Bring a block from the rank that holds it to those that ask, into their `value`."""
        if ranks is None:
            if self._groups.pp.rank() == block.stage:
                dist.broadcast(value, src=block.rank, group=self._groups.tp_dp_cp)
            if self._groups.pp.size() > 1:
                source = dist.get_process_group_ranks(self._groups.pp)[block.stage]
                dist.broadcast(value, src=source, group=self._groups.pp)
        elif block.rank != dist.get_rank():
            dist.recv(value, src=block.rank)
        else:
            for other in sorted(set(ranks) - {block.rank}):
                dist.send(value, dst=other)


def _size(place: Place) -> torch.Size:
    return torch.Size([side.stop - side.start for side in place])
