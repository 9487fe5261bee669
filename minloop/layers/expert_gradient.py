"""Weight gradients of all experts in one launch, each added to its `main_grad`.

Imported only where there is a GPU, and so a torch that brings Triton.
"""
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# (Triton is not with the torch for CPUs, on which types are checked, and reads no types but its own.)

from typing import Any

import torch
import triton
import triton.language as tl

OUTPUTS, INPUTS, TOKENS = 128, 256, 64  # of a tile, and of a step towards it


@triton.jit
def _add(
    grad_output,  # [tokens, outputs]
    total_input,  # [tokens, inputs]
    ends,  # [experts]
    main_grad,  # [experts, outputs, inputs]
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    tile_tokens: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if begin < end:
        across: tl.constexpr = (inputs + tile_inputs - 1) // tile_inputs
        row = tile // across * tile_outputs + tl.arange(0, tile_outputs)
        column = tile % across * tile_inputs + tl.arange(0, tile_inputs)
        total = tl.zeros((tile_outputs, tile_inputs), tl.float32)
        for first in range(begin, end, tile_tokens):
            token = first + tl.arange(0, tile_tokens)
            known, place = (token < end)[:, None], token.to(tl.int64)[:, None]
            grad = tl.load(
                grad_output + place * outputs + row[None, :], mask=known & (row < outputs)[None, :], other=0.0
            )
            value = tl.load(
                total_input + place * inputs + column[None, :], mask=known & (column < inputs)[None, :], other=0.0
            )
            total = tl.dot(tl.trans(grad), value, total)
        inside = (row < outputs)[:, None] & (column < inputs)[None, :]
        sums = main_grad + expert * outputs * inputs + row[:, None] * inputs + column[None, :]
        before = tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums, (before + total).to(main_grad.dtype.element_ty), mask=inside)


def add_gradients(
    total_input: torch.Tensor, grad_output: torch.Tensor, ends: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad[e] += grad_outputᵀ · total_input`` over each expert's tokens; see `expert_products`."""
    experts, outputs, inputs = main_grad.shape
    tiles = triton.cdiv(outputs, OUTPUTS) * triton.cdiv(inputs, INPUTS)
    sizes = (outputs, inputs, OUTPUTS, INPUTS, TOKENS)
    kernel: Any = _add
    kernel[(tiles, experts)](grad_output, total_input, ends, main_grad, *sizes, num_warps=8, num_stages=3)
