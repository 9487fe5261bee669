"""LoRA: low-rank adapters beside parallel linear layers, W x + alpha / rank · B A x (arXiv:2106.09685).

Only the adapters train: frozen weights have no gradient buffers and no optimizer state. Of a column parallel layer B is
cut as the layer is, of a row parallel one A; the other factor is whole on every tensor parallel rank.

The layers are mcore's own, or Transformer Engine's as mcore wraps them. Of those that hold a norm, too, x is what the
norm makes of the input, which Transformer Engine returns if asked. The adapters' products are torch's, outside FP8.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
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
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_model_config

from minloop.architecture import unwrapped
from minloop.data_parallel import end_training, gathered_parameters
from minloop.fully_sharded import FullySharded, keep_weights
from minloop.precision_checks import refuse_fp8_weights

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""mcore's names of the linear layers of attention and MLP."""

_TE = transformer_engine.HAVE_TE  # without it mcore's names for its layers are no classes
NORMED: list[type] = [transformer_engine.TELayerNormColumnParallelLinear] if _TE else []
COLUMN: list[type] = [ColumnParallelLinear, *NORMED, *([transformer_engine.TEColumnParallelLinear] if _TE else [])]
ROW: list[type] = [RowParallelLinear, *([transformer_engine.TERowParallelLinear] if _TE else [])]
"""The layers that get adapters, and no classes made from them, which compute in ways of their own."""

MERGED = (
    "merge_lora took the adapters, which are all that trained, out of this model: it can only be read, and saved with "
    "save_checkpoint(weights_only=True). To train, build a new state without adapters and load that, weights_only=True"
)


def lora(*, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = TARGETS) -> Callable[[MegatronModule], None]:
    """Return a hook for ``before_wrapping`` that freezes a chunk and adds adapters to its linear layers.

        chunks = minloop.build_gpt_model(..., before_wrapping=minloop.lora(rank=8))

    The model computes at first what it computes without: B is zero, A is drawn as torch.nn.Linear's weight is. Experts
    get no adapters, nor do grouped layers, which are theirs. Load the base weights before wrapping, too, or afterwards
    with ``allow_missing=["*_lora.*"]``.

    Args:
        rank: of A and B.
        alpha: the product is multiplied by alpha / rank.
        targets: names of mcore's layers.
    Raises:
        ValueError: when called, if a chunk has none of the layers, they are of another kind than parallel linear ones,
            or something computes them without calling them; a chunk without layers, as of a stage with the embedding
            alone, needs none.
    """
    if rank < 1:
        raise ValueError(f"rank ({rank}) must be at least 1")

    def add(chunk: MegatronModule) -> None:
        chunk.requires_grad_(False)
        for parent, name, linear in _found(chunk, targets):
            gated = get_model_config(chunk).gated_linear_unit and name == "linear_fc1"
            parent.add_module(f"{name}_lora", LoRA(linear, rank, alpha, gated))
        embedding: Any = getattr(chunk, "embedding", None)
        if embedding is not None:  # recomputed layers get gradients only if their input has
            embedding.register_forward_hook(_require_gradient)

    return add


def _found(chunk: MegatronModule, targets: Sequence[str]) -> list[tuple[torch.nn.Module, str, Any]]:
    """The layers, each with its parent and name in it."""
    layers: list[Any] = [layer for layer in chunk.modules() if isinstance(layer, MoELayer)]
    of_experts = {module for layer in layers for module in layer.experts.modules()}
    found = [
        (parent, name, child)
        for parent in chunk.modules()
        for name, child in parent.named_children()
        if name in targets and child not in of_experts
    ]
    decoder: Any = getattr(chunk, "decoder", None)
    if not found and (decoder is None or len(decoder.layers)):  # a pipeline stage may have no layers
        raise ValueError(f"the model has no layers {', '.join(targets)} outside experts for adapters")
    if get_model_config(chunk).use_transformer_engine_op_fuser:
        raise ValueError(
            "use_transformer_engine_op_fuser=True passes linear layers by, and adapters with them: set it to False"
        )
    for _, name, linear in found:
        if type(linear) not in COLUMN + ROW:
            raise ValueError(
                f"{name} is a {type(linear).__name__}: adapters are for column and row parallel linear layers, mcore's "
                f"or Transformer Engine's: choose targets without {name}"
            )
        if getattr(linear, "explicit_expert_comm", False) or getattr(linear, "parallel_mode", "") is None:
            raise ValueError(
                f"{name} of shared experts does not communicate by itself with moe_shared_expert_overlap=True: set it "
                "to False"
            )
    return found


class LoRA(torch.nn.Module):
    """The adapter of one linear layer, whose output it adds to.

    Attributes:
        a: [rank, in], of a row parallel layer [rank, in / tp].
        b: [out, rank], of a column parallel layer [out / tp, rank].
    """

    def __init__(self, linear: Any, rank: int, alpha: float, gated: bool) -> None:
        super().__init__()
        self.scale, self.gated = alpha / rank, gated
        self.tp_group: Any = getattr(linear, "_tp_group", None) or linear.tp_group  # Transformer Engine's, mcore's
        self.column, self.normed = type(linear) in COLUMN, type(linear) in NORMED
        self.sequence_parallel = linear.sequence_parallel
        if self.normed:
            linear.return_layernorm_output = True
        weight: Any = linear.weight
        out, width = weight.shape
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.a = torch.nn.Parameter(torch.empty(rank, width, **options))
        self.b = torch.nn.Parameter(torch.zeros(out, rank, **options))
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

    def _add(self, linear: Any, inputs: tuple[torch.Tensor, ...], output: tuple[Any, ...]) -> Any:
        value, (first, *rest) = inputs[0], output
        if self.normed:  # mcore passes on (out, bias, normed), or makes ((out, normed), None) of what has no bias
            first, value = first if isinstance(first, tuple) else (first, rest.pop())
        return first + self(value), *rest  # called as a module, so that hooks gather its weights first

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output, of its input or what its norm makes of it."""
        hidden = torch.nn.functional.linear(value, self.a)
        group: Any = self.tp_group
        if self.column and self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        elif self.column:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        elif self.sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=group)
        return torch.nn.functional.linear(hidden, self.b) * self.scale

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

    For streaming whole weights, or saving them with ``save_checkpoint(weights_only=True)`` or `save_hf_weights`, when
    training is over: a training state of these chunks refuses to train and to save its optimizer. Every rank calls it.

    Raises:
        ValueError: there are no adapters, or the weights are in FP8.
        RuntimeError: the weights are in host memory, or a stream of them is open.
    """
    refuse_fp8_weights(get_model_config(chunks[0]), "merge_lora cannot add to")
    found = [entry for chunk in chunks for entry in list(_adapters(unwrapped(chunk)))]
    if not found:
        raise ValueError("the model has no adapters to merge: see minloop.lora")
    with gathered_parameters(chunks):  # ZeRO-1's ranks lack what others updated; mcore's hooks are on these modules
        for parent, name, adapter in found:
            linear = getattr(parent, name.removesuffix("_lora"))
            linear.weight.add_((adapter.b.float() @ adapter.a.float() * adapter.scale).to(linear.weight.dtype))
            adapter.hook.remove()
            if adapter.normed:
                linear.return_layernorm_output = False
            delattr(parent, name)
        for chunk in chunks:
            if isinstance(chunk, FullySharded):
                keep_weights(chunk)
    end_training(chunks, MERGED)


def _adapters(model: Any) -> Iterator[tuple[torch.nn.Module, str, LoRA]]:
    for parent in model.modules():
        yield from ((parent, name, child) for name, child in parent.named_children() if isinstance(child, LoRA))


def _require_gradient(embedding: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output
