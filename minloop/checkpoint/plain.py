"""What is saved beside tensors: plain data, which loading lets in, and the same on every rank."""

import io
from argparse import Namespace  # Megatron-LM stores its settings as one; nothing is parsed here
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from minloop.checkpoint.agreement import agreed, from_first_rank


def made_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` with numpy's numbers in dicts, lists and tuples as Python's; every rank calls it.

    Raises:
        ValueError: on every rank, if something in it is refused by loading, which builds no class of strangers.
    """
    with agreed():
        value = _python(value)
        _check(value)
    return value


def check_same(value: dict[str, Any]) -> None:
    """Raise ValueError on every rank if plain data differ between ranks: only those of the first would be saved."""
    first = from_first_rank(lambda: value)
    with agreed():
        if differing := [*_differences(first, value, "")]:
            loaders = all(path.startswith("loaders.") for path in differing)
            remedy = (
                "gather what each rank has into one state_dict of the loader"
                if loaders
                else "every rank takes the same steps, and sets the state's counters alike"
            )
            raise ValueError(
                f"{'; '.join(differing[:5])}: a checkpoint holds one value for all ranks, so these must be equal; "
                f"{remedy}"
            )


def _python(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {key: _python(part) for key, part in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_python, value))
    if type(value) is Namespace:
        return Namespace(**_python(vars(value)))
    return value


def _check(value: dict[str, Any]) -> None:
    # as mcore will save it: all but what it shards, dicts of any kind as plain ones
    common = extract_matching_values(value, lambda part: isinstance(part, ShardedBase | LocalNonpersistentObject))[1]
    if not _can_be_loaded(common):
        refused = [
            f"{path} is a {type(leaf).__module__}.{type(leaf).__qualname__}"
            for path, leaf in _leaves(common, "")
            if not _can_be_loaded(leaf)
        ]
        raise ValueError(
            f"{'; '.join(refused[:5]) or 'a key of a dict'}: this could not be loaded again; a checkpoint holds "
            "numbers, strings, tensors, and lists and dicts of them"
        )


def _can_be_loaded(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # pickling runs methods of any class
        return False
    return True


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}".lstrip("."))
    elif type(value) is list:
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]")
    else:
        yield path, value


def _differences(first: Any, here: Any, path: str) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(here, dict):
        for key in {**first, **here}:
            yield from _differences(first.get(key), here.get(key), f"{path}.{key}".lstrip("."))
    elif not _equal(first, here):
        yield f"{path}: {first!r:.60} on rank 0, {here!r:.60} here"


def _equal(first: Any, here: Any) -> bool:
    """Whether both are saved alike: NaN is not equal to itself, sets have no order, and long tensors print in part."""
    if isinstance(first, torch.Tensor) and isinstance(here, torch.Tensor):
        alike = (first.dtype, first.shape) == (here.dtype, here.shape)
        return alike and all(map(torch.equal, *([x.cpu().reshape(-1).view(torch.uint8)] for x in (first, here))))
    if isinstance(first, list | tuple) and isinstance(here, list | tuple):
        return len(first) == len(here) and all(map(_equal, first, here))
    if isinstance(first, dict) and isinstance(here, dict):
        return first.keys() == here.keys() and all(_equal(first[key], here[key]) for key in first)
    return repr(first) == repr(here) or bool(first == here)
