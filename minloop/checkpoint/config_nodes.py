"""Configs as plain nodes of text, and plain nodes as configs again.

The form is that of Megatron-Bridge's run_config.yaml, which Megatron-LM's `megatron.training.config` reads too:

    dataclass     {_target_: megatron.core.transformer.transformer_config.TransformerConfig, num_layers: 4, …}
    function      {_target_: torch.nn.functional.silu, _call_: false}; a dtype likewise
    partial       {_target_: torch.nn.init.normal_, _partial_: true, _args_: [], mean: 0.0, std: 0.02}
    enum          {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [5], _name_: auto}
    any object    {_target_: its class, _call_: true}: it is not read back, whoever reads must give it

A name in a node is looked up, never run: see `find` for what may be named. Constructed are dataclasses and enums alone.
"""

import dataclasses
import functools
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from minloop.checks import HOOKS

NOT_RECORDED = (*HOOKS, "moe_grad_scale_func", "mtp_grad_scale_func")
"""Fields that belong to one training state."""
CLASS_MODULES = ("megatron.core", "minloop")
FUNCTION_MODULES = ("megatron.core.activations", "megatron.core.fusions", "torch.nn.functional", "torch.nn.init")
"""Where dataclasses and enums, and where functions may come from, beside the modules that a reader names."""


def encode(value: Any, where: str, unnamed: list[str] | None = None) -> Any:
    """Return `value` as dicts, lists, numbers and strings; pipeline layouts become their text, tuples become lists.

    Args:
        where: path of field names to the value, such as "model.activation_func".
        unnamed: collects messages on callables that no name leads back to. They are written, but nobody can read them.
    """
    if isinstance(value, PipelineParallelLayerLayout):
        return encode(value.input_data, where, unnamed)
    if isinstance(value, Enum):
        return _target(type(value), call=True) | {"_args_": [value.value], "_name_": value.name}
    for kind in (bool, int, float, str):  # a subclass, such as numpy's float64, is a tag of its own in YAML
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if isinstance(value, Mapping):
        return {key: encode(item, f"{where}.{key}", unnamed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, f"{where}[{index}]", unnamed) for index, item in enumerate(value)]
    if isinstance(value, functools.partial):
        arguments = {"_args_": list(value.args), **value.keywords}
        function = encode(value.func, where, unnamed)["_target_"]
        return {"_target_": function, "_partial_": True} | encode(arguments, where, unnamed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _target(type(value)) | {
            name: encode(getattr(value, name), f"{where}.{name}", unnamed) for name in _recorded_fields(type(value))
        }
    if isinstance(value, type) or inspect.isroutine(value):
        name, found = qualified_name(value)
        if not found and unnamed is not None:
            unnamed.append(f"{where} is {name}: define the function at the top level of a module")
        return {"_target_": name, "_call_": False}
    return _target(type(value), call=True)


def decode(node: Any, where: str, modules: Iterable[str], given: Mapping[str, Any]) -> Any:
    """Return what `encode` was given.

    Args:
        modules: modules and packages of the reader's whose dataclasses, enums and functions may be named.
        given: values to take instead of the recorded ones, by their paths.
    Raises:
        ValueError: a name that may not be used or leads nowhere, an object, or a config that its class refuses.
    """
    if where in given:
        return given[where]
    if isinstance(node, list):
        return [decode(item, f"{where}[{index}]", modules, given) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: decode(item, f"{where}.{key}", modules, given) for key, item in node.items()}
    target = str(node["_target_"])
    if isinstance(_of_torch(target), torch.dtype):
        return _of_torch(target)
    if node.get("_call_") is False or node.get("_partial_"):
        function = find(target, where, (*FUNCTION_MODULES, *modules), of_torch="_partial_" not in node)
        arguments = {key: item for key, item in node.items() if key not in ("_target_", "_call_", "_partial_")}
        arguments = decode(arguments, where, modules, given)
        return (
            functools.partial(function, *arguments.pop("_args_", ()), **arguments) if "_partial_" in node else function
        )
    found = find(target, where, (*CLASS_MODULES, *modules))
    if isinstance(found, type) and issubclass(found, Enum):
        return found[node["_name_"]] if "_name_" in node else found(*node["_args_"])
    if "_call_" in node or not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(
            f"{where} was a {target}, of which only the class is recorded: give it, given={{{where!r}: …}}"
        )
    return _build(found, node, where, modules, given)


def find(name: str, where: str, modules: Iterable[str], *, of_torch: bool = False) -> Any:
    """Return the class or function called `name`, which must be one of `modules`' own: what they import is not.

    Args:
        of_torch: allow functions of C that lie directly in `torch`, such as ``torch.tanh``, as well.
    """
    of_torch = of_torch and name.count(".") == 1 and isinstance(_of_torch(name), types.BuiltinFunctionType)
    if not of_torch and not any(name.startswith(f"{module}.") for module in modules):
        raise ValueError(
            f"{where} names {name}, which is outside {', '.join(modules)}: if you trust it, name its module, "
            f"modules=[{name.rpartition('.')[0]!r}]"
        )
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{where} names {name}, which is not found ({error}): give it, given={{{where!r}: …}}"
        ) from error
    if qualified_name(found) != (name, True):
        raise ValueError(f"{where} names {name}, which is {qualified_name(found)[0]} under another name: use its own")
    return found


def _of_torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."), None)


def qualified_name(value: Any) -> tuple[str, bool]:
    """The name of a class or function, and whether that name leads back to it."""
    own = value.__name__ if hasattr(value, "__name__") else type(value).__name__
    for home in ("torch.nn.functional", "torch"):  # functions of C name no module, or a hidden one
        if isinstance(value, types.BuiltinFunctionType) and getattr(sys.modules[home], own, None) is value:
            return f"{home}.{own}", True
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", own)
    found: Any = sys.modules.get(str(module))
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return f"{module}.{qualname}", found is value


def _target(kind: type, *, call: bool | None = None) -> dict[str, Any]:
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}"} | ({} if call is None else {"_call_": call})


def _recorded_fields(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.name not in NOT_RECORDED and not f.name.startswith("_")]


def _build(kind: type[Any], node: dict[str, Any], where: str, modules: Iterable[str], given: Mapping[str, Any]) -> Any:
    """Construct a dataclass, then set whatever its construction derived differently from what was recorded."""
    own = {f.name: f.init for f in dataclasses.fields(kind)}
    # A field that this version lacks says nothing while it is off.
    if unknown := [name for name, value in node.items() if name not in {"_target_", *own} and value]:
        raise ValueError(f"{where}: {kind.__name__} has no field {', '.join(unknown)}: it is of another version")
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # names that are there for type checkers only
        hints = {}
    values = {
        name: _with_tuples(decode(node[name], f"{where}.{name}", modules, given), hints.get(name))
        for name in own
        if name in node
    }
    try:
        config = kind(**{name: value for name, value in values.items() if own[name]})
    except Exception as error:
        raise ValueError(f"{where}: {kind.__name__} refuses the recorded fields: {error}") from error
    for name, value in values.items():
        if encode(getattr(config, name), where) != encode(value, where):
            object.__setattr__(config, name, value)
    return config


def _with_tuples(value: Any, hint: Any) -> Any:
    """Lists where a field's type names a tuple, as tuples."""
    if not isinstance(value, list):
        return value
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if is_union else [hint]:
        kind, inner = typing.get_origin(option) or option, typing.get_args(option)
        if kind in (list, tuple):
            of_items = inner if kind is tuple and ... not in inner else inner[:1] * len(value)
            padded = [*of_items, *[None] * (len(value) - len(of_items))]
            return kind(_with_tuples(item, of_item) for item, of_item in zip(value, padded, strict=False))
    return value
