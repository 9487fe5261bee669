"""Weights from a checkpoint of another model: by an explicit map of what differs, and nothing unsaid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from minloop.checkpoint import content
from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.directory import open_checkpoint
from minloop.checkpoint.load import architecture_differences, content_metadata, put_into_models
from minloop.checkpoint.reading import SavedCheckpoint
from minloop.checkpoint.tensors import matches, read_tensors, saved_adapters
from minloop.data_parallel import gathered_parameters, take_over_weights
from minloop.groups import as_the_world
from minloop.messages import say_once
from minloop.state import TrainState, require_between_steps


def load_weights(
    checkpoint: str | Path,
    state: TrainState,
    *,
    rename: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    resize: Sequence[str] = (),
    verify: bool | None = None,
) -> Path:
    """Load the weights that fit, to train something else from them; every rank calls it.

    Names are those that `describe_checkpoint` shows, in patterns with * for anything; layers that are alike are stacked
    under one name ("decoder.layers.mlp.linear_fc1.weight", [layers, …]). Weights that are not loaded keep the values
    they have. Without a map all weights of `state` must be there in their shapes, as with `load_checkpoint(
    weights_only=True)`, but fields of the architecture may differ, which is said. Optimizer, counters and schedule stay
    as they are; master weights follow the weights. Layout and data parallelism may differ from those saved.

    Args:
        rename: beginnings of names in this model, and what the checkpoint has in their place:
            {"decoder.": "language_model.decoder."}. The longest that fits counts.
        skip: weights of this model that are not loaded even if they are there; and LoRA's adapters in the checkpoint
            that this model has no place for, ("*_lora.*",), which are refused otherwise.
        allow_missing: weights of this model that keep their values if the checkpoint lacks them.
        resize: weights of this model that may be larger or smaller in the checkpoint. What both have (the first rows of
            a vocabulary, the first layers) is loaded, and the rest keeps its values:
            ("embedding.word_embeddings.weight", "output_layer.weight") for a larger vocabulary.
        verify: as in `load_checkpoint`.
    Returns:
        The directory loaded.
    Raises:
        FileNotFoundError, CheckpointError: as in `load_checkpoint`.
        TypeError: a pattern alone in the place of a list of them.
        ValueError: weights lack or differ in shape beyond what the map allows, a pattern of it fits no weight, or
            adapters of the checkpoint would be left out.
    """
    for name, patterns in (("skip", skip), ("allow_missing", allow_missing), ("resize", resize)):
        if isinstance(patterns, str):
            raise TypeError(f"{name}={patterns!r} would be one pattern for each letter: pass [{patterns!r}]")
    require_between_steps(state)
    with as_the_world(state.groups):
        opened = open_checkpoint(checkpoint, verify)
        differences = architecture_differences(opened.common.get("minloop", {}), state)
        chosen = _Map(opened, rename or {}, skip, allow_missing, resize, differences)
        with gathered_parameters(state.chunks), torch.no_grad():
            template = content.model_state(state, content_metadata(opened, state))
            with agreed():
                for key in content.model_keys(state):
                    dict_list_map_inplace(chosen.apply, template[key])
            chosen.check_and_say()
            put_into_models(state, read_tensors(opened, template, chosen.resized, skip=skip))
            take_over_weights(state.chunks, state.optimizer)
        return opened.path


@dataclass
class _Map:
    """Applies the caller's map to mcore's description of each weight, and keeps account of it."""

    opened: SavedCheckpoint
    rename: Mapping[str, str]
    skip: Sequence[str]
    allow_missing: Sequence[str]
    resize: Sequence[str]
    differences: list[str]
    names: set[str] = field(default_factory=set[str])
    left: set[str] = field(default_factory=set[str])
    resized: list[str] = field(default_factory=list[str])

    def apply(self, leaf: Any) -> Any:
        """Return what mcore is to load in place of `leaf`: the same by another name, or the values it has."""
        if not isinstance(leaf, ShardedTensor | ShardedTensorFactory | ShardedObject):
            return leaf
        name, saved_name = leaf.key, self._saved_name(leaf.key)
        known = self.opened.metadata.state_dict_metadata
        if isinstance(leaf, ShardedObject):
            own = matches(name, self.skip) or replace(leaf, key=saved_name).unique_key not in known
            return LocalNonpersistentObject(leaf.data) if own else replace(leaf, key=saved_name)
        self.names.add(name)
        missing = saved_name not in known and matches(name, self.allow_missing)
        if missing or matches(name, self.skip):
            self.left.add(name)
            return LocalNonpersistentObject(leaf.data)
        if matches(name, self.resize):
            self.resized.append(saved_name)
        leaf = replace(leaf, key=saved_name)
        if isinstance(leaf, ShardedTensor):  # mcore pads vocabularies, and reads any size of them into any other
            same_vocabulary = not any(difference.startswith("vocab_size:") for difference in self.differences)
            leaf.allow_shape_mismatch = leaf.allow_shape_mismatch and same_vocabulary
        return leaf

    def check_and_say(self) -> None:
        """Refuse a map that fits nothing, and say what is left as it was; every rank calls it.

        Raises:
            ValueError: a pattern fits no weight of any rank.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.names, self.left))
        names, left = (set[str]().union(*(part[index] for part in gathered)) for index in (0, 1))
        patterns = [*(prefix + "*" for prefix in self.rename), *self.skip, *self.allow_missing, *self.resize]
        fitting = names | saved_adapters(self.opened)
        if idle := [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in fitting)]:
            raise ValueError(
                f"no weight of this model is called {', '.join(idle)}; there are {', '.join(sorted(names))}"
            )
        if left:
            say_once(f"{len(left)} weights keep the values they have: {', '.join(sorted(left))}")
        if self.resized:
            say_once(f"of another size in {self.opened.path} may be {', '.join(self.resize)}: what both have is loaded")
        if self.differences:
            say_once(f"{self.opened.path} is of another architecture ({'; '.join(self.differences)})")

    def _saved_name(self, name: str) -> str:
        fitting = [prefix for prefix in self.rename if name.startswith(prefix)]
        if not fitting:
            return name
        prefix = max(fitting, key=len)
        return self.rename[prefix] + name.removeprefix(prefix)
