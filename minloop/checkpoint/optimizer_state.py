"""The optimizer's part of a checkpoint: mcore keeps it in three forms; here each loads from each, and torch's Adam loads at all.

Forms (see `content.optimizer_kind`). In all three, moments lie under "optimizer.state.exp_avg.<weight>" and so on, and:

    fp32         DDP, fp32 weights: the weights are the master weights
    float16      DDP, bf16 or fp16 weights: master weights under "optimizer.state.fp32_param.<weight>"
    distributed  ZeRO-1: master weights under "optimizer.state.param.<weight>"
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from minloop.optimizer import inner_optimizers, is_torch_adam, prepare_optimizer_state
from minloop.state import TrainState

MASTER_WEIGHT_PREFIX = {
    "fp32": "",
    "float16": "optimizer.state.fp32_param.",
    "distributed": "optimizer.state.param.",
}


def adapt_template(template: dict[str, Any], kind: str, saved_kind: str) -> None:
    """Make the template of one form ask for the master weights where another form stored them, in place.

    Where the saved weights were themselves the master weights, nothing is asked for: `load_optimizer` copies the weights.
    """
    if kind in (saved_kind, "fp32"):
        return
    ours, theirs = MASTER_WEIGHT_PREFIX[kind], MASTER_WEIGHT_PREFIX[saved_kind]

    def rename(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor | ShardedTensorFactory) or not leaf.key.startswith(ours):
            return leaf
        return (
            replace(leaf, key=theirs + leaf.key.removeprefix(ours)) if theirs else LocalNonpersistentObject(leaf.data)
        )

    dict_list_map_inplace(rename, template)


def adapt_loaded(loaded: dict[Any, Any], state: TrainState, kind: str, saved_kind: str) -> dict[Any, Any]:
    """Give what was loaded the form this optimizer reads: settings and step come from the checkpoint, tensors from the template."""
    if kind == saved_kind:
        return loaded
    for part in _parts(loaded, state):
        groups, step = _settings_and_step(part, saved_kind)
        if kind == "distributed":
            part["optimizer"] = {"param_groups": [group | {"step": step} for group in groups]}
            part["param_state_sharding_type"] = "fully_reshardable"
            continue
        inner = part["optimizer"] if kind == "float16" else part
        own = [group["params"] for group in inner["param_groups"]]  # this rank's numbering, kept by the template
        inner["param_groups"] = [group | {"params": params} for group, params in zip(groups, own, strict=True)]
        inner["state"]["common_step"] = torch.tensor(step)
    return loaded


def _parts(loaded: dict[Any, Any], state: TrainState) -> list[dict[Any, Any]]:
    """The part of each optimizer that mcore chained (dense and expert parameters have one each)."""
    count = len(list(inner_optimizers(state.optimizer)))
    return [loaded] if count == 1 else [loaded[index] for index in range(count)]


def _settings_and_step(part: dict[Any, Any], saved_kind: str) -> tuple[list[dict[str, Any]], float]:
    holder = part if saved_kind == "fp32" else part["optimizer"]
    groups = copy.deepcopy(holder["param_groups"])
    if saved_kind == "distributed":
        return groups, float([group.pop("step") for group in groups][0])
    return groups, float(holder.get("state", {}).pop("common_step", 0.0))  # mcore leaves a step of 0 out


def load_optimizer(state: TrainState, loaded: dict[Any, Any], kind: str, saved_kind: str) -> None:
    """Load the optimizer's state; call it after the weights, without gradient tracking.

    Where mcore falls back to torch's Adam (no Transformer Engine, no apex), it needs what mcore 0.19 does not do. With
    the distributed optimizer: its "step" tensors must be out of the way while moments are copied, tensors must be copied
    without tracking, and afterwards every parameter must own its step. Otherwise: mcore leaves a step of 0 out.
    """
    for optimizer, part in zip(inner_optimizers(state.optimizer), _parts(loaded, state), strict=True):
        if "param_state" not in part:
            if is_torch_adam(optimizer.optimizer):
                (part["optimizer"] if kind == "float16" else part)["state"].setdefault("common_step", torch.tensor(0.0))
            optimizer.load_state_dict(part)
            continue
        if saved_kind == "fp32" != kind:  # the weights, just loaded, were the master weights
            weights = [weight for buffer in optimizer.buffers for weight in buffer.param_index_map]  # mcore's numbering
            for number, weight in enumerate(weights):
                part["param_state"][number]["param"] = weight.detach()
        settings = {key: value for key, value in part.items() if key != "param_state"}
        optimizer.load_state_dict(settings)
        adam_states = list(optimizer.optimizer.state.values())
        steps = [adam_state.pop("step", None) for adam_state in adam_states]
        optimizer.load_parameter_state_from_fully_reshardable(part["param_state"])  # pyright: ignore[reportAttributeAccessIssue]
        for adam_state, step in zip(adam_states, steps, strict=True):
            if step is not None:
                adam_state["step"] = step
    if saved_kind == "fp32" and kind == "float16":
        state.optimizer.reload_model_params()
    prepare_optimizer_state(state.optimizer)
