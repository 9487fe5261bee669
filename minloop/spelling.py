"""Words that mcore does not know are answered with those it knows; mcore answers late, without the field, or never."""

import difflib
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

BEYOND_MCORE: Mapping[str, tuple[Any, ...]] = {"normalization": ("L2Norm",)}
"""Words that mcore's annotations lack and minloop's torch layers understand."""


def did_you_mean(word: object, words: Iterable[object]) -> str:
    """Return ": did you mean 'near'?" with the nearest of `words`; empty if none is near."""
    nearest = difflib.get_close_matches(str(word), [str(known) for known in words], n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else ""


def check_fields(kind: type[Any], names: Iterable[str]) -> None:
    """Raise TypeError for a name that is no field of the dataclass `kind`, with the nearest that is one."""
    parameters = inspect.signature(kind).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):  # a class of its own kind
        return
    for name in names:
        if name not in parameters:
            raise TypeError(f"{kind.__name__} has no field {name!r}{did_you_mean(name, parameters)}")


def check_spellings(config: Any) -> None:
    """Refuse words that `TransformerConfig` does not list for a field, and an `attention_backend` that is a word.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the field, its value and the words it may be.
    """
    for name, words in _words().items():
        value = getattr(config, name)
        if value not in words:
            raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, words))}{did_you_mean(value, words)}")
    if not isinstance(backend := config.attention_backend, AttnBackend):
        known = [one.name for one in AttnBackend]
        remedy = f"AttnBackend.{backend}" if backend in known else f"one of {', '.join(map(str, AttnBackend))}"
        raise ValueError(
            f"attention_backend={backend!r} is no AttnBackend: import that from megatron.core.transformer.enums and "
            f"give {remedy}"
        )


@functools.cache
def _words() -> dict[str, tuple[Any, ...]]:
    """Field → what it may be, for those fields that mcore annotates as one of some words."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(TransformerConfig).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words:
            found[name] = (*words, *BEYOND_MCORE.get(name, ()), *(None for kind in kinds if kind is types.NoneType))
    return found
