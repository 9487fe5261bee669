"""Reading Hugging Face's weights into a model of any layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.utils import get_model_config

from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.hf.config import read_hf_config
from minloop.checkpoint.hf.files import WeightFiles
from minloop.checkpoint.hf.layout import Layout, layouts
from minloop.checkpoint.hf.target import Target, check_model, chunks_of, groups_of, own_parts
from minloop.checkpoint.parts import Part
from minloop.data_parallel import gathered_parameters, take_over_weights
from minloop.groups import as_the_world
from minloop.precision_checks import refuse_fp8_weights
from minloop.state import TrainState, require_between_steps

IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Ends of names that may be there without a place in the model: computed values, and the copy of a tied embedding."""

MOST_NAMED = 5


def load_hf_weights(target: Target, directory: str | Path) -> None:
    """Load a model of Hugging Face from its safetensors files, whatever the layout here; every rank calls it.

    Each rank reads only its own parts, straight into its parameters and their dtype. Of a training state the master
    weights follow, which with bf16 and fp16 are then the rounded weights. Chunks may be given before they are wrapped.

    Args:
        target: a training state, or this rank's chunks, of the model that `hf_config_fields` describes.
        directory: with config.json and model.safetensors, or several such files and their index, seen by every rank.
    Raises:
        FileNotFoundError: one of these files is missing.
        ValueError: another architecture, weights kept in FP8, tensors that are missing, unexpected or of another shape,
            a damaged file; the message names them. Every rank raises it, and no weight has changed unless a file could
            not be read through.
    """
    chunks = chunks_of(target)
    if isinstance(target, TrainState):
        require_between_steps(target)
    with as_the_world(groups_of(chunks)), gathered_parameters(chunks), torch.no_grad():
        with agreed():
            model = read_hf_config(directory)
            check_model(chunks, model)
            refuse_fp8_weights(get_model_config(chunks[0]), "load_hf_weights cannot write into")
            expected = layouts(model)
            files = WeightFiles(Path(directory))
            _check_tensors(Path(directory), expected, files.shapes())
            own = list(own_parts(chunks))
            _check_parts(expected, own)
        with agreed():
            for name, part in own:
                _fill(part, expected[name], files)
        if isinstance(target, TrainState):
            take_over_weights(chunks, target.optimizer)


def _check_tensors(directory: Path, expected: Mapping[str, Layout], found: Mapping[str, tuple[int, ...]]) -> None:
    wanted = {name: shape for layout in expected.values() for name, shape in layout.shapes.items()}
    faults = {
        "lacks": [name for name in wanted if name not in found],
        "has unexpected": [name for name in found if name not in wanted and not name.endswith(IGNORED)],
        "has mis-shaped": [
            f"{name} {list(found[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    if said := [f"{what} {_some(names)}" for what, names in faults.items() if names]:
        raise ValueError(f"{directory} does not hold the model of its config.json: it {'; it '.join(said)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _check_parts(expected: Mapping[str, Layout], own: Sequence[tuple[str, Part]]) -> None:
    for name, part in own:
        if name not in expected:
            raise ValueError(
                f"the model has a parameter {name} that its Hugging Face architecture has no tensor for: load the "
                "weights before it is added"
            )
        rows, *columns = expected[name].shape()
        if part.shape[1:] != tuple(columns) or (part.shape[0] != rows and not expected[name].padded):
            raise ValueError(f"{name} is {part.shape} here, of Hugging Face's tensors {(rows, *columns)}")


def _fill(part: Part, layout: Layout, files: WeightFiles) -> None:
    if layout.padded:
        part.tensor.zero_()
    for name, theirs, rows in layout.pieces(part.place):
        part.tensor[rows].copy_(files.read(name, theirs))
