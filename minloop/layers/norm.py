"""Norms in plain torch with sequence parallelism and zero-centred weights, which mcore's `WrappedTorchNorm` refuses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import L2Norm
from torch import Tensor


class TorchNorm:
    """Builds the norm that `config.normalization` names, in place of mcore's `WrappedTorchNorm` and `FusedLayerNorm`.

    The norm maps [..., hidden_size] to the same shape. Its parameters are `weight` and, for LayerNorm, `bias`, in
    `config.params_dtype`; each says in its attribute `sequence_parallel` whether mcore must sum its gradient over the
    tensor parallel ranks. L2Norm has no parameters.

    Args:
        config: `normalization`, `layernorm_zero_centered_gamma`, `sequence_parallel` and `params_dtype` are read.
        hidden_size: size of the last dimension.
        eps: added to the variance (LayerNorm) or the mean square (RMSNorm, L2Norm).
        unused: further arguments that mcore passes to norms (`has_residual`, `persist_layer_norm`).
    Raises:
        ValueError: an unknown `normalization`, or a field that only Apex or Transformer Engine can honour.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        for field in ("persist_layer_norm", "memory_efficient_layer_norm", "fused_residual_rmsnorm"):
            if getattr(config, field):
                raise ValueError(
                    f"{field}=True needs a kernel of Apex or Transformer Engine; this norm is torch's: set it to False"
                )
        kind: str = config.normalization
        if kind not in _NORMS:
            raise ValueError(f"normalization={kind!r}: use one of {', '.join(_NORMS)}")
        norm = _NORMS[kind](config, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return norm


class _LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        self.zero_centered = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.zero_centered or input.dtype != self.weight.dtype:
            weight, bias = _float_weight(self.weight, self.zero_centered), self.bias.float()
            return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)
        return super().forward(input)


class _RMSNorm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        self.zero_centered = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered or x.dtype != self.weight.dtype:
            weight = _float_weight(self.weight, self.zero_centered)
            return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(self.weight.dtype)
        return super().forward(x)


def _float_weight(weight: Tensor, zero_centered: bool) -> Tensor:
    """The factor in fp32: 1 + weight in bf16 would lose every weight below 2**-8."""
    return weight.float() + 1 if zero_centered else weight.float()


def _l2_norm(config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:
    return L2Norm(hidden_size, eps)


_NORMS: dict[str, Callable[[TransformerConfig, int, float], torch.nn.Module]] = {
    "LayerNorm": _LayerNorm,
    "RMSNorm": _RMSNorm,
    "L2Norm": _l2_norm,
}
