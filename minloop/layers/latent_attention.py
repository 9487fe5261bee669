"""Multi-latent attention whose shared rotary key gets the gradient of all heads, also with tensor parallelism."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class TorchMLASelfAttention(MLASelfAttention):
    """mcore's `MLASelfAttention` for its local layers.

    All heads share one rotary key per token (arXiv 2405.04434, section 2.1.3), and each tensor parallel rank holds some
    of the heads. mcore splits the down projection over the ranks and gathers its output by an operation whose backward
    takes this rank's slice: right for the latent, whose gradient the up projection has summed over the ranks, but the
    rotary key would keep the gradient of this rank's heads alone. And without sequence parallelism mcore sums the
    gradient of every `q_layernorm` over the ranks, as if it were a norm of this rank's heads: here each rank has all of
    it. With sequence parallelism the up projections gather a part of a tensor (the latent, beside the rotary key),
    which NCCL takes only as a tensor of its own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        norm: Any = getattr(self, "q_layernorm", None)  # without q_lora_rank there is none
        if self.tp_group.size() > 1 and not self.config.sequence_parallel and norm is not None:
            for parameter in norm.parameters():
                parameter.average_gradients_across_tp_domain = True
        if self.config.sequence_parallel:
            for name in ("linear_q_up_proj", "linear_kv_up_proj"):
                if projection := getattr(self, name, None):
                    projection.register_forward_pre_hook(_contiguous)

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[s, b, h] → the query's latent, and the key-value latent with the rotary key, [s, b, latent + rotary].

        With sequence parallelism s is this rank's part of the sequence: mcore then gathers the rotary key by an
        operation whose backward sums.
        """
        config, group = self.config, self.tp_group
        parts: Any = super()._qkv_down_projection(hidden_states)
        query, combined = parts
        if group.size() == 1:
            return query, combined
        combined = gather_from_tensor_model_parallel_region(combined, group=group)
        if config.sequence_parallel:
            return query, scatter_to_sequence_parallel_region(combined, group=group)
        latent, rotary = combined.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return query, torch.cat([latent, copy_to_tensor_model_parallel_region(rotary, group=group)], dim=-1)


def _contiguous(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].contiguous(), *inputs[1:]
