"""The optimizer's part of a checkpoint: mcore has three forms of it; here each loads from each, even with torch's Adam.

Forms (see `content.optimizer_kind`). In all three, moments lie under "optimizer.state.exp_avg.<weight>" and so on, and:

    fp32         DDP, fp32 weights: the weights are the master weights
    float16      DDP, bf16 or fp16 weights: master weights under "optimizer.state.fp32_param.<weight>"
    distributed  ZeRO-1: master weights under "optimizer.state.param.<weight>"
"""

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from minloop.optimizer import inner_optimizers, is_torch_adam, prepare_optimizer_state
from minloop.state import TrainState

MASTER_WEIGHT_PREFIX = {
    "fp32": "",
    "float16": "optimizer.state.fp32_param.",
    "distributed": "optimizer.state.param.",
}


def adapt_template(template: dict[str, Any], kind: str, saved_kind: str) -> None:
    """Make the template of one form ask for the master weights where another form stored them, in place.

    Where the saved weights were themselves the master weights, nothing is asked for: `load_optimizer` copies them.
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


def load_optimizer(state: TrainState, loaded: dict[Any, Any], kind: str, saved_kind: str) -> None:
    """Load the optimizer's state from any form; call it after the weights, without gradient tracking."""
    optimizers = list(inner_optimizers(state.optimizer))
    parts = [loaded] if len(optimizers) == 1 else [loaded[index] for index in range(len(optimizers))]
    for optimizer, part in zip(optimizers, parts, strict=True):
        groups, step = _settings_and_step(part, saved_kind)
        groups = _settings_for(optimizer.optimizer, groups, step, kind)
        if kind == "distributed":
            _load_distributed(cast(DistributedOptimizer, optimizer), part, groups, saved_kind)
            continue
        inner = part["optimizer"] if kind == "float16" else part
        own = [group["params"] for group in inner["param_groups"]]  # this rank's numbering, kept by the template
        inner["param_groups"] = [group | {"params": params} for group, params in zip(groups, own, strict=True)]
        if is_torch_adam(optimizer.optimizer):
            inner["state"]["common_step"] = torch.tensor(step)
        optimizer.load_state_dict(part)
    if saved_kind == "fp32" and kind == "float16":
        state.optimizer.reload_model_params()
    prepare_optimizer_state(state.optimizer)


def _settings_and_step(part: dict[Any, Any], saved_kind: str) -> tuple[list[dict[str, Any]], float]:
    """The saved parameter groups and the number of steps, taken out of `part` from wherever that form has them."""
    holder = part if saved_kind == "fp32" else part["optimizer"]
    groups = copy.deepcopy(holder["param_groups"])
    in_groups = [group.pop("step", 0) for group in groups]  # Transformer Engine's Adam; any distributed optimizer
    in_state = holder.get("state", {}).pop("common_step", 0)  # torch's Adam; mcore leaves a step of 0 out
    return groups, float(max(*in_groups, in_state))


def _settings_for(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], step: float, kind: str
) -> list[dict[str, Any]]:
    """Saved settings under the keys that this optimizer's class has: torch's Adam and Transformer Engine's differ."""
    own = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "step")}
    fitting = [own | {key: value for key, value in group.items() if key in own} for group in groups]
    if is_torch_adam(optimizer):
        return [group | {"step": step} for group in fitting] if kind == "distributed" else fitting
    return [group | {"step": int(step)} for group in fitting] if step else fitting


def _load_distributed(
    optimizer: DistributedOptimizer, part: dict[Any, Any], groups: list[dict[str, Any]], saved_kind: str
) -> None:
    """Load into mcore's distributed optimizer.

    Torch's Adam inside it (no Transformer Engine, no apex) needs what mcore 0.19 does not do: its "step" tensors must
    be out of the way while moments are copied, nothing may be tracked, and afterwards every parameter must own its
    step, which is the work of `prepare_optimizer_state`.
    """
    tensors = part["param_state"]
    if saved_kind == "fp32":  # the weights, just loaded, were the master weights
        weights = [weight for buffer in optimizer.buffers for weight in buffer.param_index_map]  # mcore's numbering
        for number, weight in enumerate(weights):
            tensors[number]["param"] = weight.detach()
    settings = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    scaler = {key: part[key] for key in ("grad_scaler",) if key in part}
    optimizer.load_state_dict(settings | scaler)
    adam_states = list(optimizer.optimizer.state.values())
    steps = [adam_state.pop("step", None) for adam_state in adam_states]
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for adam_state, step in zip(adam_states, steps, strict=True):
        if step is not None:
            adam_state["step"] = step
