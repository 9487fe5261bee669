"""mcore's gated delta net on any device: it has a path in plain torch, but asks for Triton kernels on the way there."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class TorchGatedDeltaNet(GatedDeltaNet):
    """In place of mcore's `GatedDeltaNet` (arXiv 2412.06464), without flash-linear-attention.

    It is what mcore runs in `deterministic_mode`, whatever `config.deterministic_mode` says. The arguments are mcore's.

    Args:
        use_qk_l2norm: whether queries and keys are divided by their 2-norms.
    Raises:
        ValueError: when called, if sequences are packed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *,
        use_qk_l2norm: bool = True,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> None:
        config = copy.copy(config)
        config.deterministic_mode = True
        options |= {"pg_collection": pg_collection, "use_qk_l2norm": False}  # its l2norm is a Triton kernel
        with mock.patch.object(common, "HAVE_FLA", True):  # the constructor wants the package even where none is used
            super().__init__(config, submodules, **options)
        self.normalize_qk = use_qk_l2norm
        if self.tp_size > 1 and not config.sequence_parallel:
            # Each tensor parallel rank norms its own heads with this weight; mcore sums such gradients with
            # sequence parallelism only.
            norm: Any = self.out_norm
            for parameter in norm.parameters():
                parameter.register_hook(self._sum_over_heads)

    def _sum_over_heads(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=self.tp_group)
        return grad

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix along the sequence: [s, b, h] to [s, b, h] (s over the context and sequence parallel ranks), and a bias.

        `attention_mask` is ignored: the layer is causal.
        """
        if packed_seq_params is not None:
            raise ValueError("packed_seq_params do not go with gated delta net in plain torch: pass None")
        return super().forward(hidden_states, attention_mask, *args, **options)

    def _prepare_input_for_gated_delta_rule(
        self, qkv: Tensor, gate: Tensor, batch: int, seq_len: int, *gate_feats: Any
    ) -> tuple[Tensor, ...]:
        query, key, *others = super()._prepare_input_for_gated_delta_rule(qkv, gate, batch, seq_len, *gate_feats)
        if self.normalize_qk:
            query, key = _l2_normalized(query), _l2_normalized(key)
        return query, key, *others


def _l2_normalized(x: Tensor) -> Tensor:
    """As flash-linear-attention's l2norm does it: [..., d] over d, in fp32."""
    x_float = x.float()
    return (x_float * torch.rsqrt(x_float.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
