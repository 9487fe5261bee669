"""Loading a checkpoint into a training state of whatever layout."""

from pathlib import Path
from typing import Any, Literal, cast, overload

import torch

from minloop.checkpoint import content, fully_sharded_state, megatron_lm
from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.directory import holds_one_for_all, open_checkpoint
from minloop.checkpoint.extra_state import is_extra_state, letting_checked_states_in
from minloop.checkpoint.fully_sharded_state import is_fully_sharded
from minloop.checkpoint.loaders import Loaders, check_loaders, named_loaders, positioned, say_not_positioned
from minloop.checkpoint.optimizer_state import BY_BUCKETS, adapt_template, adapt_weights, load_optimizer
from minloop.checkpoint.reading import CheckpointError, SavedCheckpoint
from minloop.checkpoint.records import wrong_progress
from minloop.checkpoint.run_config import differing_fields, say_other_settings
from minloop.checkpoint.tensors import read_tensors
from minloop.data_parallel import gathered_parameters, take_over_weights
from minloop.groups import as_the_world
from minloop.messages import say_once
from minloop.state import TrainState, require_between_steps, require_optimizer


@overload
def load_checkpoint(
    checkpoint: str | Path,
    state: TrainState,
    loader: Loaders = None,
    *,
    weights_only: bool = False,
    verify: bool | None = None,
    missing_ok: Literal[False] = False,
) -> Path: ...


@overload
def load_checkpoint(
    checkpoint: str | Path,
    state: TrainState,
    loader: Loaders = None,
    *,
    weights_only: bool = False,
    verify: bool | None = None,
    missing_ok: bool,
) -> Path | None: ...


def load_checkpoint(
    checkpoint: str | Path,
    state: TrainState,
    loader: Loaders = None,
    *,
    weights_only: bool = False,
    verify: bool | None = None,
    missing_ok: bool = False,
) -> Path | None:
    """Restore weights, optimizer, schedule, counters, random streams and data position, whatever the layout of `state`.

    Every rank calls it, between steps. Layout, data parallelism (DDP, ZeRO-1, Megatron FSDP, torch FSDP2) and number of
    ranks may differ from those saved. Learning rate, schedule and other settings are those of `state`, what
    differs is said; the schedule goes on from the saved position: to extend a run build a longer one. Random streams
    belong to a layout: in another one they are left as they are, which is said once if dropout would draw from them.

    What is wrong with a checkpoint is raised on every rank, and before `state` is touched, but for contents that were
    not verified. Nothing that the files hold is executed: folders of strangers can be loaded.

    Args:
        checkpoint: a checkpoint's directory, or the directory of a run's checkpoints: then the newest complete one, or,
            if that is damaged, the one before it, which is said.
        loader: the loader or loaders to position, as in `save_checkpoint`.
        weights_only: load nothing else, to begin another training; of weights that fit in part see `load_weights`.
        verify: read all files and compare their contents before anything is loaded: True always, None those whose
            digests were saved, False none. Names and sizes are compared in any case.
        missing_ok: load nothing if a run's directory holds no complete checkpoint yet, as on its first start. All ranks
            do what the first one sees, where each asking `latest_checkpoint` may see something else. A checkpoint of
            another format, or a tracker of which no checkpoint is left, is an error all the same.
    Returns:
        The directory loaded; None if there is none.
    Raises:
        FileNotFoundError: no complete checkpoint there.
        CheckpointError: a file is damaged, of another format (the message says what reads it), or holds more than plain
            data; or none is left of the checkpoints that the tracker names.
        ValueError: the checkpoint is of another architecture, lacks tensors of this state, holds LoRA's adapters that
            it lacks, or no position of a loader, or one in other data; the message names the fields.
    """
    (require_between_steps if weights_only else require_optimizer)(state)
    with as_the_world(state.groups):
        if missing_ok and not holds_one_for_all(checkpoint):
            return None
        opened, loaders = open_checkpoint(checkpoint, verify), named_loaders(loader)
        saved: dict[str, Any] = {}
        with agreed():
            saved = opened.common.get("minloop") or megatron_lm.record(opened, state)
            _check_architecture(opened.path, saved, state)
            if not weights_only:
                _check_counters(opened, saved)
                check_loaders(saved, loaders)
        with positioned(opened.path, saved, {} if weights_only else loaders):
            _load(opened, saved, state, weights_only)
        if not weights_only:
            say_not_positioned(opened.path, saved, loaders)
        return opened.path


def _load(opened: SavedCheckpoint, saved: dict[str, Any], state: TrainState, weights_only: bool) -> None:
    """Load all but the positions of loaders."""
    kind = content.optimizer_kind(state)
    saved_kind: str = saved.get("optimizer_kind", kind)
    if is_fully_sharded(state):
        _load_fully_sharded(opened, saved, state, None if weights_only else saved_kind)
        return
    with gathered_parameters(state.chunks), torch.no_grad():
        template = _template(opened, saved, state, None if weights_only else (kind, saved_kind))
        loaded = _read(opened, template, state)
        put_into_models(state, loaded)
        if weights_only:
            take_over_weights(state.chunks, state.optimizer)
        else:
            load_optimizer(state, loaded["optimizer"], opened.common.get("optimizer"), kind, saved_kind)
    if not weights_only:
        with agreed():
            _restore_rest(opened, state, loaded, saved)


def _load_fully_sharded(
    opened: SavedCheckpoint, saved: dict[str, Any], state: TrainState, saved_kind: str | None
) -> None:
    metadata, known = content.save_metadata(state), opened.metadata.state_dict_metadata
    template = fully_sharded_state.template(state, metadata, saved_kind, known)
    loaded = _read(opened, template | (_random_streams(saved, state) if saved_kind else {}), state)
    fully_sharded_state.take_over(state, loaded)
    if saved_kind is not None:
        fully_sharded_state.set_step(state, opened.common.get("optimizer"))
        with agreed():
            _restore_rest(opened, state, loaded, saved)


def content_metadata(opened: SavedCheckpoint, state: TrainState) -> dict[str, Any]:
    """mcore's switches for the form in which the checkpoint was saved."""
    return opened.common.get("content_metadata") or content.save_metadata(state)


def put_into_models(state: TrainState, loaded: dict[str, Any]) -> None:
    """Hand each chunk its part of what was read; every rank calls it."""
    with agreed(), letting_checked_states_in():
        for key, model in zip(content.model_keys(state), content.unwrapped_models(state), strict=True):
            missing, unexpected = model.load_state_dict(loaded[key], strict=False)
            wrong = [name for name in [*missing, *unexpected] if not is_extra_state(name)]
            if wrong:
                raise ValueError(f"the checkpoint's weights do not match the model at: {', '.join(wrong[:5])}")


def architecture_differences(saved: dict[str, Any], state: TrainState) -> list[str]:
    """Each field that decides shape or meaning of the weights and differs: "hidden_size: 32 saved, 64 here"."""
    theirs, ours = saved.get("architecture", {}), content.architecture(state)
    return [
        f"{name}: {theirs[name]} saved, {ours[name]} here"
        for name in ours
        if theirs.get(name, ours[name]) != ours[name]
    ]


def _template(
    opened: SavedCheckpoint, saved: dict[str, Any], state: TrainState, optimizer_kinds: tuple[str, str] | None
) -> dict[str, Any]:
    """What to read: the weights and, given the optimizer's forms here and as saved, its state and random streams."""
    metadata = content_metadata(opened, state)
    template = content.model_state(state, metadata)
    if optimizer_kinds is not None:
        own = metadata | content.save_metadata(state)
        if optimizer_kinds == ("distributed", "distributed") and _is_by_buckets(metadata):
            own["distrib_optim_sharding_type"] = BY_BUCKETS
        template["optimizer"] = content.optimizer_state(state, dict(template), own, is_loading=True)
        adapt_template(template["optimizer"], state, *optimizer_kinds)
        for key in content.model_keys(state):
            adapt_weights(template[key], *optimizer_kinds)
        template |= _random_streams(saved, state)
    return template


def _random_streams(saved: dict[str, Any], state: TrainState) -> dict[str, Any]:
    if saved.get("layout") != content.layout(state):
        return {}
    return {"rng_state": (megatron_lm if "of_megatron_lm" in saved else content).rng_state(state)}


def _read(opened: SavedCheckpoint, template: dict[str, Any], state: TrainState) -> dict[str, Any]:
    try:
        return read_tensors(opened, template, replicas=state.groups.dp_cp)
    except ValueError as error:
        if fields := differing_fields(opened.path, state.config):
            raise ValueError(f"{error}. The configs differ in {'; '.join(fields)}") from error
        if "optimizer" not in template or not _is_by_buckets(opened.common.get("content_metadata") or {}):
            raise
        raise ValueError(
            f"{error}. Its optimizer state is stored by buckets (distrib_optim_sharding_type='dp_reshardable'): only a "
            "distributed optimizer of the same tensor and pipeline parallel sizes, bucket_size and overlap_grad_reduce "
            "can take it. Build the state so, save it from Megatron-LM with --dist-ckpt-optim-fully-reshardable, or "
            "load with weights_only=True"
        ) from error


def _is_by_buckets(metadata: dict[str, Any]) -> bool:
    return metadata.get("distrib_optim_sharding_type") == BY_BUCKETS


def _check_counters(opened: SavedCheckpoint, saved: dict[str, Any]) -> None:
    if not isinstance(opened.common.get("iteration"), int):
        raise CheckpointError(
            f"{opened.path} holds no iteration: nothing could go on from it; load it with weights_only=True"
        )
    counters = {"iteration": opened.common["iteration"]}
    counters |= {name: saved.get(name, 0) for name in content.COUNTERS}
    for name, value in counters.items():
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{opened.path} holds {name}={value!r}, no count; load it with weights_only=True")
    if wrong := [*wrong_progress(opened.common)]:
        raise CheckpointError(f"{opened.path} is damaged: {'; '.join(wrong[:5])}; load it with weights_only=True")


def _check_architecture(source: Path, saved: dict[str, Any], state: TrainState) -> None:
    if differing := architecture_differences(saved, state):
        raise ValueError(
            f"{source} is of another architecture ({'; '.join(differing)}): build the model it was saved from, or load "
            "what fits with load_weights"
        )


def _restore_rest(opened: SavedCheckpoint, state: TrainState, loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    state.iteration, state.last_update, state.is_torn = loaded["iteration"], (), False
    for name in content.COUNTERS:
        setattr(state, name, saved.get(name, 0))
    if state.scheduler is not None:
        state.scheduler.num_steps = 0  # from where it is mcore would go on, also in a run that goes back
    if state.scheduler is not None and "opt_param_scheduler" in loaded:
        state.scheduler.load_state_dict(state.scheduler.state_dict() | loaded["opt_param_scheduler"])
    elif state.scheduler is not None:  # saved without a schedule: go to where this one would be by now
        state.scheduler.step(increment=state.consumed_samples)
    say_other_settings(opened, state)
    streams = loaded.get("rng_state")
    if isinstance(streams, list):
        streams = megatron_lm.own_streams(cast("list[dict[str, Any]]", streams), state)
    if streams is not None and content.are_of_this_device(streams):
        content.restore_rng_state(streams)
    elif state.config.hidden_dropout or state.config.attention_dropout:
        other = f"saved in layout {saved.get('layout')}, loaded in {content.layout(state)}"
        other = other if streams is None else "saved on another kind of device, a GPU's are not a CPU's"
        say_once(f"the random streams were not carried over: {other}; dropout will draw other masks")
