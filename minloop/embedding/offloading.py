"""Memory given back to the device while something else runs there, and taken again, bit for bit.

What is moved is the storage under the tensors, not the tensors: views into DDP's buffers, shards of the distributed
optimizer and gradients are views of the same memory when it is there again.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from minloop.data_parallel import reduced_gradients
from minloop.fully_sharded import refuse_fully_sharded
from minloop.optimizer import inner_optimizers
from minloop.state import TrainState, require_idle

ALL = ("weights", "gradients", "optimizer")


def offload(state: TrainState, kinds: Collection[str] = ALL) -> None:
    """Move weights, gradients and optimizer state to host memory, and give their device memory back.

    Host memory is pinned on a GPU. What is off already stays off. Until `onload` the state cannot train or be saved,
    nor be evaluated without its weights: that is refused by name, but a host that reads a weight itself reads nothing.

    Args:
        kinds: of "weights" (with the models' buffers), "gradients" and "optimizer" (its state and master weights).
            fp32 master weights that are the weights themselves, or shards of them, go with the weights.
    Raises:
        ValueError: an unknown kind; a fully sharded model; weights kept in FP8; CUDA graphs and buffers registered
            with NCCL (`nccl_ub`), which remember where memory was.
        RuntimeError: a step in parts is under way, or a stream of the weights open.
    """
    _check(state, kinds, "offload")
    _wait()  # streams of communication, too, may be at work on it
    for kind, storages in _storages(state).items():
        if kind in kinds and kind not in state.offloaded:
            state.offloaded[kind] = [(storage, _to_host(storage)) for storage in storages]
            _wait()
            for storage in storages:
                storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def onload(state: TrainState, kinds: Collection[str] = ALL) -> None:
    """Take back what `offload` moved, as it was; what is there already stays as it is.

    Raises:
        ValueError: an unknown kind.
    """
    _check(state, kinds, "onload")
    for kind in kinds:
        for storage, host in state.offloaded.pop(kind, []):
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
    _wait()  # before the host's copies are gone


def _check(state: TrainState, kinds: Collection[str], caller: str) -> None:
    if isinstance(kinds, str):
        raise ValueError(f"kinds={kinds!r} is one string: give a list, [{kinds!r}]")
    if unknown := sorted(set(kinds) - set(ALL)):
        raise ValueError(f"unknown kinds {', '.join(unknown)}: use some of {', '.join(ALL)}")
    refuse_fully_sharded(state.chunks, f"{caller}:")
    if state.config.fp8_param or state.config.cuda_graph_impl != "none":
        raise ValueError(
            f"fp8_param={state.config.fp8_param} and cuda_graph_impl={state.config.cuda_graph_impl!r}: weights kept in "
            "FP8 have no storage of their own, and graphs remember where memory was; offload needs False and 'none'"
        )
    if state.chunks[0].ddp_config.nccl_ub:
        raise ValueError("nccl_ub=True: NCCL keeps the buffers' addresses, and offload takes them away; it needs False")
    require_idle(state)


def _storages(state: TrainState) -> dict[str, list[torch.UntypedStorage]]:
    """The device memory of each kind; memory that several share goes with the first."""
    device = next(parameter for chunk in state.chunks for parameter in chunk.parameters()).device.type
    seen: set[int] = set()
    found: dict[str, list[torch.UntypedStorage]] = {}
    for kind, tensors in (("weights", _weights), ("gradients", _gradients), ("optimizer", _optimizer_tensors)):
        found[kind] = []
        for tensor in tensors(state):
            storage: Any = tensor.untyped_storage()
            key = storage._cdata  # its identity, as memory that is off has no address
            if storage.device.type == device and key not in seen:
                seen.add(key)
                found[kind].append(storage)
    return found


def _weights(state: TrainState) -> Iterator[torch.Tensor]:
    for chunk in state.chunks:
        yield from chunk.parameters()
        yield from chunk.module.buffers()  # DDP's own `buffers` are those of gradients


def _gradients(state: TrainState) -> Iterator[torch.Tensor]:
    yield from reduced_gradients(state.chunks)


def _optimizer_tensors(state: TrainState) -> Iterator[torch.Tensor]:
    for one in inner_optimizers(state.optimizer):
        inner: Any = one.optimizer
        for group in inner.param_groups:
            yield from group["params"]
        for values in inner.state.values():
            held = (value for value in values.values() if isinstance(value, torch.Tensor))
            yield from (getattr(value, "_data", value) for value in held)  # moments in FP8 have no storage of their own


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())
    return host.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
