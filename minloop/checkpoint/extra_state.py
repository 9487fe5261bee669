"""What layers save beside weights, Transformer Engine's delayed FP8 scales: checked here, and then let in."""

import contextlib
import io
import re
import sys
from collections.abc import Generator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.checkpoint.pickles import check_extra_state
from minloop.checkpoint.reading import SavedCheckpoint, load_plain, named_errors
from minloop.messages import say_once

EXTRA_STATE = "_extra_state"
"""Ends the keys of it, of grouped layers with the expert's number after it. Not all layers have some."""

_GATE = "should_load_extra_state_pickle"
_GUARDED = ("transformer_engine.pytorch.module.base", "transformer_engine.pytorch.ops.op")


def is_extra_state(name: str) -> bool:
    """Whether a key of a model's state dict is that of a layer's extra state."""
    return re.search(rf"{EXTRA_STATE}\d*$", name) is not None


def tell_copies_apart(content: dict[str, Any], groups: ProcessGroupCollection) -> None:
    """Give the extra states of activations, in a model's sharded state dict, their tensor parallel ranks.

    mcore's MLP leaves them out, so that each rank's copy of Transformer Engine's activation counts as the first, and a
    save is refused (megatron/core/transformer/mlp.py:368).
    """
    for leaf in nested_values(content):
        if isinstance(leaf, ShardedObject) and leaf.key.endswith(f".activation_func.{EXTRA_STATE}"):
            tensor_parallel: Any = groups.expt_tp if ".experts." in leaf.key else groups.tp
            replica: Any = leaf.replica_id
            leaf.replica_id = (replica[0], tensor_parallel.rank(), *replica[2:])


def check_extra_states(saved: SavedCheckpoint, content: dict[str, Any]) -> None:
    """Refuse layers' extra state that is more than plain data, with a CheckpointError; nothing of it is executed."""
    for name, value in content.items():
        if not is_extra_state(name):
            continue
        if isinstance(value, io.BytesIO):
            load_plain(value, saved.path / name)
            value.seek(0)
        elif isinstance(value, torch.Tensor) and value.numel():
            with named_errors(saved.path / name):
                check_extra_state(value.cpu().numpy().tobytes())


def leave_out_other_scales(saved: SavedCheckpoint, content: dict[str, Any]) -> None:
    """Leave out delayed FP8 scales of grouped experts that ranks with another number of experts saved: they begin anew.

    mcore cuts them as if all experts' inputs came first, then all weights (extensions/transformer_engine.py:2487), but
    Transformer Engine has expert after expert: only with as many of them does each tensor get its own back.
    """
    record: dict[str, Any] = saved.common.get("minloop", {})
    experts, ranks = record.get("architecture", {}).get("num_moe_experts"), record.get("layout", {}).get("ep")
    if not (experts and ranks):
        return
    layers: dict[str, list[str]] = {}
    for name in content:
        if is_extra_state(name) and ".experts." in name and ".local_experts." not in name:
            layers.setdefault(name.rpartition(EXTRA_STATE)[0], []).append(name)
    for names in layers.values():
        delayed = any(isinstance(content[name], torch.Tensor) and content[name].numel() for name in names)
        if delayed and len(names) != experts // ranks:
            say_once("FP8 scales of experts were not carried over: they belong to expert_model_parallel_size as saved")
            for name in names:
                del content[name]


@contextlib.contextmanager
def letting_checked_states_in() -> Generator[None]:
    """While inside, Transformer Engine unpickles the extra state it is given: what `check_extra_states` let pass.

    By itself it refuses any pickle, and delayed scales are one, unless an environment variable trusts them all.
    """
    with contextlib.ExitStack() as undo:
        for module in (sys.modules.get(name) for name in _GUARDED):
            if (gate := getattr(module, _GATE, None)) is not None:
                undo.callback(setattr, module, _GATE, gate)
                setattr(module, _GATE, lambda *_: True)
        yield
