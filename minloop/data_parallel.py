"""Data parallelism: mcore's DDP and ZeRO-1 around the chunks, and the hooks by which mcore's schedules drive them."""

import contextlib
import copy
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config

from minloop.advice import say_choices
from minloop.checks import HOOKS, check_ddp_config
from minloop.cuda_graph import on_capture_stream
from minloop.first_gradients import complete_gradients, overwrite_first_gradients
from minloop.fsdp_checks import check_not_fsdp
from minloop.fully_sharded import FullySharded, keep_weights, local_gradients, unsharded
from minloop.layers.expert_products import spare_gradients
from minloop.master_weights import follow_weights
from minloop.messages import without_log_lines
from minloop.wrapping_checks import check_gradients, check_wrapping

_read: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_ended: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""Chunks inside `gathered_parameters`, and those whose training `end_training` ended."""


def wrap_ddp(
    chunks: Sequence[MegatronModule], ddp_config: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> list[DistributedDataParallel]:
    """Wrap each chunk in mcore's DDP (with `use_distributed_optimizer`: ZeRO-1).

    All data parallel ranks get the weights of their group's first; not with fp8_param, where their seeds alone make
    them alike.
    Gradients then live in ``parameter.main_grad``; ``parameter.grad`` stays None, so that a plain torch optimizer does
    nothing: use `build_optimizer`.

    Raises:
        ValueError: options that exclude each other, see `build_ddp_config`, or that only `wrap_fsdp` reads; chunks or
            groups that do not go with them, see `minloop.wrapping_checks`.
    """
    config = get_model_config(chunks[0])
    check_not_fsdp(ddp_config)
    check_ddp_config(config, ddp_config)
    check_wrapping(chunks, ddp_config, groups)
    say_choices(config, ddp_config, groups.dp_cp.size())
    ddp_config = copy.copy(ddp_config)  # DDP writes the bucket size it chose into it
    # A CUDA graph cannot capture what autograd remembers to run on the default stream.
    capture = config.cuda_graph_impl == "full_iteration" and torch.cuda.is_available()
    wrapped: list[DistributedDataParallel] = []
    for index, chunk in enumerate(chunks):
        with (
            on_capture_stream() if capture else contextlib.nullcontext(),
            without_log_lines("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),
        ):
            ddp = DistributedDataParallel(
                config=get_model_config(chunk),
                ddp_config=ddp_config,
                module=chunk,
                # Only the first chunk's reduction can hide behind other chunks' backward passes bucket by bucket.
                disable_bucketing=index > 0,
                pg_collection=groups,
            )
        spare_gradients(ddp)
        overwrite_first_gradients(ddp, config)
        if not config.fp8_param:  # a collective knows plain tensors only; ZeRO-1 gathers these from the first step on
            ddp.broadcast_params()
        wrapped.append(ddp)
    return wrapped


def bind_hooks(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> None:
    """Set, on the config that the chunks share, every hook that mcore's schedules call, and skip in silence when unset.

    Raises:
        RuntimeError: the chunks do not share one config, or hooks are bound already (two states on one model).
    """
    config: Any = get_model_config(chunks[0])
    if any(get_model_config(chunk) is not config for chunk in chunks):
        raise RuntimeError("the chunks hold different config objects: build them with one build_model call")
    bound = [name for name in HOOKS if getattr(config, name) is not None and name != "timers"]
    if bound:
        raise RuntimeError(
            f"the model's config already carries {', '.join(bound)}: another TrainState or a host owns this model; "
            "build another model, or set these fields to None"
        )
    ddp_config = chunks[0].ddp_config

    def per_chunk(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]  # what mcore's schedules expect

    # An fp32 model's optimizer holds views of the weights, whose graph leads to DDP's hooks: held here, too, it would
    # close a circle that the garbage collector cannot see.
    own = weakref.ref(optimizer)

    def scale_loss(loss: torch.Tensor) -> torch.Tensor:
        optimizer: Any = own()
        return optimizer.scale_loss(loss)

    config.grad_scale_func = scale_loss
    config.finalize_model_grads_func = _finalize
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = per_chunk([chunk.no_sync for chunk in chunks])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = per_chunk([chunk.start_param_sync for chunk in chunks])


def _finalize(chunks: list[Any], *args: Any, **options: Any) -> None:
    check_gradients(chunks)
    complete_gradients(chunks)
    finalize_model_grads(chunks, *args, **options)


@contextlib.contextmanager
def gathered_parameters(chunks: Sequence[torch.nn.Module], *, whole: bool = True) -> Generator[None]:
    """While inside, every rank's parameters are those after the last optimizer step, and no gather hooks are in place.

    With `overlap_param_gather` they otherwise arrive only as the next training forward pass needs them: reading them
    for evaluation or a checkpoint would see stale values. Fully sharded models hold plain tensors in full meanwhile.

    Args:
        whole: False leaves fully sharded models as they are: forward passes gather in them by themselves.
    Raises:
        RuntimeError: another such block, or a stream of the weights, is open; `offload` moved the weights. Nothing has
            changed then, nor if the gathering fails.
    """
    require_unread(chunks)
    if any(_is_off(chunk) for chunk in chunks):
        raise RuntimeError("weights of this model are in host memory: call onload(state) first")
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            _read.add(chunk)
            stack.callback(_read.discard, chunk)
        hooked: list[Any] = [chunk for chunk in chunks if getattr(chunk, "use_forward_hook", False)]
        for chunk in hooked:
            stack.callback(_put_hooks, chunk)
            chunk.disable_forward_pre_hook(param_sync=True)
        for chunk in chunks if whole else ():
            if isinstance(chunk, FullySharded):
                stack.enter_context(unsharded(chunk))
        yield


def require_unread(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise RuntimeError inside `gathered_parameters`: a step would train without the hooks that gather weights."""
    if any(chunk in _read for chunk in chunks):
        raise RuntimeError(
            "a stream of this model's weights is open, or a block of gathered_parameters: finish or close it first"
        )


def _is_off(chunk: torch.nn.Module) -> bool:
    if not isinstance(chunk, DistributedDataParallel):  # FSDP frees storages, too
        return False
    plain = (p for p in chunk.parameters() if type(p) is torch.nn.Parameter)  # FP8's have no storage of their own
    return any(p.numel() > 0 and p.untyped_storage().nbytes() == 0 for p in plain)


def _put_hooks(chunk: Any) -> None:
    """Put the gather hooks back, also where an error stopped mcore from taking off all of them."""
    for handle in chunk.remove_forward_pre_hook_handles.values():
        handle.remove()
    chunk.remove_forward_pre_hook_handles.clear()
    chunk.enable_forward_pre_hook()


def end_training(chunks: Sequence[torch.nn.Module], reason: str) -> None:
    """Have `require_trainable` refuse these chunks with `reason`: what their optimizer updates is no longer in them."""
    _ended.update(dict.fromkeys(chunks, reason))


def require_trainable(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise RuntimeError after `end_training`."""
    for chunk in chunks:
        if chunk in _ended:
            raise RuntimeError(_ended[chunk])


def take_over_weights(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Inside `gathered_parameters`: let shards and the optimizer's master weights follow weights written by hand."""
    for chunk in chunks:
        if isinstance(chunk, FullySharded):
            keep_weights(chunk)
    if not getattr(getattr(chunks[0], "ddp_config", None), "use_megatron_fsdp", False):
        optimizer.reload_model_params()
    follow_weights(optimizer)


def named_gradients(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds of each trainable parameter's gradient, once gradients are reduced."""
    if isinstance(chunk, FullySharded):
        yield from local_gradients(chunk)
        return
    for name, parameter in chunk.module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.main_grad


def reduced_gradients(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """All that this rank holds of the gradients, once they are reduced: buffers of DDP, shards of FSDP."""
    gradients: list[torch.Tensor] = []
    for chunk in chunks:
        if isinstance(chunk, FullySharded):
            gradients += [gradient for _, gradient in local_gradients(chunk)]
        else:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                gradients += [buffer.grad_data, *buffer.extra_main_grads]
    return gradients
