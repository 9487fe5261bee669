"""The forward step of packed sequences: several in one row, each attending to itself alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

from minloop.data import Batch, CheckedBatch
from minloop.losses import LossFunction, token_loss
from minloop.placement import is_inner, model_attribute, place_batch


def packed_forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """`gpt_forward_step` for batches with `cu_seqlens`: of `pack_samples`, or of ``inter_document_masking=True``.

    The batch is [1, s]. With context parallelism every sequence is cut into 2 × size chunks of its own; with
    `hybrid_context_parallel` it is one sample, [n], dealt out by `minloop.hybrid_context_parallel`.

    Raises:
        ValueError: another micro batch size than 1, no `cu_seqlens`, a sequence that context parallelism cannot divide,
            a token id outside the vocabulary.
    """
    batch = next(data)
    if "local_cp_size" in batch:
        return _sample_forward_step(batch, model)
    if "cu_seqlens" not in batch or batch["tokens"].shape[0] != 1:
        raise ValueError(
            f"a packed batch is [1, s] with cu_seqlens; this one holds tokens {list(batch['tokens'].shape)} and "
            f"{', '.join(sorted(batch))}: use micro_batch_size=1, and pack_samples or inter_document_masking=True"
        )
    boundaries = batch["cu_seqlens"].flatten().unique()  # the tail repeats the last one
    longest = int(boundaries.diff().max())
    kept = {name: value for name, value in batch.items() if name != "max_seqlen"} | {"cu_seqlens": boundaries}
    # a prefetched batch is checked already: to do so again would wait for its copy
    placed = place_batch(CheckedBatch(kept) if isinstance(batch, CheckedBatch) else kept, model)
    # Transformer Engine divides packed sequences by where they end with padding: here all of it is theirs.
    padded: Any = placed["cu_seqlens"] if model_attribute(model, "config").context_parallel_size > 1 else None
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=placed["cu_seqlens"],
        cu_seqlens_kv=placed["cu_seqlens"],
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    chunk: Any = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    options = {} if is_inner(chunk) else {"labels": placed["labels"], "loss_mask": placed["loss_mask"]}
    output = model(placed["tokens"], placed["position_ids"], None, packed_seq_params=params, **options)
    return output, partial(token_loss, placed["loss_mask"])


def _sample_forward_step(sample: Batch, model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """One sample of hybrid context parallelism, over the ranks that it was dealt out to.

    It is not packed: mcore turns packed queries by the layout's context parallel group, not by the sample's.
    """
    size, length = int(sample["local_cp_size"]), len(sample["tokens"])
    group = _shared_by(size)
    whole = {name: value[None] for name, value in sample.items() if value.dim()}
    placed: Batch = place_batch(CheckedBatch(whole), model)
    if size > 1:  # positions of mRoPE are cut where they are turned into angles
        rows = {name: value for name, value in placed.items() if value.dim() == 2}
        placed = placed | get_batch_on_this_cp_rank(rows, is_hybrid_cp=False, cp_group=group)
    params = PackedSeqParams(
        qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, local_cp_size=size, cp_group=group
    )
    options: dict[str, Any] = {"labels": placed["labels"], "loss_mask": placed["loss_mask"]}
    output = model(placed["tokens"], placed["position_ids"], None, packed_seq_params=params, **options)
    return output, partial(token_loss, placed["loss_mask"])


def _shared_by(size: int) -> Any:
    """The group of `size` data parallel ranks that this one is in; None for one alone."""
    return parallel_state.get_hybrid_data_context_parallel_groups(group_size=size) if size > 1 else None
