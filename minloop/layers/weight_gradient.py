"""`gradient_accumulation_fusion` without apex: weight gradients added to `main_grad` by the product that computes them.

Transformer Engine's linear layers bring their own. mcore's, the output layer of every GPT among them, ask for apex's
extension `fused_weight_gradient_mlp_cuda`, and refuse to be built without it. torch can do the same.
"""

import sys
from types import ModuleType

import torch
from megatron.core.tensor_parallel import layers

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def accumulate_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += grad_outputᵀ · total_input``, accumulated in float32 and rounded once, to main_grad's dtype.

    Args:
        total_input: [tokens, in], any floating dtype.
        grad_output: [tokens, out], the same dtype.
        main_grad: [out, in], float32, or the dtype of the others; changed in place. With an attribute `overwritten`
            that is true, what it held does not count, and the attribute is false afterwards: see
            `minloop.first_gradients`.
    """
    if getattr(main_grad, "overwritten", False):
        _write_weight_gradient(total_input, grad_output, main_grad)
        vars(main_grad)["overwritten"] = False
    elif main_grad.dtype == total_input.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    elif main_grad.device.type == "cpu":  # whose products have one dtype
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))
    else:
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)


def _write_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    if main_grad.dtype == total_input.dtype:
        torch.mm(grad_output.t(), total_input, out=main_grad)
    elif main_grad.device.type == "cpu":
        torch.mm(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype), out=main_grad)
    else:
        torch.mm(grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)


def provides_weight_gradient() -> bool:
    """Whether mcore's layers compute their weight gradients here, not in apex's extension."""
    found = getattr(layers, _EXTENSION, None)
    return getattr(found, "wgrad_gemm_accum_fp32", None) is accumulate_weight_gradient


def provide_weight_gradient() -> None:
    """Let mcore find `accumulate_weight_gradient` where it looks for apex's extension, unless there is the real one."""
    if layers._grad_accum_fusion_available:  # pyright: ignore[reportPrivateUsage]  # mcore's only record of it
        return
    extension = ModuleType(_EXTENSION, accumulate_weight_gradient.__doc__)
    for dtype in ("fp32", "fp16"):
        setattr(extension, f"wgrad_gemm_accum_{dtype}", accumulate_weight_gradient)
    sys.modules[_EXTENSION] = extension  # for what imports it when it is needed
    layers.fused_weight_gradient_mlp_cuda = extension  # pyright: ignore[reportAttributeAccessIssue]
    layers._grad_accum_fusion_available = True  # pyright: ignore[reportPrivateUsage]
