"""A batch on its way to a GPT: checked, cut to this context parallel rank's part, copied to the device."""

from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_attr_wrapped_model

from minloop.architecture import unwrapped
from minloop.data import Batch, CheckedBatch, check_token_ids, slice_batch_for_context_parallel, to_device

HEEDED = {AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary}
"""Kinds of attention in which Transformer Engine reads a mask."""


class PlacedBatch(dict[str, torch.Tensor]):
    """What `place_batch` returns, and leaves as it is when it is given it."""


def place_batch(batch: Batch, model: torch.nn.Module) -> PlacedBatch:
    """Check a batch and return this context parallel rank's part of it, on its device, for a GPT.

    Raises:
        ValueError: a token id outside the vocabulary, a sequence longer than the position embedding, an attention mask
            for Transformer Engine's attention in bf16 or fp16.
    """
    if isinstance(batch, PlacedBatch):
        return batch
    if batch.get("attention_mask") is not None:
        _check_mask_is_heeded(model)
    if not isinstance(batch, CheckedBatch):
        check_token_ids(batch, model_attribute(model, "vocab_size"))
    length, positions = batch["tokens"].shape[1], model_attribute(model, "max_sequence_length")
    kind = model_attribute(model, "position_embedding_type")
    if kind == "learned_absolute" and length > positions:
        raise ValueError(
            f"a sequence of {length} tokens, but max_sequence_length is {positions}: build the model for more"
        )
    whole = {"position_ids": _mrope_positions(batch)} if kind == "mrope" else {}
    batch = {name: value for name, value in batch.items() if name not in whole}
    batch = slice_batch_for_context_parallel(batch, model_attribute(model, "pg_collection"))
    return PlacedBatch(to_device(batch, torch.cuda.current_device()) | whole)


def _check_mask_is_heeded(model: torch.nn.Module) -> None:
    """Raise ValueError if attention would be plainly causal whatever the batch's mask.

    Transformer Engine reads a mask of "padding" and "arbitrary" attention alone, and mcore's is "causal"; in fp32, for
    which it has no fused kernel, its softmax heeds one all the same (its dot_product_attention/backends.py).
    """
    chunk: Any = unwrapped(model)
    if not isinstance(chunk, LanguageModule) or chunk.config.params_dtype == torch.float32:
        return
    kinds = {getattr(module, "attn_mask_type", None) for module in chunk.modules()}
    if chunk.config.transformer_impl == "transformer_engine" and not kinds & HEEDED:
        raise ValueError(
            "the batch has an attention_mask, which Transformer Engine's causal attention ignores in bf16 and fp16: "
            "leave it out (create_attention_mask=False) or set transformer_impl='local'; to keep documents apart use "
            "inter_document_masking=True and minloop.packed_forward_step"
        )


def _mrope_positions(batch: Batch) -> torch.Tensor:
    """[b, s] or [b, 3, s] → [3, b, s] of the full sequence: mRoPE cuts the part of a context parallel rank itself."""
    positions = batch["position_ids"]
    if positions.dim() == 2:  # text: time, height and width are one
        positions = positions.unsqueeze(1).expand(-1, 3, -1)
    return positions.transpose(0, 1).to(torch.cuda.current_device(), non_blocking=True)


def is_inner(chunk: Any) -> bool:
    """Whether a chunk has neither the embedding nor a loss: an intermediate pipeline stage's."""
    return not (chunk.pre_process or chunk.post_process or getattr(chunk, "mtp_process", False))


def model_attribute(model: torch.nn.Module, name: str) -> Any:
    """An attribute of the model inside mcore's wrappers."""
    return get_attr_wrapped_model(model, name)
