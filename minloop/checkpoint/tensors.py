"""Reading a checkpoint's tensors into the places a template names, with one answer on every rank."""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import (
    _sharded_tensor_shard_id,  # pyright: ignore[reportPrivateUsage]
    extract_sharded_base,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.extra_state import EXTRA_STATE, check_extra_states, leave_out_other_scales
from minloop.checkpoint.full_names import OPTIMIZER_STATE
from minloop.checkpoint.reader_errors import is_of_the_reader
from minloop.checkpoint.reading import CheckpointError, SavedCheckpoint
from minloop.checkpoint.restricted import read_safely
from minloop.messages import without_warnings


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name is one of `patterns`, in which * stands for anything."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_tensors(
    saved: SavedCheckpoint,
    template: dict[str, Any],
    resize: Sequence[str] = (),
    replicas: dist.ProcessGroup | None = None,
    skip: Sequence[str] = (),
) -> dict[str, Any]:
    """Read what `template`, mcore's sharded state dict, asks for, and what is no tensor; every rank calls it.

    That all of it is there and fits is checked before anything is read. mcore then reads straight into the tensors of
    the template, so that of a file that turns out to be damaged only now, part has been copied into the model already:
    verify contents first (`load_checkpoint(verify=True)`) where that matters.

    Args:
        resize: names of tensors that may be smaller or larger in the checkpoint: what both have is read, and the rest
            keeps its values.
        replicas: the process group over which equal tensors lie: where its ranks are GPUs, each of them is read by one
            rank and sent to the others.
        skip: patterns of LoRA's adapters in the checkpoint that may be left out.
    Raises:
        ValueError: the checkpoint lacks tensors of the template, holds them in another shape, or holds adapters that no
            template has.
        CheckpointError: a file is damaged or holds more than plain data.
    """
    _refuse_leftover_adapters(saved, template, skip)
    with agreed():
        _check_fit(saved, template, resize)
    strategy: Any = _KeepingStrategy(saved, resize)
    if replicas is not None and not resize and _exchange_pays(replicas):
        strategy = _InPlaces(_KeepingStrategy(saved, each_agreed=True), replicas)
    with agreed(), read_safely(saved), without_warnings():
        # without the exchange of every rank's keys: nothing in here waits for another rank, but for the exchange
        answer = dist_checkpointing.load(
            template,
            str(saved.path),
            sharded_strategy=strategy,
            strict=StrictHandling.RETURN_UNEXPECTED,
            validate_access_integrity=False,
        )
        loaded = cast("tuple[dict[str, Any], set[str], set[str]]", answer)[0]
        for key, content in loaded.items():
            if key.startswith("model"):
                check_extra_states(saved, content)
                leave_out_other_scales(saved, content)
    return loaded


def saved_adapters(saved: SavedCheckpoint) -> set[str]:
    """The names of LoRA's weights in a checkpoint."""
    names = saved.metadata.state_dict_metadata
    return {name for name in names if "_lora." in name and not name.startswith(OPTIMIZER_STATE)}


def _refuse_leftover_adapters(saved: SavedCheckpoint, template: dict[str, Any], skip: Sequence[str]) -> None:
    """Raise ValueError if no rank reads an adapter: without it the weights compute something else."""
    left = {name for name in saved_adapters(saved) if not matches(name, skip)}
    if not left:  # which all ranks see alike
        return
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {part.key for part in _asked_for(template) if "_lora." in part.key})
    for key in set[str]().union(*everyones):
        # FSDP reads some weights from the optimizer's master weights
        left.discard(key.removeprefix(OPTIMIZER_STATE).split(".", 1)[1] if key.startswith(OPTIMIZER_STATE) else key)
    if left:
        raise ValueError(
            f"{saved.path} holds {len(left)} tensors of LoRA's adapters that this model lacks: {_first(sorted(left))}; "
            "without them its weights compute something else. Build the model with before_wrapping=lora(...) as it was "
            "saved, and use merge_lora afterwards, if need be; or load the weights beside them, "
            "load_weights(skip=['*_lora.*'])"
        )


def _asked_for(template: dict[str, Any]) -> Iterable[Any]:
    return nested_values(extract_sharded_base(load_preprocess(template)[0])[0])


def _check_fit(saved: SavedCheckpoint, template: dict[str, Any], resize: Sequence[str]) -> None:
    incomplete = _incomplete(saved)
    known, lacking, differing = saved.metadata.state_dict_metadata, list[str](), list[str]()
    for part in _asked_for(template):
        key = part.unique_key if isinstance(part, ShardedObject) else part.key
        if EXTRA_STATE in key:
            continue
        if key not in known or (key in incomplete and not _is_there(known[key], part)):
            lacking.append(key)
        elif isinstance(part, ShardedTensor) and not (part.allow_shape_mismatch or matches(key, resize)):
            there = tuple(getattr(known[key], "size", ()))
            if there != tuple(part.global_shape):
                differing.append(f"{key}: {[*there]} saved, {[*part.global_shape]} here")
    if lacking:
        names = sorted(set(lacking))
        of_optimizer = all(name.startswith("optimizer.") for name in names)  # of weights frozen then, or another's
        remedy = "; load_weights(allow_missing=[...]) leaves weights as they are"
        if of_optimizer:
            remedy = ", all of the optimizer; load_checkpoint(weights_only=True) begins with a new one"
        if any("_lora." in name for name in names):
            remedy = "; load_weights(allow_missing=['*_lora.*']) gives new adapters the weights beside them"
        raise ValueError(f"{saved.path} lacks {len(names)} tensors that this state has: {_first(names)}{remedy}")
    if differing:
        names = sorted(set(differing))
        raise ValueError(
            f"{saved.path} holds {len(names)} tensors in another shape: {_first(names)}; "
            "load_weights(resize=…) loads what both have"
        )


def _incomplete(saved: SavedCheckpoint) -> set[str]:
    """Tensors that stack layers, of which some are not there: what the optimizer holds of layers, where some froze."""
    return {
        name
        for name, entry in saved.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    }


def _is_there(entry: Any, part: Any) -> bool:
    """Whether the parts stored of a tensor hold all elements of one that is asked for."""
    lengths = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    stored = 0
    for chunk in entry.chunks:
        sides = zip(part.global_offset, lengths, chunk.offsets, chunk.sizes, strict=False)
        stored += math.prod(
            max(0, min(first + length, at + size) - max(first, at)) for first, length, at, size in sides
        )
    return stored == math.prod(lengths)


def _exchange_pays(replicas: dist.ProcessGroup) -> bool:
    """Whether ranks exchange tensors faster than each reads them: over NCCL, not over gloo on a host with its cache."""
    return replicas.size() > 1 and dist.get_backend(replicas) == "nccl"


@contextmanager
def _said_as_checkpoint_error(saved: SavedCheckpoint) -> Generator[None]:
    try:
        yield
    except CheckpointException as error:  # PyTorch's, which is no Exception
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, Exception) and is_of_the_reader(cause):
            raise cause from None
        text = str(cause) if isinstance(cause, CheckpointError) else f"{saved.path} cannot be read: {cause!r}"
        raise CheckpointError(f"{text}; part of it is in the model already: build the state anew") from cause


def _first(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


class _InPlaces(FullyParallelLoadStrategyWrapper):
    """mcore's reading for each other, which on the GPU puts what others read for the CPU into tensors of its own."""

    @staticmethod
    def fill_in_deferred_sharded_tensors(sharded_state_dict: dict[str, Any], loaded_tensors: dict[Any, Any]) -> None:
        places: dict[Any, torch.Tensor] = {}
        for part in nested_values(sharded_state_dict):
            place = part.data
            if place is not None and place.device.type == "cpu" and not is_main_replica(part.replica_id):
                name = _sharded_tensor_shard_id(part)
                places[name] = place.copy_(loaded_tensors[name].view(place.shape))
        FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors(sharded_state_dict, loaded_tensors | places)


class _KeepingStrategy(TorchDistLoadShardedStrategy):
    """mcore's reading, after which what a smaller saved tensor does not cover has the values it had (mcore: zeros)."""

    def __init__(self, saved: SavedCheckpoint, resize: Sequence[str] = (), *, each_agreed: bool = False) -> None:
        super().__init__()
        self._saved, self._resize, self._each_agreed = saved, resize, each_agreed

    def load(self, sharded_state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        kept: list[tuple[ShardedTensor, torch.Tensor]] = []
        for part in nested_values(sharded_state_dict):
            if isinstance(part, ShardedTensor) and part.data is not None and matches(part.key, self._resize):
                part.allow_shape_mismatch = True
                kept.append((part, part.data.clone()))
        with agreed() if self._each_agreed else nullcontext(), _said_as_checkpoint_error(self._saved):
            loaded = super().load(sharded_state_dict, *args, **kwargs)
        for part, own in kept:
            tensor: Any = part.data  # into which was read, with the stacked dimensions (layers) in front by now
            own = own.view(tensor.shape)
            saved: Any = self._saved.metadata.state_dict_metadata[part.key]
            common = tuple(
                slice(max(0, there - first)) for first, there in zip(part.global_offset, saved.size, strict=True)
            )
            own[common] = tensor[common]
            tensor.copy_(own)
        return loaded
