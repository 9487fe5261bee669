"""mcore's own check of a save, that its ranks' parts make up whole tensors, with one outcome on all ranks."""

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from minloop.checkpoint.agreement import agreed


def check_parts(sharded: dict[str, Any]) -> None:
    """Check a sharded state dict, whose factories it applies in place, as `dist_checkpointing.save` does; every rank.

    There the first rank alone raises what is wrong, while the others wait for it.

    Raises:
        ValueError: a tensor without elements, which mcore cannot save; the message names it.
        RuntimeError: parts overlap, or some are missing.
    """
    parts: Any
    common: Any
    parts, common = save_preprocess(sharded, validate_access_integrity=False)
    everyones: Any = determine_global_metadata(parts)[1]
    with agreed():
        for part in (part for rank in everyones for part in rank):
            if isinstance(part, ShardedTensor) and 0 in part.global_shape:
                raise ValueError(
                    f"{part.key} has no elements, {[*part.global_shape]}, and mcore's checkpoints cannot hold it: "
                    "leave the parameter out of the model"
                )
        validate_sharding_integrity(everyones, common)
