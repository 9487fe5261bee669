"""All ranks of a layout, whoever owns the world: its model parallel ranks, and then the data parallel ones."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection


def over_all_ranks(values: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    """Replace each element of `values` by its maximum over all ranks; all of them call it."""
    for group in (groups.mp, groups.dp_cp):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def from_all_ranks(value: Any, groups: ProcessGroupCollection) -> list[Any]:
    """Return the picklable `value` of every rank, in the order of global ranks; all of them call it."""
    found: list[Any] = [(dist.get_rank(), value)]
    for group in (groups.mp, groups.dp_cp):
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, found, group=group)
        found = [entry for part in gathered for entry in part]
    return [value for _, value in sorted(found, key=lambda entry: entry[0])]
