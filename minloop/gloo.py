"""What only NCCL has, for gloo: ``all_gather`` and ``reduce_scatter`` of tensors of unequal shapes."""

import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Changes = Iterator[tuple[Any, str, Any]]
"""Attributes to set while `minloop.cpu_backend` is on: owner, name, value."""


def collective_changes() -> Changes:
    """Of torch's collectives, and of meshes of devices, which are to be the CPU."""
    even_all_gather, even_reduce_scatter, plus = dist.all_gather, dist.reduce_scatter, dist.ReduceOp.SUM

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if (rank := dist.get_rank(group)) < 0 or len({t.shape for t in tensor_list}) < 2:
            return even_all_gather(tensor_list, tensor, group, async_op)
        tensor_list[rank].copy_(tensor.detach())
        work: Any = None
        for i, t in enumerate(tensor_list):
            work = dist.broadcast(t, group=group, group_src=i, async_op=True)
            work.wait()
        return work if async_op else None

    def reduce_scatter(output: Any, input_list: Any, op: Any = plus, group: Any = None, async_op: bool = False) -> Any:
        if (rank := dist.get_rank(group)) < 0 or len({t.shape for t in input_list}) < 2:
            return even_reduce_scatter(output, input_list, op, group, async_op)
        work: Any = None
        for i, t in enumerate(input_list):
            total = t.detach().clone()  # reduce overwrites its input on every rank
            work = dist.reduce(total, op=op, group=group, group_dst=i, async_op=True)
            work.wait()
            if i == rank:
                output.copy_(total)
        return work if async_op else None

    mesh = DeviceMesh.from_group
    yield DeviceMesh, "from_group", staticmethod(lambda group, device_type, **more: mesh(group, "cpu", **more))
    yield dist, "all_gather", functools.wraps(even_all_gather)(all_gather)
    yield dist, "reduce_scatter", functools.wraps(even_reduce_scatter)(reduce_scatter)
