"""The optimizer's part of a checkpoint: mcore has three forms of it; here each loads from each, even with torch's Adam.

Forms (see `content.optimizer_kind`). In all three, moments lie under "optimizer.state.exp_avg.<weight>" and so on, and:

    fp32         DDP, fp32 weights: the weights are the master weights
    float16      DDP, bf16 or fp16 weights: master weights under "optimizer.state.fp32_param.<weight>"
    distributed  ZeRO-1: master weights under "optimizer.state.param.<weight>"

Settings (learning rate, betas, …) are not loaded: those of the optimizer at hand hold, and its schedule goes on from
the saved position. What is loaded beside the tensors is the number of steps and the loss scale.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from minloop.checkpoint import flat_ranges
from minloop.checkpoint.optimizer_steps import nothing_in_stubs, parts, steps_taken
from minloop.everyone import from_all_ranks
from minloop.layers.expert_products import are_joined
from minloop.master_weights import is_on_host
from minloop.optimizer import inner_optimizers, is_torch_adam, prepare_optimizer_state
from minloop.state import TrainState

MASTER_WEIGHT_PREFIX = {
    "fp32": "",
    "float16": "optimizer.state.fp32_param.",
    "distributed": "optimizer.state.param.",
}
BY_BUCKETS = "dp_reshardable"  # as mcore's distributed optimizer itself holds it: Megatron-LM's default


def adapt_template(template: dict[Any, Any], state: TrainState, kind: str, saved_kind: str) -> None:
    """Make a template of one form ask for the tensors where another form stored them, in place.

    Where the saved weights were themselves the master weights, nothing is asked for: `load_optimizer` copies them.
    """
    for _, part in parts(state, template):  # in lists of settings, saved and own ones would have to be of one length
        part.pop("param_groups", None)
        if isinstance(part.get("optimizer"), dict):
            part["optimizer"].pop("param_groups", None)
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


def adapt_weights(template: dict[Any, Any], kind: str, saved_kind: str) -> None:
    """Make fp32 weights, which are their own master weights, ask for saved master weights, in place."""
    prefix = MASTER_WEIGHT_PREFIX[saved_kind]

    def rename(leaf: Any) -> Any:
        trained = isinstance(leaf, ShardedTensor | ShardedTensorFactory) and getattr(leaf.data, "requires_grad", False)
        return replace(leaf, key=prefix + leaf.key) if trained else leaf

    if kind == "fp32" != saved_kind:
        dict_list_map_inplace(rename, template)


@contextlib.contextmanager
def mended_optimizers(state: TrainState, *, by_buckets: bool) -> Generator[float]:
    """While inside, mcore's distributed optimizers hand out each rank's own part of their state, in `flat_ranges`' way.

    mcore 0.19's gathers everything, and leaves out the padding between buckets (`get_parameter_state_dp_zero`), but
    then cuts parameters out by their places in the padded buffer (`sharded_param_state_fully_reshardable`): after the
    first padded bucket every saved moment and master weight would be another's. And of an optimizer without parameters
    on this rank (a pipeline stage without experts), its `state_dict` asserts that torch's Adam knows its step.

    Args:
        by_buckets: the state is stored by buckets, which only mcore's own way reads.
    Raises:
        ValueError: it is, and this model's parameters lie in another order; on all ranks, as some stages may have no
            experts.
    """
    if by_buckets and any(from_all_ranks(any(map(are_joined, state.chunks)), state.groups)):
        raise ValueError(
            "the checkpoint's optimizer state is stored by buckets (distrib_optim_sharding_type='dp_reshardable'), "
            "where weights of experts have another order than gradient_accumulation_fusion=True and "
            "moe_grouped_gemm=True give them here: set gradient_accumulation_fusion=False, or load with "
            "weights_only=True"
        )
    steps = steps_taken(state)
    with nothing_in_stubs(state), contextlib.ExitStack() as undo:
        for optimizer in inner_optimizers(state.optimizer):
            if not isinstance(optimizer, DistributedOptimizer):
                continue
            mended: dict[str, Callable[..., Any]] = {}
            if not by_buckets:
                mended["sharded_state_dict"] = functools.partial(flat_ranges.sharded_content, optimizer)
            if is_torch_adam(optimizer.optimizer) and not optimizer.optimizer.state:
                mended["state_dict"] = functools.partial(_settings, optimizer, steps)
            for name, method in mended.items():
                undo.callback(vars(optimizer).pop, name)
                vars(optimizer)[name] = method
        yield steps


def _settings(optimizer: DistributedOptimizer, step: float) -> dict[str, Any]:
    """What mcore's distributed optimizer saves beside tensors."""
    groups = _own_settings(optimizer.optimizer, step, "distributed")
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    scaler = {"grad_scaler": optimizer.grad_scaler.state_dict()} if optimizer.grad_scaler else {}
    return {"optimizer": {"param_groups": settings}} | scaler


def saved_progress(content: Any) -> dict[str, Any]:
    """Find, in whatever form and depth it was saved, the number of steps ("step") and the "grad_scaler", if any."""
    found: dict[str, Any] = {"step": 0.0}
    stack = [content]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for key in ("step", "common_step"):  # in settings by Transformer Engine and ZeRO-1; in the state by torch
                if key in node:
                    found["step"] = max(found["step"], float(node[key]))
            if "grad_scaler" in node:
                found["grad_scaler"] = node["grad_scaler"]
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return found


def load_optimizer(state: TrainState, loaded: dict[Any, Any], saved: Any, kind: str, saved_kind: str) -> None:
    """Load the optimizer's state; call it after the weights, without gradient tracking.

    Args:
        loaded: the tensors, in the form of `state`'s own optimizer.
        saved: the rest of the optimizer's saved content, in the form in which it was saved.
    """
    # by buckets, settings are no common content: each group of data parallel ranks has stored its own
    by_buckets = [part for _, part in parts(state, loaded) if part.get("param_state_sharding_type") == BY_BUCKETS]
    progress = saved_progress([saved, *({**part, "param_state": None} for part in by_buckets)])
    scaler = {key: value for key, value in progress.items() if key == "grad_scaler"}
    for optimizer, part in parts(state, loaded):
        if kind != "distributed" and not any(group["params"] for group in optimizer.param_groups):
            continue
        groups = _own_settings(optimizer.optimizer, progress["step"], kind)
        if kind == "distributed":
            _load_distributed(cast(DistributedOptimizer, optimizer), part, groups, scaler, saved_kind)
            continue
        inner: dict[str, Any] = {
            "state": (part["optimizer"] if kind == "float16" else part).get("state", {}),
            "param_groups": groups,
        }
        inner["state"].pop("common_step", None)
        if is_torch_adam(optimizer.optimizer):
            inner["state"]["common_step"] = torch.tensor(progress["step"])
        if kind == "float16":
            inner = {"optimizer": inner, "fp32_from_fp16_params": part["fp32_from_fp16_params"]} | scaler
        optimizer.load_state_dict(inner)
    if saved_kind == "fp32" and kind == "float16":
        state.optimizer.reload_model_params()
    fp8_weights = state.config.fp8_param
    if fp8_weights:  # the saved ones were rounded by the scales of the layout that saved them
        for optimizer, _ in parts(state, loaded):
            cast(Any, optimizer)._copy_main_params_to_model_params()
    aware = state.optimizer.config.use_precision_aware_optimizer  # whose halves of bf16 weights round up
    if kind == "distributed" and (fp8_weights or aware or not (state.config.bf16 or state.config.fp16)):
        # each rank's part of the weights is now that of the master weights, which may be finer than the saved weights
        for chunk in state.chunks:
            chunk.start_param_sync(force_sync=True)
    prepare_optimizer_state(state.optimizer)


def _own_settings(optimizer: torch.optim.Optimizer, step: float, kind: str) -> list[dict[str, Any]]:
    """This optimizer's parameter groups, with the step where its class keeps it."""
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    if is_torch_adam(optimizer):
        return [group | {"step": step} for group in groups] if kind == "distributed" else groups
    counts = step or isinstance(optimizer, HybridDeviceOptimizer)  # which mcore has let take a step, to make its state
    return [group | {"step": int(step)} if counts or "step" in group else group for group in groups]


def _load_distributed(
    optimizer: DistributedOptimizer,
    part: dict[str, Any],
    groups: list[dict[str, Any]],
    scaler: dict[str, Any],
    saved_kind: str,
) -> None:
    """Load into mcore's distributed optimizer.

    Torch's Adam inside it (no Transformer Engine, no apex) needs what mcore 0.19 does not do: its "step" tensors must
    be out of the way while moments are copied, nothing may be tracked, and afterwards every parameter must own its
    step, which is the work of `prepare_optimizer_state`.
    """
    optimizer.load_state_dict({"optimizer": {"param_groups": groups}} | scaler)
    adam_states = list(optimizer.optimizer.state.values())
    steps = [adam_state.pop("step", None) for adam_state in adam_states]
    tensors: dict[Any, Any] = part.get("param_state", {})
    if part.get("param_state_sharding_type") == BY_BUCKETS:
        optimizer.load_parameter_state_from_dp_reshardable(tensors)
    else:
        flat_ranges.load_state(optimizer, tensors, from_weights=saved_kind == "fp32")
    for adam_state, step in zip(adam_states, steps, strict=True):
        if step is not None:
            adam_state["step"] = step
    if is_on_host(optimizer):  # whose parts count on by themselves, but for this
        for group in optimizer.optimizer.param_groups:
            group.pop("step", None)
