"""The forward step of packed sequences: several in one row, each attending to itself alone."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model

from minloop.data import Batch, CheckedBatch
from minloop.losses import LossFunction, token_loss
from minloop.placement import model_attribute, place_batch


def packed_forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
    """`gpt_forward_step` for batches with `cu_seqlens`: of `pack_samples`, or of ``inter_document_masking=True``.

    The batch is [1, s]. With context parallelism every sequence is cut into 2 × size chunks of its own.

    Raises:
        ValueError: another micro batch size than 1, no `cu_seqlens`, a sequence that context parallelism cannot divide,
            a token id outside the vocabulary.
    """
    batch = next(data)
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
    inner = not (chunk.pre_process or chunk.post_process or getattr(chunk, "mtp_process", False))
    options = {} if inner else {"labels": placed["labels"], "loss_mask": placed["loss_mask"]}
    output = model(placed["tokens"], placed["position_ids"], None, packed_seq_params=params, **options)
    return output, partial(token_loss, placed["loss_mask"])
