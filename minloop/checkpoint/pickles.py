"""Unpickling what a stranger wrote: nothing is called but what stands here, and nothing of this process is changed.

To allow some classes by name is not enough: pickle's BUILD sets attributes of whatever lies on its stack, so that it
changes allowed classes, functions and members of enumerations for the whole process. So the names stand for classes
made here, which refuse BUILD, and what they make is of the file alone.
"""

import enum
import functools
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch import _weights_only_unpickler as weights_only
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,  # pyright: ignore[reportPrivateUsage]
)
from torch.serialization import _get_layout  # pyright: ignore[reportPrivateUsage]


class NotPlainError(pickle.UnpicklingError):
    """A pickle that asks for more than plain data."""


class _Sealed(type):
    """Of classes: BUILD, which looks for `__setstate__` first, is refused."""

    def __setstate__(cls, state: Any) -> None:
        raise NotPlainError(f"it changes {cls.__name__}")


class _Shared:
    """Around an object that the whole process shares, such as a dtype: BUILD is refused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        raise NotPlainError(f"it changes {self.value}")


class _Properties(dcp.TensorProperties):
    """Takes the shared objects out; from then on it is PyTorch's."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(tuple(part.value if isinstance(part, _Shared) else part for part in state))
        self.__class__ = cast("Any", dcp.TensorProperties)


def _named(name: str, make: Callable[..., Any]) -> Any:
    """A class, as the opcodes for new objects want it, that gives what `make` returns."""

    def new(cls: type, /, *args: Any) -> Any:
        return make(*args)

    return _Sealed(name, (), {"__slots__": (), "__new__": new})


def _instances(kind: type) -> Any:
    def make() -> Any:
        return object.__new__(kind)

    return _named(kind.__name__, make)


METADATA_CLASSES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): _instances(getattr(dcp, name)) for name in dcp.__all__},
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _instances(_Properties),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _named(
        "_MEM_FORMAT_ENCODING", lambda value: _Shared(_MEM_FORMAT_ENCODING(value))
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _instances(_StorageInfo),
    ("torch", "Size"): _named("torch.Size", torch.Size),
    ("torch.serialization", "_get_layout"): _named("_get_layout", lambda name: _Shared(_get_layout(name))),
    ("pathlib", "PosixPath"): _named("PosixPath", PurePosixPath),  # the folder where it was saved
    ("pathlib._local", "PosixPath"): _named("PosixPath", PurePosixPath),  # the same, by Python 3.13
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _instances(torch_strategy.MCoreMetadata),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _instances(torch_strategy.MCoreSavePlan),
    **{("torch", name): _Shared(value) for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""What `.metadata` may name, and what is built instead."""


class MetadataUnpickler(pickle.Unpickler):
    """Of `.metadata`; in C, for large models have 100,000 entries and more."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _found(METADATA_CLASSES, module_name, global_name)


class _Inert:
    """Stands for an object that Transformer Engine's own unpickling will make; only recipes have a state."""

    def __init__(self, kind: str, *parts: Any) -> None:
        self.kind, self.parts = kind, list(parts)

    def __setstate__(self, state: Any) -> None:
        if self.kind != "recipe" or type(state) is not dict:
            raise NotPlainError(f"it changes a {self.kind}")
        self.parts.append(state)


def _storage(content: Any) -> _Inert:
    if type(content) is not bytes:
        raise NotPlainError("a storage is not of bytes")
    with enums_sealed():
        storage = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(storage, torch.UntypedStorage | torch.storage.TypedStorage):
        raise NotPlainError(f"a storage is a {type(storage).__name__}")
    return _Inert("storage")


def _tensor(storage: Any, *parts: Any) -> _Inert:
    if not (isinstance(storage, _Inert) and storage.kind == "storage"):
        raise NotPlainError("a tensor has no storage")
    return _Inert("tensor", *parts)


def _format(ends: Any) -> _Inert:
    if not (isinstance(ends, _Inert) and ends.kind == "range"):
        raise NotPlainError("a format has no range")
    return _Inert("format", ends)


def _empty() -> OrderedDict[Any, Any]:
    return OrderedDict()


_RECIPE = "transformer_engine.common.recipe"
_EXTRA_STATE_CLASSES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _named("OrderedDict", _empty),
    ("torch", "Size"): _named("torch.Size", torch.Size),
    ("torch._utils", "_rebuild_tensor_v2"): _named("_rebuild_tensor_v2", _tensor),
    ("torch.storage", "_load_from_bytes"): _named("_load_from_bytes", _storage),  # by mcore as the next
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _named("safe_load_from_bytes", _storage),
    (_RECIPE, "Format"): _named("Format", _format),
    (_RECIPE, "_FormatHelper"): _named("_FormatHelper", lambda *ends: _Inert("range", *ends)),
    **{
        (module, name): _named(name, lambda: _Inert("recipe"))
        for module, name in (
            *((_RECIPE, kind + "Scaling") for kind in ("Delayed", "Float8Current", "Float8Block", "MXFP8Block")),
            *((_RECIPE, name) for name in ("NVFP4BlockScaling", "MMParams", "QParams")),
            ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
        )
    },
}
"""What Transformer Engine's extra states name, of what mcore's `SafeUnpickler` allows; that leaves classes open."""


class _ExtraStateUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _found(_EXTRA_STATE_CLASSES, module_name, global_name)


def check_extra_state(content: bytes) -> None:
    """Raise NotPlainError unless `pickle.loads` of this makes plain data, tensors and recipes, and changes nothing.

    It runs the same code of pickle's over it, so that both understand the same, and makes nothing but stand-ins.
    """
    try:
        root = _ExtraStateUnpickler(io.BytesIO(content)).load()
    except MemoryError as error:  # these are of some kilobytes
        raise NotPlainError("it asks for more memory than it can need") from error
    left, seen = [root], set[int]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            entries = cast("dict[Any, Any]", value)
            left += [*entries, *entries.values(), *getattr(value, "__dict__", {}).values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += cast("list[Any]", value)
        elif isinstance(value, _Inert):
            left += value.parts
        elif not isinstance(value, bool | int | float | complex | str | bytes | bytearray | None):
            raise NotPlainError(f"it holds {value!r:.100}")


def _found(known: dict[tuple[str, str], Any], module_name: str, global_name: str) -> Any:
    if (module_name, global_name) not in known:
        raise NotPlainError(f"it names {module_name}.{global_name}")
    return known[module_name, global_name]


_sealing = threading.Lock()
_sealed: dict[Any, tuple[Any, str]] = {}
_inside: list[None] = []
"""An entry for each thread that is inside."""


@contextmanager
def enums_sealed() -> Generator[None]:
    """While inside, `torch.load` of plain data makes members of enumerations, but changes none.

    It builds on instances of every class declared safe, and mcore declares enumerations, whose members are shared.
    """
    with _sealing:
        if not _inside:
            _sealed.update(_stand_ins())
            _replace(list(_sealed), list(_sealed.values()))
        _inside.append(None)
    try:
        yield
    finally:
        with _sealing:
            _inside.pop()
            if not _inside:
                _replace(list(_sealed.values()), list(_sealed))
                _sealed.clear()


@functools.cache
def _by_value(kind: enum.EnumMeta) -> Any:
    return _named(kind.__name__, kind)


def _stand_ins() -> Generator[tuple[Any, tuple[Any, str]]]:
    for declared in torch.serialization.get_safe_globals():
        kind, name = declared if isinstance(declared, tuple) else (declared, None)
        if isinstance(kind, enum.EnumMeta):
            yield declared, (_by_value(kind), name or f"{kind.__module__}.{kind.__qualname__}")


def _replace(old: list[Any], new: list[Any]) -> None:
    weights_only._add_safe_globals(new)  # pyright: ignore[reportPrivateUsage]
    weights_only._remove_safe_globals(old)  # pyright: ignore[reportPrivateUsage]
