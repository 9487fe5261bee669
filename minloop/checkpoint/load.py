"""Loading a checkpoint into a training state of whatever layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.validation import StrictHandling

from minloop.checkpoint import content, directory
from minloop.checkpoint.optimizer_state import adapt_template, adapt_weights, load_optimizer
from minloop.checkpoint.save import Loaders, Positioned, named_loaders
from minloop.data_parallel import gathered_parameters
from minloop.messages import say_once, without_warnings
from minloop.state import TrainState


def load_checkpoint(
    checkpoint: str | Path, state: TrainState, loader: Loaders = None, *, weights_only: bool = False
) -> Path:
    """Restore weights, optimizer, schedule, counters, random streams and data position, whatever the layout of `state`.

    Every rank calls it. The layout, the kind of data parallelism (DDP or ZeRO-1) and the number of ranks may differ
    from those saved. Learning rate, schedule and other settings are those of `state`; the schedule goes on from the
    saved position, so that a run is extended by building a longer one. Random streams belong to a layout: in another
    one they are left as they are, which is said once if there is dropout to draw from them.

    Args:
        checkpoint: a checkpoint's directory, or the directory of a run's checkpoints: then the newest complete one.
        loader: the loader or loaders to position, as in `save_checkpoint`.
        weights_only: load the weights and nothing else, to begin another training from them; counters stay at zero.
    Returns:
        The directory loaded.
    Raises:
        FileNotFoundError: no complete checkpoint there.
        ValueError: the checkpoint is of another architecture, lacks tensors of this state, or holds no position of a
            loader, or one in other data; the message names the fields.
    """
    source = directory.resolve(checkpoint)
    with without_warnings():
        common = load_common_state_dict(source)
    saved: dict[str, Any] = common.get("minloop", {})
    _check_architecture(source, saved, state)
    if not weights_only:
        _position_loaders(saved, named_loaders(loader))
    metadata: dict[str, Any] = common.get("content_metadata") or content.save_metadata(state)
    kind = content.optimizer_kind(state)
    saved_kind: str = saved.get("optimizer_kind", kind)
    with gathered_parameters(state.chunks), torch.no_grad():
        optimizer_kinds = None if weights_only else (kind, saved_kind)
        loaded = _load_sharded(source, state, saved, metadata, optimizer_kinds)
        for key, model in zip(content.model_keys(state), content.unwrapped_models(state), strict=True):
            _load_model(model, loaded[key])
        if weights_only:
            state.optimizer.reload_model_params()
        else:
            load_optimizer(state, loaded["optimizer"], common.get("optimizer"), kind, saved_kind)
    if not weights_only:
        _restore_the_rest(state, loaded, saved)
    return source


def _load_sharded(
    source: Path,
    state: TrainState,
    saved: dict[str, Any],
    metadata: dict[str, Any],
    optimizer_kinds: tuple[str, str] | None,
) -> dict[str, Any]:
    """Load the weights and, given the optimizer's forms here and as saved, its state and the random streams."""
    template = content.model_state(state, metadata)
    if optimizer_kinds is not None:
        own = metadata | content.save_metadata(state)
        template["optimizer"] = content.optimizer_state(state, dict(template), own, is_loading=True)
        adapt_template(template["optimizer"], state, *optimizer_kinds)
        for key in content.model_keys(state):
            adapt_weights(template[key], *optimizer_kinds)
        if saved.get("layout") == content.layout(state):
            template["rng_state"] = content.rng_state(state)
    with without_warnings():
        # mcore calls "unexpected" what is asked for and not in the checkpoint
        answer = dist_checkpointing.load(template, str(source), strict=StrictHandling.RETURN_ALL)
    loaded, _, lacking = cast("tuple[dict[str, Any], set[str], set[str]]", answer)
    # Layers' extra state (Transformer Engine's scaling factors) exists only where such layers saved it.
    if lacking := sorted(key for key in lacking if "_extra_state" not in key):
        raise ValueError(f"{source} lacks {len(lacking)} tensors that this state has: {', '.join(lacking[:5])}, …")
    return loaded


def _load_model(model: torch.nn.Module, tensors: dict[str, Any]) -> None:
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    wrong = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    if wrong:
        raise ValueError(f"the checkpoint's weights do not match the model at: {', '.join(wrong[:5])}")


def _check_architecture(source: Path, saved: dict[str, Any], state: TrainState) -> None:
    theirs, ours = saved.get("architecture", {}), content.architecture(state)
    differing = [
        f"{name}: {theirs[name]} saved, {ours[name]} here"
        for name in ours
        if theirs.get(name, ours[name]) != ours[name]
    ]
    if differing:
        raise ValueError(
            f"{source} is of another architecture ({'; '.join(differing)}): build the model it was saved from"
        )


def _position_loaders(saved: dict[str, Any], loaders: Mapping[str, Positioned]) -> None:
    positions = saved.get("loaders", {})
    for name in loaders:
        if name not in positions:
            raise ValueError(
                f"the checkpoint holds no position of a loader called {name!r}, only of {sorted(positions)}"
            )
    for name, loader in loaders.items():
        loader.load_state_dict(positions[name])


def _restore_the_rest(state: TrainState, loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    state.iteration = loaded["iteration"]
    state.consumed_samples = saved.get("consumed_samples", 0)
    state.skipped_iterations = saved.get("skipped_iterations", 0)
    if state.scheduler is not None and "opt_param_scheduler" in loaded:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    elif state.scheduler is not None:  # saved without a schedule: go to where this one would be by now
        state.scheduler.step(increment=state.consumed_samples)
    if "rng_state" in loaded:
        content.restore_rng_state(loaded["rng_state"])
    elif state.config.hidden_dropout or state.config.attention_dropout:
        say_once(
            f"the random streams were not carried over: saved in layout {saved.get('layout')}, loaded in "
            f"{content.layout(state)}; dropout will draw other masks"
        )
