"""Whether a checkpoint's records, what is no tensor and the same on every rank, have the form that loading expects.

Whoever wrote the folder chose what they hold: each wrong field is named here, before anything is made of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

KINDS = ("fp32", "float16", "distributed")
_FIELDS: dict[str, tuple[Any, str]] = {
    "architecture": ((type(None), bool, int, float, str, list, tuple), "a number or string"),
    "layout": (int, "a size"),
    "loaders": (object, ""),  # what a position is, is its loader's affair
    "names": (object, ""),
}
"""Dicts of minloop's record: of what class and kind their values are."""


def wrong_records(common: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with what every reader asks for: minloop's record, mcore's switches."""
    yield from _no_dict_of("content_metadata", common.get("content_metadata") or {})
    own = common.get("minloop", {})
    yield from _no_dict_of("minloop", own)
    if not isinstance(own, dict):
        return
    for name, (kind, wanted) in _FIELDS.items():
        yield from _no_dict_of(f"minloop.{name}", own.get(name, {}), kind, wanted)
    if (kind := own.get("optimizer_kind", KINDS[0])) not in KINDS:
        yield _wrong("minloop.optimizer_kind", kind, f"one of {', '.join(KINDS)}")


def wrong_progress(common: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with what only a run that goes on asks for: steps, loss scale, the place in the schedule."""
    yield from _wrong_steps("optimizer", common.get("optimizer"))
    schedule = common.get("opt_param_scheduler", {"num_steps": 0})
    yield from _no_dict_of("opt_param_scheduler", schedule)
    if isinstance(schedule, dict):  # older Megatron-LM's name first, as in mcore
        steps = schedule.get("num_iters", schedule.get("num_steps"))
        if type(steps) is not int or steps < 0:
            yield _wrong("opt_param_scheduler.num_steps", steps, "a count")


def _wrong_steps(field: str, node: Any) -> Iterator[str]:
    """At any depth, as `saved_progress` looks for them."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        inner = f"{field}.{name}"
        if name in ("step", "common_step"):
            if not (_is_number(value) and float(value) >= 0):
                yield _wrong(inner, value, "a count")
        elif name == "grad_scaler":
            yield from _wrong_scaler(inner, value)
        else:
            yield from _wrong_steps(inner, value)


def _wrong_scaler(field: str, scaler: Any) -> Iterator[str]:
    """By the keys of mcore's `DynamicGradScaler`; a constant scale saves none."""
    yield from _no_dict_of(field, scaler)
    if not isinstance(scaler, dict) or not scaler:
        return
    if not (isinstance(scale := scaler.get("scale"), torch.Tensor) and scale.numel() == 1):
        yield _wrong(f"{field}.scale", scale, "a tensor of one element")
    for name in ("growth_tracker", "hysteresis_tracker"):
        if type(value := scaler.get(name)) is not int:
            yield _wrong(f"{field}.{name}", value, "a count")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    )


def _no_dict_of(field: str, value: Any, kind: Any = object, wanted: str = "") -> Iterator[str]:
    if not isinstance(value, dict):
        yield _wrong(field, value, "a dict")
        return
    yield from (_wrong(f"{field}.{name}", own, wanted) for name, own in value.items() if not isinstance(own, kind))


def _wrong(field: str, found: Any, wanted: str) -> str:
    return f"{field} is {found!r:.100}, not {wanted}"
