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


def compare_with_first(what: str, value: str, groups: ProcessGroupCollection) -> None:
    """Raise ValueError if a rank came to this call before with another `value`.

    All ranks call it equally often for the same `what`. None waits: it is two look-ups in the store of each group, and
    the rank that is first learns nothing.
    """
    for group in (groups.mp, groups.dp_cp):
        if group.size() == 1:
            continue
        store: Any = dist.distributed_c10d._world.pg_map[group][1]  # pyright: ignore[reportPrivateUsage]
        calls = store.add(f"minloop/{what}/calls of rank {dist.get_rank()}", 1)
        first = store.compare_set(f"minloop/{what}/{calls}", "", value).decode()
        if first != value:
            raise ValueError(
                f"the ranks disagree on {what}: {value} on rank {dist.get_rank()}, {first} on another; "
                "give all of them the same"
            )
