"""What a step does to a batch before the model sees it: check it, cut this rank's part, copy it to the device."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank

from minloop.layers.cp_layout import packed_share

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `position_ids`: int64 [b, s]; `loss_mask`: float32 [b, s]; optionally `attention_mask`: bool
[b, 1, s, s], True where attention is forbidden. b: micro batch size; s: the full sequence, on every rank. For mRoPE
`position_ids` may be [b, 3, s]: time, height and width."""


def slice_batch_for_context_parallel(batch: Batch, groups: ProcessGroupCollection) -> Batch:
    """Return this context parallel rank's part of the sequence: of 2 × size chunks, the rank-th from each end.

    [b, s] becomes [b, s / size]; `attention_mask` [b, 1, s, s] becomes [b, 1, s / size, s]; per-sample values [b] stay.
    Of packed sequences each is cut so by itself. `batch` itself is left as it is.

    Raises:
        ValueError: s, or one of the packed sequences that `cu_seqlens` bounds, is not a multiple of 2 × context
            parallel size.
    """
    size, sequence_length = groups.cp.size(), batch["tokens"].size(1)
    if size == 1:
        return batch
    check_sequence_length(sequence_length, size)
    if "cu_seqlens" in batch:
        return _slice_packed(batch, batch["cu_seqlens"].flatten(), size, groups.cp.rank())
    per_sample = {name: value for name, value in batch.items() if value.dim() < 2}
    per_token = {name: value for name, value in batch.items() if value.dim() >= 2}
    return {**get_batch_on_this_cp_rank(per_token, is_hybrid_cp=False, cp_group=groups.cp), **per_sample}


def check_sequence_length(sequence_length: int, size: int) -> None:
    """Raise ValueError unless context parallelism over `size` ranks can divide a sequence into its chunks."""
    if size > 1 and sequence_length % (2 * size):
        raise ValueError(
            f"the sequence length ({sequence_length}) must be a multiple of 2 × context parallel size ({size})"
        )


def _slice_packed(batch: Batch, boundaries: torch.Tensor, size: int, rank: int) -> Batch:
    if (boundaries % (2 * size)).any():
        raise ValueError(
            f"packed sequences begin at {boundaries.unique().tolist()}: with context parallel size {size} each must be "
            f"padded to a multiple of {2 * size}, by pack_samples(multiple={2 * size}); inter_document_masking cannot"
        )
    share = packed_share(boundaries.unique(), batch["tokens"].size(1), size, rank)
    whole = {name: value for name, value in batch.items() if value.dim() < 2 or name == "cu_seqlens"}
    return {**{name: value[:, share] for name, value in batch.items() if name not in whole}, **whole}


def to_device(batch: Batch, device: torch.device | int) -> Batch:
    """Copy a batch to `device`; from pinned memory, as `Loader` gives it, without waiting for the copy."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


class CheckedBatch(dict[str, torch.Tensor]):
    """A batch whose token ids have been checked already, such as one that is on its device."""


def check_token_ids(batch: Batch, vocab_size: int) -> None:
    """Refuse a batch, still on the CPU, with an id that the embedding or the loss does not know.

    Unchecked, such an id is a device-side assertion on a GPU, and with tensor parallelism silently an embedding of
    zeros. Labels whose loss is masked are free.

    Raises:
        ValueError: naming the lowest and the highest id, and `vocab_size`.
    """
    ids = torch.cat([batch["tokens"].flatten(), batch["labels"][batch["loss_mask"] > 0]])
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"the batch has token ids from {lowest} to {highest}, but vocab_size is {vocab_size}: build the model with "
            "the tokenizer's vocab_size, above every id; where a label is to be ignored, set loss_mask to 0"
        )
