"""The first microbatch of a step writes weight gradients, where mcore zeroes all of them and adds the first, too.

Zeroing writes every gradient once, and adding to zero reads it once more: in steps of one or a few microbatches that
shows. The products of Transformer Engine's linear layers, and minloop's own, can overwrite what is there; all other
gradients, those of norms, embeddings and experts, are zeroed as ever. A sum that begins with 0 has the same bits.

It takes a layer that every microbatch passes through once: mcore's GPT, run by `gpt_forward_step`, in no pipeline.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from minloop.architecture import unwrapped
from minloop.layers.weight_gradient import provides_weight_gradient

_KNOWN = {"megatron", "transformer_engine", "torch", "minloop"}
"""Whose layers call each linear layer once; others' may do so as often as they like."""

_of_chunk: WeakKeyDictionary[torch.nn.Module, "FirstGradients"] = WeakKeyDictionary()


def overwrite_first_gradients(ddp: Any, config: TransformerConfig) -> None:
    """Prepare a model that mcore's DDP has just wrapped, if there is anything in it that can overwrite gradients."""
    weights = [*_overwritable(ddp, config)]
    if weights:
        _of_chunk[ddp] = FirstGradients(ddp, weights)


def first_gradients(chunks: Sequence[torch.nn.Module]) -> "FirstGradients | None":
    """What `overwrite_first_gradients` has prepared for these chunks."""
    return _of_chunk.get(chunks[0]) if len(chunks) == 1 else None


def zero_gradients(chunks: Sequence[Any], *, spare: bool) -> None:
    """Zero all gradients, but with `spare` for those that the first microbatch, `overwriting` them, will write."""
    first = first_gradients(chunks) if spare else None
    with first.spared() if first else contextlib.nullcontext():
        for chunk in chunks:
            chunk.zero_grad_buffer()


def overwriting(
    chunks: Sequence[torch.nn.Module], forward_step: Callable[..., Any]
) -> contextlib.AbstractContextManager[Callable[..., Any]]:
    """Give a forward step of which the first call has its backward pass write what `zero_gradients` has spared."""
    first = first_gradients(chunks)
    return first.overwriting(forward_step) if first else contextlib.nullcontext(forward_step)


def complete_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Before gradients are reduced: zero those that the first microbatch was to write and did not."""
    if first := first_gradients(chunks):
        first.end()


class FirstGradients:
    """The weights of one chunk whose gradients a first microbatch overwrites.

    Attributes:
        weights: those weights.
    """

    def __init__(self, ddp: Any, weights: Sequence[Any]) -> None:
        self.weights, self._spares, self._awaited = weights, False, False
        for buffer in ddp.buffers:
            rest = _between(buffer, {*weights} & buffer.param_index_map.keys())
            buffer.reset = partial(self._reset, buffer.reset, rest)

    def _reset(self, reset: Callable[[], None], rest: list[torch.Tensor]) -> None:
        if not self._spares:
            reset()
        elif rest:
            torch._foreach_zero_(rest)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]  # one launch

    @contextlib.contextmanager
    def spared(self) -> Generator[None]:
        """While inside, zeroing the gradients leaves those that the next microbatch overwrites."""
        self._spares = True
        try:
            yield
        finally:
            self._spares = False

    @contextlib.contextmanager
    def overwriting(self, forward_step: Callable[..., Any]) -> Generator[Callable[..., Any]]:
        """Give a forward step whose first call has the backward pass overwrite gradients; all others add to them."""
        calls = 0

        def step(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                self._begin()
            elif calls == 2:
                self.end()
            return forward_step(*args, **options)

        try:
            yield step
        finally:
            self._awaited = False
            self._tell(False)

    def _begin(self) -> None:
        self._awaited = True
        self._tell(True)

    def end(self) -> None:
        """Have gradients added from here on, to zero where the first microbatch has written none."""
        if self._awaited:
            self._awaited = False
            for weight in self.weights:
                # Transformer Engine marks the weight; under saved tensor hooks mcore marks a copy of it
                if weight.main_grad.overwritten and not getattr(weight, "grad_added_to_main_grad", False):
                    weight.main_grad.zero_()
            self._tell(False)

    def _tell(self, overwrite: bool) -> None:
        for weight in self.weights:
            weight.overwrite_main_grad = overwrite  # read by Transformer Engine in forward passes
            weight.main_grad.overwritten = overwrite  # read, and ended, by minloop's product


def _overwritable(ddp: Any, config: TransformerConfig) -> Iterator[torch.nn.Parameter]:
    """Weights whose gradient is one product, which every microbatch computes once and adds to `main_grad` itself."""
    model: Any = unwrapped(ddp)
    unlike = ("hybrid_context_parallel", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "mtp_num_layers")
    unlike += ("use_transformer_engine_op_fuser", "defer_embedding_wgrad_compute")
    unlike += ("experimental_attention_variant",)  # which may multiply by a layer's weight without the layer
    if type(model) is not GPTModel or config.pipeline_model_parallel_size > 1:
        return
    if not config.gradient_accumulation_fusion or any(getattr(config, name) for name in unlike):
        return
    if not {type(layer).__module__.split(".")[0] for layer in model.modules()} <= _KNOWN:
        return
    tied = model.share_embeddings_and_output_weights
    modules: list[tuple[str, Any]] = [*model.named_modules(remove_duplicate=False)]
    held = Counter(id(weight) for _, layer in modules for weight in layer.parameters(recurse=False))
    for name, layer in modules:
        of_head = name == "output_layer" and not tied
        if (of_head or name.startswith("decoder.layers.")) and ".experts." not in name and _adds_itself(layer):
            weight: Any = layer.weight
            if weight is not None and weight.requires_grad and held[id(weight)] == 1 and _lies_in_buffer(ddp, weight):
                yield weight


def _adds_itself(layer: Any) -> bool:
    """Whether a layer's product can write `main_grad`: Transformer Engine's, or mcore's with minloop's product."""
    if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
        return layer.gradient_accumulation_fusion and provides_weight_gradient()
    return getattr(layer, "fuse_wgrad_accumulation", False) and hasattr(layer, "weight")


def _lies_in_buffer(ddp: Any, weight: Any) -> bool:
    """Whether mcore zeroes this gradient with the buffer that it is a part of."""
    storage = weight.main_grad.untyped_storage().data_ptr()
    owners = [buffer for buffer in ddp.buffers if weight in buffer.param_index_map]
    return [buffer.grad_data.untyped_storage().data_ptr() for buffer in owners] == [storage]


def _between(buffer: Any, overwritten: set[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The parts of a gradient buffer that lie between the gradients of `overwritten`, and what it keeps elsewhere."""
    begin, parts = 0, []
    for start, end, _ in sorted(buffer.param_index_map[weight] for weight in overwritten):
        parts.append(buffer.grad_data[begin:start])
        begin = end
    parts.append(buffer.grad_data[begin:])
    return [part for part in parts if part.numel()] + buffer.extra_main_grads
