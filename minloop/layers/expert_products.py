"""`moe_grouped_gemm` with a launch for all experts, not one for each: torch's `grouped_mm`.

Transformer Engine's grouped layers launch a product for every expert, and handle every expert's weight in Python in
each pass: with a hundred experts the host is slower than the GPU. Where all weights of a layer lie one after the other
they are one tensor, [experts, out, in], and so are their gradients; `join_experts` lays them so, in the order in which
mcore's buffers keep them, and whatever does not lie so is multiplied as before.
"""

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEGroupedLinear
from megatron.core.transformer import TransformerConfig

from minloop.messages import say_once

CHIPS = (9, 10)
"""Majors of the compute capability (Hopper, Blackwell) for which torch has a kernel of `grouped_mm`: on all others it
waits for the GPU, and launches a product for every expert, too (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""


def joins_experts(config: Any) -> bool:
    """Whether the experts of a model of this config are multiplied together, given a GPU that can.

    In bf16, with `moe_grouped_gemm` and `gradient_accumulation_fusion`; not with what changes those products or when
    their weights' gradients are computed.
    """
    unlike = ("fp8", "fp4", "add_bias_linear", "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
    unlike += ("use_transformer_engine_op_fuser", "fine_grained_activation_offloading", "quant_recipe")
    wanted = ("num_moe_experts", "moe_grouped_gemm", "bf16", "gradient_accumulation_fusion")
    return all(getattr(config, name) for name in wanted) and not any(getattr(config, name) for name in unlike)


def join_experts(chunk: torch.nn.Module, config: TransformerConfig) -> None:
    """Lay the weights of each of Transformer Engine's grouped layers one after the other, and multiply them as one."""
    if not joins_experts(config) or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability()[0] not in CHIPS:
        return
    for layer in chunk.modules():
        if isinstance(layer, TEGroupedLinear):
            join_weights(layer)


def join_weights(layer: Any) -> None:
    """Lay the weights of one layer, "weight0" and so on, one after the other."""
    names = [f"weight{index}" for index in range(layer.num_gemms)]
    weights: list[torch.nn.Parameter] = [getattr(layer, name) for name in names]
    if any(size % 8 for size in weights[0].shape) or any(weight.is_meta for weight in weights):
        return  # grouped_mm wants rows of whole 16 bytes
    block = torch.stack([weight.detach() for weight in weights])
    for name, weight, place in zip(names, weights, block, strict=True):
        weight.data = place
        del layer._parameters[name]
    for name, weight in zip(reversed(names), reversed(weights), strict=True):  # mcore's buffers begin with the last
        layer.register_parameter(name, weight)
    # One by one, the first call would else write `main_grad` anew, without what was added to it together.
    layer.is_first_microbatch = False
    layer.forward = ExpertProducts(layer, names)


def spare_gradients(ddp: Any) -> None:
    """In a model that DDP wraps, let autograd know one weight only of each joined layer.

    Handing on a gradient for each of a hundred experts, which nothing reads, takes longer than their product. Where DDP
    reduces a bucket once it knows all of its gradients, it hears of the others' with the one.
    """
    for layer in ddp.modules():
        products = vars(layer).get("forward")
        if isinstance(products, ExpertProducts) and all(weight.requires_grad for weight in products.weights()):
            products.waited_for = slice(-1, None)
            if ddp.ddp_config.overlap_grad_reduce:
                last = products.weights()[-1]
                # a weight that held either of them would never be freed
                tell = partial(_others_are_ready, weakref.ref(ddp), weakref.ref(products))
                last.register_post_accumulate_grad_hook(tell)


def _others_are_ready(
    ddp_reference: weakref.ref[Any], reference: "weakref.ref[ExpertProducts]", _: torch.Tensor
) -> None:
    ddp, products = ddp_reference(), reference()
    if ddp is None or products is None or not products.added:  # multiplied one by one, each has told DDP by itself
        return
    products.added = False
    *others, _last = products.weights()
    for weight in others:
        bucket_group = ddp.param_to_bucket_group[weight]
        if bucket_group.is_last_microbatch:
            bucket_group.register_grad_ready(weight, ddp.force_all_reduce)


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of tensors of one shape that lie one after the other, [tensors, …], or None if they do not."""
    first = tensors[0]
    begin, step, storage = first.data_ptr(), first.nbytes, first.untyped_storage()
    places = [*map(torch.Tensor.data_ptr, tensors)]
    if places != [*range(begin, begin + step * len(tensors), step)] or not first.is_contiguous():
        return None
    if begin + step * len(tensors) > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def are_joined(chunk: torch.nn.Module) -> bool:
    """Whether `join_weights` changed the order of this chunk's parameters."""
    return any(isinstance(vars(layer).get("forward"), ExpertProducts) for layer in chunk.modules())


def add_weight_gradients(
    total_input: torch.Tensor, grad_output: torch.Tensor, ends: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad[e] += grad_outputᵀ · total_input`` over the tokens of each expert e, accumulated in float32.

    Args:
        total_input: [tokens, in], sorted by expert.
        grad_output: [tokens, out], the same dtype.
        ends: [experts], int32, where the tokens of each expert end.
        main_grad: [experts, out, in], float32, or the dtype of the others; changed in place.
    """
    if main_grad.device.type == "cuda":  # not is_cuda, which the CPU backend makes true
        from minloop.layers.expert_gradient import add_gradients  # which needs Triton

        add_gradients(total_input, grad_output, ends, main_grad)
    else:
        main_grad += F.grouped_mm(grad_output.t(), total_input, offs=ends)


class ExpertProducts:
    """The forward pass of one grouped layer: tokens sorted by expert, [tokens, in], to ([tokens, out], None).

    Attributes:
        waited_for: the weights whose hooks autograd calls in backward passes, by default those of all.
        added: whether a backward pass has added to the gradients of all weights, and not told DDP yet.
    """

    def __init__(self, layer: Any, names: Sequence[str]):
        self.layer, self.names = layer, names
        self.one_by_one, self.added = layer.forward, False
        self.waited_for: slice[None, None, None] | slice[int, None, None] = slice(None)

    def weights(self) -> list[torch.nn.Parameter]:
        """The layer's, [out, in] each, in order."""
        return [*map(self.layer._parameters.__getitem__, self.names)]  # layer.weight0 takes ten times as long

    def __call__(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`m_splits` are the numbers of tokens of each expert."""
        weights = self.weights()
        *_, total = ends = [*itertools.accumulate(m_splits)]
        if not 0 < total == len(x) or x.dtype != weights[0].dtype or not x.is_contiguous():
            return self.one_by_one(x, m_splits)
        whole = as_one(weights)
        trained = {False} if not torch.is_grad_enabled() else {*map(attrgetter("requires_grad"), weights)}
        main_grad = _main_grad(weights) if trained == {True} else None
        if whole is None or (True in trained and main_grad is None):
            say_once(
                "weights of experts, or their gradients, do not lie one after the other, as where a bucket of DDP ends "
                "among them and is padded: they are multiplied one after the other; see bucket_size"
            )
            return self.one_by_one(x, m_splits)
        on_host = torch.tensor(ends, dtype=torch.int32, pin_memory=x.device.type == "cuda")
        ends_there = on_host.to(x.device, non_blocking=True)
        return _Product.apply(x, ends_there, whole, main_grad, self, *weights[self.waited_for]), None


def _main_grad(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if getattr(weights[0], "overwrite_main_grad", False):  # Megatron FSDP's, to which nothing may be added
        return None
    try:
        return as_one([*map(attrgetter("main_grad"), weights)])
    except AttributeError:  # no DDP around the model
        return None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ends: torch.Tensor,
        whole: torch.Tensor,
        main_grad: torch.Tensor | None,
        products: ExpertProducts,
        *waited_for: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, ends)
        ctx.whole, ctx.main_grad, ctx.products, ctx.waited_for = whole, main_grad, products, len(waited_for)
        return F.grouped_mm(x, whole.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad_output, products = grad_outputs[0].contiguous(), ctx.products
        grad_input = F.grouped_mm(grad_output, ctx.whole, offs=ends) if ctx.needs_input_grad[0] else None
        if ctx.main_grad is None:
            return grad_input, None, None, None, None, *(None for _ in range(ctx.waited_for))
        add_weight_gradients(x, grad_output, ends, ctx.main_grad)
        products.added, weights = True, products.weights()
        if not getattr(weights[-1], "grad_added_to_main_grad", False):
            for weight in weights:
                weight.grad_added_to_main_grad = True
        stand_in = torch.empty_like(weights[0])  # DDP's hooks wait for a gradient, and do not read this one
        stand_ins = map(torch.Tensor.detach, itertools.repeat(stand_in, ctx.waited_for))
        return grad_input, None, None, None, None, *stand_ins
