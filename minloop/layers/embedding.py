"""The word embedding's part of `gradient_accumulation_fusion`: rows added to `main_grad`, no gradient of the table.

torch makes a table of zeros, adds up the rows of the tokens and hands on all of it, which DDP then adds to `main_grad`:
for a vocabulary of 128,256 and 8,192 tokens sixteen rows are moved, three times, for each that is needed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,), weight, (grad,) = ctx.saved_tensors, ctx.weight, grad_outputs
        rows = grad.reshape(-1, grad.shape[-1]).to(weight.main_grad.dtype)
        weight.main_grad.index_put_((ids.flatten(),), rows, accumulate=True)  # in the order of the tokens, always
        weight.grad_added_to_main_grad = True
        return None, torch.empty_like(weight)  # DDP waits for a gradient, and drops it unread


class FusedGradientEmbedding(VocabParallelEmbedding):
    """mcore's `VocabParallelEmbedding` whose backward pass adds to a float32 `main_grad` directly."""

    tp_group: Any

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[b, s] token ids → [b, s, h], summed over the tensor parallel ranks; [s, b, h] in parts if they are cut."""
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None or main_grad.dtype != torch.float32 or not torch.is_grad_enabled():
            return super().forward(input_)
        if self.tp_group.size() == 1:
            return self._reduce(_Lookup.apply(input_, self.weight))  # pyright: ignore[reportArgumentType]
        foreign = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        # Their gradients are zero. All of them on one row would be added one after another.
        anywhere = (
            torch.arange(input_.numel(), device=input_.device).view_as(input_) % self.num_embeddings_per_partition
        )
        ids = torch.where(foreign, anywhere, input_ - self.vocab_start_index)
        rows: Any = _Lookup.apply(ids, self.weight)
        return self._reduce(rows.masked_fill(foreign.unsqueeze(-1), 0.0))

    def _reduce(self, rows: Any) -> torch.Tensor:
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return rows if self.tp_group.size() == 1 else reduce_from_tensor_model_parallel_region(rows, self.tp_group)


def fuse_embedding_gradient(model: torch.nn.Module, config: TransformerConfig) -> None:
    """Make the word embedding of `model` a `FusedGradientEmbedding`, if it is looked up in one place only.

    A weight that an output layer or multi-token prediction shares gets gradients of several kinds, which torch adds up.
    """
    if getattr(model, "share_embeddings_and_output_weights", False) or config.mtp_num_layers:
        return
    for module in model.modules():
        if type(module) is VocabParallelEmbedding:
            module.__class__ = FusedGradientEmbedding
