"""LoRA: low-rank adapters beside mcore's parallel linear layers, W x + alpha / rank · B A x (arXiv:2106.09685).

Only the adapters train: frozen weights have no gradient buffers and no optimizer state. Of a column parallel layer B is
cut as the layer is, of a row parallel one A; the other factor is whole on every tensor parallel rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_model_config

from minloop.architecture import unwrapped

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""mcore's names of the linear layers of attention and MLP."""


def lora(*, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = TARGETS) -> Callable[[MegatronModule], None]:
    """Return a hook for ``before_wrapping`` that freezes a chunk and adds adapters to its linear layers.

        chunks = minloop.build_gpt_model(..., before_wrapping=minloop.lora(rank=8))

    The model computes at first what it computes without: B is zero, A is drawn as torch.nn.Linear's weight is. Experts
    get no adapters. Load the base weights before wrapping, too, or afterwards with ``allow_missing=["*_lora.*"]``.

    Args:
        rank: of A and B.
        alpha: the product is multiplied by alpha / rank.
        targets: names of mcore's layers.
    Raises:
        ValueError: when called, if a chunk has none of the layers, or they are Transformer Engine's, of which some hold
            a norm that an adapter cannot see past: build the model with ``transformer_impl="local"``.
    """
    if rank < 1:
        raise ValueError(f"rank ({rank}) must be at least 1")

    def add(chunk: MegatronModule) -> None:
        chunk.requires_grad_(False)
        found = [
            (parent, name, child)
            for parent in chunk.modules()
            for name, child in parent.named_children()
            if name in targets and not getattr(child, "is_expert", False)
        ]
        if not found:
            raise ValueError(f"the model has no layers {', '.join(targets)} outside experts for adapters")
        for parent, name, linear in found:
            if not isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                raise ValueError(
                    f"{name} is a {type(linear).__name__}: adapters are for mcore's own linear layers; build the model "
                    "with transformer_impl='local'"
                )
            gated = get_model_config(chunk).gated_linear_unit and name == "linear_fc1"
            adapter = LoRA(linear, rank, alpha, gated)
            parent.add_module(f"{name}_lora", adapter)
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:  # recomputed layers get gradients only if their input has
            embedding.register_forward_hook(_require_gradient)

    return add


class LoRA(torch.nn.Module):
    """The adapter of one linear layer, whose output it adds to.

    Attributes:
        a: [rank, in], of a row parallel layer [rank, in / tp].
        b: [out, rank], of a column parallel layer [out / tp, rank].
    """

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, rank: int, alpha: float, gated: bool) -> None:
        super().__init__()
        self.scale, self.gated = alpha / rank, gated
        self.tp_group: Any = linear.tp_group
        self.column = isinstance(linear, ColumnParallelLinear)
        self.sequence_parallel = linear.sequence_parallel
        weight: Any = linear.weight
        out, width = weight.shape
        self.a = torch.nn.Parameter(weight.new_empty(rank, width))
        self.b = torch.nn.Parameter(weight.new_zeros(out, rank))
        bound = math.sqrt(1 / (width if self.column else width * self.tp_group.size()))
        if self.column:
            torch.nn.init.uniform_(self.a, -bound, bound)
        else:
            streams: Any = get_cuda_rng_tracker()
            with streams.fork():  # tensor parallel ranks draw their own
                torch.nn.init.uniform_(self.a, -bound, bound)
        cut, whole = (self.b, self.a) if self.column else (self.a, self.b)
        set_tensor_model_parallel_attributes(cut, True, 0 if self.column else 1, 1)
        set_defaults_if_not_set_tensor_model_parallel_attributes(whole)
        vars(whole)["sequence_parallel"] = self.sequence_parallel  # then its gradient is summed over the ranks
        self.hook = linear.register_forward_hook(self._add)

    def _add(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        hidden = torch.nn.functional.linear(inputs[0], self.a)
        group: Any = self.tp_group
        if self.column and self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        elif self.column:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        elif self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=group)
        first, *rest = output
        return first + torch.nn.functional.linear(hidden, self.b) * self.scale, *rest

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """What mcore's checkpoints know of it; a gated layer's rows are cut in two, as the layer's own."""
        axes = {"b": 0} if self.column else {"a": 1}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            options: dict[str, Any] = {"tp_group": self.tp_group, "dp_group": metadata["dp_cp_group"]}
            single = metadata.get("singleton_local_shards", False)
            found[f"{prefix}b"] = apply_swiglu_sharded_factory(found[f"{prefix}b"], sharded_offsets, single, **options)
        return found


@torch.no_grad()
def merge_lora(chunks: Sequence[torch.nn.Module]) -> None:
    """Add the adapters to the weights beside them, W + alpha / rank · B A, and take them out of the model.

    For saving or streaming whole weights when training is over; a training state of these chunks trains nothing more.

    Raises:
        ValueError: there are no adapters.
    """
    found = [entry for chunk in chunks for entry in list(_adapters(unwrapped(chunk)))]
    if not found:
        raise ValueError("the model has no adapters to merge: see minloop.lora")
    for parent, name, adapter in found:
        weight = getattr(parent, name.removesuffix("_lora")).weight
        weight += (adapter.b.float() @ adapter.a.float() * adapter.scale).to(weight.dtype)
        adapter.hook.remove()
        delattr(parent, name)


def _adapters(model: Any) -> Iterator[tuple[torch.nn.Module, str, LoRA]]:
    for parent in model.modules():
        yield from ((parent, name, child) for name, child in parent.named_children() if isinstance(child, LoRA))


def _require_gradient(embedding: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output
