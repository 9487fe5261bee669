"""How many steps an optimizer has taken: one number for all ranks, also for those that train nothing of it.

mcore stores it once, from the first rank, whose pipeline stage may be frozen, or have no experts.
"""

import contextlib
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from minloop.everyone import from_all_ranks
from minloop.optimizer import inner_optimizers, is_torch_adam
from minloop.state import TrainState


def steps_taken(state: TrainState) -> float:
    """The most steps that any parameter of any rank has taken; 0.0 of an optimizer that counts none. Of all ranks."""
    own = [0.0]
    for optimizer in inner_optimizers(state.optimizer):
        inner: Any = optimizer.optimizer
        own += [float(held.get("step", 0.0)) for held in inner.state.values()]  # torch's Adam
        own += [float(group.get("step", 0.0)) for group in inner.param_groups if group["params"]]
    return max(from_all_ranks(max(own), state.groups))


def parts(state: TrainState, content: dict[Any, Any]) -> Iterator[tuple[MegatronOptimizer, dict[Any, Any]]]:
    """Each optimizer that mcore chained (dense and expert parameters have one each) with its part of the content.

    The part of an optimizer that has no parameters on this stage may be empty.
    """
    chained: list[Any] = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    for index, optimizer in enumerate(chained):
        if not getattr(optimizer, "is_stub_optimizer", False):
            yield optimizer, content if len(chained) == 1 else content.get(index, {})


@contextlib.contextmanager
def nothing_in_stubs(state: TrainState) -> Generator[None]:
    """While inside, what mcore chains for parameters that no rank trains has nothing to save, and says so.

    mcore looks for settings in all that it chained (its optimizer.py, `_synchronize_steps`).
    """
    chained: list[Any] = getattr(state.optimizer, "chained_optimizers", [])
    stubs = [optimizer for optimizer in chained if getattr(optimizer, "is_stub_optimizer", False)]
    kept = [vars(stub).get("optimizer") for stub in stubs]
    for stub in stubs:
        vars(stub).update(optimizer=SimpleNamespace(param_groups=[]), sharded_state_dict=_nothing)
    try:
        yield
    finally:
        for stub, optimizer in zip(stubs, kept, strict=True):
            del vars(stub)["sharded_state_dict"]
            vars(stub)["optimizer"] = optimizer


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def agree_on_nothing(state: TrainState, content: dict[Any, Any], kind: str, steps: float) -> None:
    """Keep, of optimizers without parameters on this stage, only what others save beside their tensors; in place.

    mcore stores it once, from the first rank, whose empty lists and missing steps would stand for all ranks.

    Args:
        kind: see `content.optimizer_kind`.
        steps: see `steps_taken`.
    """
    for optimizer, part in parts(state, content):
        if any(group["params"] for group in optimizer.param_groups):
            continue
        settings: dict[str, Any] = part if kind == "fp32" else part["optimizer"]
        if is_torch_adam(optimizer.optimizer):
            if kind != "distributed":
                settings.setdefault("state", {})["common_step"] = torch.tensor(steps)
            part.pop("fp32_from_fp16_params", None)
            if not part.get("param_state"):
                part.pop("param_state", None)
        elif steps:
            settings["param_groups"] = [group | {"step": int(steps)} for group in settings.get("param_groups", [])]
