"""The optimizer's part of a checkpoint: mcore keeps it in three forms; here each loads from each, and torch's Adam loads at all.

Forms (see `content.optimizer_kind`). In all three, moments lie under "optimizer.state.exp_avg.<weight>" and so on, and:

    fp32         DDP, fp32 weights: the weights are the master weights
    float16      DDP, bf16 or fp16 weights: master weights under "optimizer.state.fp32_param.<weight>"
    distributed  ZeRO-1: master weights under "optimizer.state.param.<weight>"
"""

import copy
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from minloop.optimizer import inner_optimizers, prepare_adam_state
from minloop.state import TrainState

MASTER_WEIGHT_PREFIX = {
    "fp32": "",
    "float16": "optimizer.state.fp32_param.",
    "distributed": "optimizer.state.param.",
}


def adapt_template(template: dict[str, Any], kind: str, saved_kind: str) -> None:
    """Make the template of one form ask for the master weights where another form stored them, in place."""
    if kind in (saved_kind, "fp32"):
        return
    ours, theirs = MASTER_WEIGHT_PREFIX[kind], MASTER_WEIGHT_PREFIX[saved_kind]

    def rename(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and leaf.key.startswith(ours):
            return replace(leaf, key=theirs + leaf.key.removeprefix(ours))
        return leaf

    dict_list_map_inplace(rename, template)


def adapt_loaded(loaded: dict[Any, Any], state: TrainState, kind: str, saved_kind: str) -> dict[Any, Any]:
    """Give what was loaded the form this optimizer reads: settings and step come from the checkpoint, tensors from the template."""
    if kind == saved_kind:
        return loaded
    count = len(list(inner_optimizers(state.optimizer)))
    parts = [loaded] if count == 1 else [loaded[index] for index in range(count)]
    for part in parts:
        groups, step = _settings_and_step(part, saved_kind)
        if kind == "distributed":
            part["optimizer"] = {"param_groups": [group | {"step": step} for group in groups]}
            part["param_state_sharding_type"] = "fully_reshardable"
            continue
        inner = part["optimizer"] if kind == "float16" else part
        inner["param_groups"] = groups
        inner["state"]["common_step"] = step
    return loaded


def _settings_and_step(part: dict[Any, Any], saved_kind: str) -> tuple[list[dict[str, Any]], Any]:
    holder = part if saved_kind == "fp32" else part["optimizer"]
    groups = copy.deepcopy(holder["param_groups"])
    if saved_kind == "distributed":
        return groups, groups[0].pop("step")
    return groups, holder["state"].pop("common_step", 0.0)


def load_optimizer(state: TrainState, loaded: dict[Any, Any]) -> None:
    """Load the optimizer's state; call it without gradient tracking.

    Inside mcore's distributed optimizer, torch's Adam (no Transformer Engine, no apex) needs three things that mcore 0.19
    does not do: its "step" tensors must be out of the way while moments are copied, tensors must be copied without
    tracking, and afterwards every parameter must own its step.
    """
    optimizers = list(inner_optimizers(state.optimizer))
    parts = [loaded] if len(optimizers) == 1 else [loaded[index] for index in range(len(optimizers))]
    for optimizer, part in zip(optimizers, parts, strict=True):
        if "param_state" not in part:
            optimizer.load_state_dict(part)
            continue
        settings = {key: value for key, value in part.items() if key != "param_state"}
        optimizer.load_state_dict(settings)
        adam_states = list(optimizer.optimizer.state.values())
        steps = [adam_state.pop("step", None) for adam_state in adam_states]
        optimizer.load_parameter_state_from_fully_reshardable(part["param_state"])  # pyright: ignore[reportAttributeAccessIssue]
        for adam_state, step in zip(adam_states, steps, strict=True):
            if step is not None:
                adam_state["step"] = step
    prepare_adam_state(state.optimizer)
