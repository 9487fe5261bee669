"""Weights out and in, one full tensor at a time, by names that no layout changes: for an engine or another model.

Between two live models mcore's own ``megatron.core.resharding.refit.swap_model_weights`` can be called beside it, on
the CPU, too, and writes the same weights, element for element. It sends blocks from rank to rank and puts no tensor
together, but leaves the optimizer's master weights as they are. In mcore 0.19.2 it moves the first chunk of a list
alone, so no virtual pipeline stages (refit.py:188); knows whose an expert is by the names of grouped layers alone, so
no local layers over expert parallel ranks (utils.py:131); and keeps plans by layout, not by model (refit.py:114): call
``refit.clear_all_caches()`` between two pairs of models.
"""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minloop.alive import usable
from minloop.checkpoint.hf.config import read_hf_config
from minloop.checkpoint.hf.layout import layouts
from minloop.checkpoint.hf.save import check_complete, their_tensors
from minloop.checkpoint.hf.target import check_model, own_parts
from minloop.checkpoint.parts import Part, parts, sharded_parameters
from minloop.checkpoint.streaming import FullTensor, Stream
from minloop.checkpoint.tensors import matches
from minloop.data_parallel import gathered_parameters, take_over_weights
from minloop.precision_checks import refuse_fp8_weights
from minloop.state import TrainState, require_between_steps, require_memory


@torch.no_grad()
def named_full_parameters(
    state: TrainState,
    *,
    ranks: Collection[int] | None = None,
    dtype: torch.dtype | None = None,
    only: Sequence[str] = ("*",),
    hf_config: str | Path | Mapping[str, Any] | None = None,
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield every weight in its full shape, on this rank's device, whatever the layout; every rank iterates to the end.

        for name, weight in minloop.named_full_parameters(state, ranks=[0]):
            engine.load(name, weight)  # on rank 0; other ranks get nothing and send their parts

    Beside the shard a rank needs memory for the tensor yielded, if it asks, and for one block of it. Names are those of
    `full_weights`: the checkpoint's, with the layer (from 0) and the expert where the checkpoint stacks them.

    Args:
        ranks: global ranks of this layout that get the tensors, from the ranks that hold their parts; by default all,
            by broadcasts. To others of the world one that gets them passes them on, in a group of the host's own.
        dtype: cast to it before anything is sent; by default the weights' own.
        only: names that are wanted, in patterns with * for anything; not with `hf_config`.
        hf_config: a directory with Hugging Face's config.json, or its content: names and shapes are then
            Hugging Face's, of the architectures that `hf_config_fields` knows.
    Raises:
        ValueError: weights in FP8; `hf_config` describes another model; `ranks` outside the layout.
        RuntimeError: the groups were destroyed, or an error left them useless.
    """
    refuse_fp8_weights(state.config, "named_full_parameters cannot cut")
    require_memory(state, "weights")
    with usable(state.groups), gathered_parameters(state.chunks):
        if hf_config is None:
            stream = Stream(((part.full_name(), part) for part in _parts(state)), state.groups)
            wanted = [name for name in stream.known if matches(name, only)]
            yield from stream.tensors(wanted, ranks=ranks, dtype=dtype)
            return
        model = read_hf_config(hf_config)
        check_model(state.chunks, model)
        expected, stream = layouts(model), Stream(own_parts(state.chunks), state.groups)
        check_complete(expected, stream.known)
        yield from their_tensors(expected, stream, ranks, dtype)


@torch.no_grad()
def load_full_parameters(
    state: TrainState,
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    *,
    only: Sequence[str] = ("*",),
) -> None:
    """Take this rank's parts of full weights: the inverse of `named_full_parameters`, in any layout.

    Every rank iterates over the same tensors and holds one at a time. Those of another live model may be given as they
    come: ``load_full_parameters(reference, named_full_parameters(actor))``. The optimizer's master weights follow.

    Args:
        tensors: (name, tensor), in any order, or a dict; cast to the weights' dtype.
        only: names of this model's weights that must be among them, in patterns with * for anything; others may be.
    Raises:
        ValueError: a name that this model lacks, another shape, or weights that were not among them. Every rank raises
            it; weights that came before have changed.
    """
    refuse_fp8_weights(state.config, "load_full_parameters cannot write into")
    require_between_steps(state)
    own: dict[str, list[Part]] = {}
    given: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    with usable(state.groups), gathered_parameters(state.chunks):
        for part in _parts(state):
            own.setdefault(part.full_name(), []).append(part)
        known = Stream(((name, part) for name, found in own.items() for part in found), state.groups).known
        missing = {name for name in known if matches(name, only)}
        for name, tensor in given:
            _check(name, tensor, known)
            missing.discard(name)
            for part in own.get(name, []):
                part.tensor.copy_(tensor[part.place])
        if missing:
            raise ValueError(f"{len(missing)} weights were not given, such as {', '.join(sorted(missing)[:5])}")
        take_over_weights(state.chunks, state.optimizer)


def _parts(state: TrainState) -> Iterable[Part]:
    for leaf, parameter in sharded_parameters(state.chunks, state.groups):
        yield from parts(leaf, parameter.detach())


def _check(name: str, tensor: torch.Tensor, known: Mapping[str, FullTensor]) -> None:
    if name not in known:
        raise ValueError(f"this model has no weight {name}")
    if tuple(tensor.shape) != known[name].shape:
        raise ValueError(f"{name} is {list(tensor.shape)} where it comes from, {list(known[name].shape)} here")
