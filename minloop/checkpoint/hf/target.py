"""The model that weights are read into or taken from: its chunks on this rank, and whether it is the one described."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from minloop.architecture import unwrapped
from minloop.checkpoint.hf.config import HFModel
from minloop.checkpoint.hf.layout import own_name
from minloop.checkpoint.parts import Part, parts, sharded_parameters
from minloop.state import TrainState

Target = TrainState | Sequence[torch.nn.Module]

TRAINING = ("hidden_dropout", "attention_dropout")
"""Fields that do not change what a model computes outside training."""

ATTRIBUTES = {"rope_scaling": "rotary_scaling"}
"""Options of `GPTModel` that it keeps under another name."""


def chunks_of(target: Target) -> Sequence[torch.nn.Module]:
    """The chunks of a training state, or those given."""
    return target.chunks if isinstance(target, TrainState) else target


def groups_of(chunks: Sequence[torch.nn.Module]) -> ProcessGroupCollection:
    """The groups that the model was built with."""
    model: Any = unwrapped(chunks[0])
    return model.pg_collection


def own_parts(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Part]]:
    """What this rank holds of the model, with the name in `layouts` of the full tensor; values share memory with it."""
    for leaf, parameter in sharded_parameters(chunks, groups_of(chunks)):
        for part in parts(leaf, parameter.detach()):
            yield own_name(part), part


def check_model(chunks: Sequence[torch.nn.Module], model: HFModel) -> None:
    """Raise ValueError unless chunks are of the model that Hugging Face's config describes, on every rank alike."""
    own: Any = unwrapped(chunks[0])
    config: Any = get_model_config(chunks[0])
    ours = {name: getattr(config, name) for name in model.fields if name not in TRAINING}
    for name in model.options:
        attribute = ATTRIBUTES.get(name, name)
        if name != "max_sequence_length" and (hasattr(own, attribute) or hasattr(config, attribute)):
            ours[name] = getattr(own, attribute) if hasattr(own, attribute) else getattr(config, attribute)
    theirs = model.fields | model.options
    if ours["vocab_size"] > theirs["vocab_size"]:  # padded
        del ours["vocab_size"]
    differing = [f"{name}: {theirs[name]!r} there, {ours[name]!r} here" for name in ours if ours[name] != theirs[name]]
    if differing:
        raise ValueError(
            f"Hugging Face's config describes another model ({'; '.join(differing)}): build this one with what "
            "hf_config_fields returns"
        )
