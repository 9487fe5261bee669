"""Process groups and seeds: the default group, mcore's groups, each rank's random streams; and their end."""

import contextlib
import gc
import inspect
import os
import socket
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from torch.distributed.distributed_c10d import PrefixStore

from minloop.alive import destroyed_by
from minloop.checks import check_config, wrong_apex
from minloop.cpu import cpu_backend
from minloop.determinism import check_deterministic_environment, deterministic_algorithms
from minloop.engine import broken_engine
from minloop.fsdp_checks import check_instances
from minloop.init_checks import DEFAULT_ORDER, FIELDS, check_mcore_options, check_world_size
from minloop.launch import claim_gpu, find_launch, meet
from minloop.messages import say_once
from minloop.traces import forget_fp8_scales

timeouts: WeakKeyDictionary[Any, timedelta] = WeakKeyDictionary()
"""Default group → how long its collectives wait, for groups that are made later."""

created = contextlib.ExitStack()
"""How to take back what `init_distributed` created: one per process, as are the default group and mcore's groups."""

made_with: dict[str, Any] = {}
"""The arguments by which `init_distributed` made mcore's groups; empty while there are none, or those of a host."""


def init_distributed(
    config: TransformerConfig,
    *,
    seed: int,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    data_parallel_random_init: bool = False,
    **mcore_options: Any,
) -> ProcessGroupCollection:
    """Initialise the default process group, mcore's process groups and the random streams of this rank.

    A default group that a host made is reused. Otherwise torchrun's environment is read (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR, MASTER_PORT), or else that of Slurm's srun; without either this is one process. Without a GPU the CPU
    backend is switched on and ranks talk through gloo, see `minloop.cpu_backend`. With ``config.deterministic_mode``
    torch uses deterministic algorithms in this whole process until `shutdown_distributed`.

    Args:
        config: its parallel sizes decide the groups; the data parallel size is what remains of the world.
        seed: seed of weights and dropout; see `seed_ranks`. Data has a seed of its own.
        backend: of the default group; by default nccl on a GPU, gloo without.
        timeout: how long a collective may wait for a rank, for the default group, mcore's and background saves: a rank
            that hangs ends the run after it. It must be longer than the slowest evaluation, save or start of one rank.
        data_parallel_random_init: seed every data parallel rank differently (`wrap_ddp` then broadcasts the weights).
        mcore_options: other arguments of mcore's `parallel_state.initialize_model_parallel`, such as
            ``order="tp-cp-ep-pp-dp"`` or ``num_distributed_optimizer_instances``.
    Raises:
        ValueError: the world size or `order` does not fit the layout, the config contradicts itself, or an option is
            one of its fields or cannot work.
        RuntimeError: half-set launch variables, a port in use, ranks that do not meet, two ranks on one GPU, groups of
            another layout or made without these options; on GPUs gloo, or environment variables that
            `deterministic_mode` needs.
    """
    check_config(config)
    check_mcore_options(mcore_options)
    gc.collect()  # an earlier training state, all cycles, would keep its gloo groups, whose threads then spin
    with contextlib.ExitStack() as undo:  # a failure part-way takes back this call's part and no earlier call's
        undo.callback(cpu_backend().undo)
        if not dist.is_initialized():
            _init_default_group(backend, timeout, undo)
        refuse_gloo_on_gpus()
        check_world_size(config, dist.get_world_size(), mcore_options.get("order", DEFAULT_ORDER))
        check_instances(config, dist.get_world_size(), mcore_options.get("num_distributed_optimizer_instances", 1))
        if config.deterministic_mode:
            check_deterministic_environment(config)
            undo.enter_context(deterministic_algorithms())
        _init_model_parallel(config, timeout, mcore_options, undo)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        seed_ranks(seed, groups, config, data_parallel_random_init=data_parallel_random_init)
        for advice in filter(None, (wrong_apex(), broken_engine())):
            say_once(advice)
        created.enter_context(undo.pop_all())
    return groups


def shutdown_distributed() -> None:
    """Destroy what `init_distributed` created and nothing else; a second call does nothing.

    Call it at the end of a program: with PyTorch 2.11 one that ends right after a collective of gloo's may abort (-6).
    """
    created.close()


def _init_default_group(backend: str | None, timeout: timedelta, undo: contextlib.ExitStack) -> None:
    launch = find_launch(os.environ)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        claim_gpu(launch.local_rank if launch else int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    backend = backend or ("nccl" if on_gpu else "gloo")
    if launch is not None:
        store, rank, world_size = meet(launch, timeout)
        # A second init of the same processes must not read the addresses that the first one left in the store.
        store = PrefixStore(f"minloop/{store.add(f'minloop/inits of rank {rank}', 1)}", store)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    timeouts[dist.group.WORLD] = timeout
    undo.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    undo.callback(forget_fp8_scales)
    if on_gpu:
        _refuse_shared_gpu()


def refuse_gloo_on_gpus() -> None:
    """Raise RuntimeError where ranks with GPUs have a default group on gloo: they would end in segmentation faults."""
    if torch.cuda.is_available() and dist.get_world_size() > 1 and "cuda:gloo" in dist.get_backend_config():
        raise RuntimeError(
            "the default group's backend is gloo, but these ranks have GPUs, and train by NCCL: let it be 'nccl' or "
            "'cpu:gloo,cuda:nccl', or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )


def _refuse_shared_gpu() -> None:
    """NCCL hangs or fails obscurely with two ranks on one GPU; one look-up in the rendezvous store tells."""
    device, machine = torch.cuda.current_device(), os.environ.get("NCCL_HOSTID") or socket.gethostname()  # as NCCL does
    gpu = f"minloop/gpu/{machine}/{torch.cuda.get_device_properties(device).uuid}"
    rank = str(dist.get_rank())
    owner = dist.distributed_c10d._get_default_store().compare_set(gpu, "", rank).decode()  # pyright: ignore[reportPrivateUsage]
    if owner != rank:
        raise RuntimeError(
            f"ranks {owner} and {rank} share GPU {device} of {machine}: set LOCAL_RANK (torchrun does) so "
            "that each rank has its own"
        )


def _init_model_parallel(
    config: TransformerConfig, timeout: timedelta, mcore_options: dict[str, Any], undo: contextlib.ExitStack
) -> None:
    sizes: dict[str, Any] = {option: getattr(config, field) for option, field in FIELDS.items()}
    if parallel_state.model_parallel_is_initialized():
        _check_held_groups(sizes, mcore_options)
        return
    minutes = timeout.total_seconds() / 60
    defaults: dict[str, Any] = {"distributed_timeout_minutes": minutes, "create_gloo_process_groups": False}
    if config.mtp_standalone:  # the prediction layers' stage, not the last one, holds a copy of the embedding
        defaults["get_embedding_ranks"] = lambda ranks: sorted({ranks[0], *get_mtp_ranks(ranks, config)})
    options: dict[str, Any] = sizes | defaults | mcore_options
    try:
        with destroyed_by(undo):  # mcore makes a score of groups and forgets them
            parallel_state.initialize_model_parallel(**options)
    finally:  # also where mcore failed: it would refuse the groups that it has set when it is called again
        undo.callback(parallel_state.destroy_model_parallel)
    made_with.update(options)
    undo.callback(made_with.clear)
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        undo.callback(kind.forward.cache_clear)  # it holds embeddings, and they hold these groups


def _check_held_groups(sizes: dict[str, Any], mcore_options: dict[str, Any]) -> None:
    """Raise RuntimeError if mcore's groups, made by a host or an earlier call, are not those that are asked for."""
    held = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    differing = [f"{name}: {size} there, {sizes[name]} here" for name, size in held.items() if size != sizes[name]]
    if differing:
        raise RuntimeError(
            f"mcore's process groups exist with another layout ({'; '.join(differing)}): call "
            "shutdown_distributed() (or the host's own clean-up) first"
        )
    parameters = inspect.signature(parallel_state.initialize_model_parallel).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters} | made_with
    ignored = [f"{name}={value!r}" for name, value in mcore_options.items() if value != known.get(name)]
    if ignored:
        raise RuntimeError(
            f"mcore's process groups exist already, so that {', '.join(ignored)} would do nothing: give this where "
            "they are made, or call shutdown_distributed() (or the host's own clean-up) first"
        )


def seed_ranks(
    seed: int, groups: ProcessGroupCollection, config: TransformerConfig, *, data_parallel_random_init: bool = False
) -> None:
    """Seed torch and mcore's RNG tracker for this rank, by Megatron-LM's rule: seed + 100 × pipeline rank.

    Data parallel ranks share their seed (with `data_parallel_random_init`: + 10 × data parallel rank); tensor and
    expert parallel ranks get streams of their own from mcore, for what they do not hold in common.

    Raises:
        ValueError: `seed` is not positive.
    """
    if seed <= 0:
        raise ValueError(f"seed ({seed}) must be positive")
    seed += 100 * groups.pp.rank()
    if data_parallel_random_init:
        seed += 10 * groups.dp.rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=config.use_te_rng_tracker,
        use_cudagraphable_rng=config.cuda_graph_impl != "none" and torch.cuda.is_available(),
        tp_rank=groups.tp.rank(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.expt_tp.rank(),
        force_reset_rng=True,
    )


def check_seeded(config: TransformerConfig) -> None:
    """Raise RuntimeError if weights are to be drawn from mcore's random streams, and there are none."""
    # State space layers draw whatever the config says; weights drawn on the CPU come from torch's own stream.
    draws = (config.perform_initialization and not config.use_cpu_initialization) or config.is_hybrid_model
    tracker: Any = tensor_parallel.get_cuda_rng_tracker() if draws else None  # asking makes one
    if draws and not tracker.is_initialized():
        raise RuntimeError(
            "this process has no random streams to draw weights from: call seed_ranks(seed, groups, config) before "
            "the model is built; init_distributed calls it, build_groups does not"
        )


def is_first_rank(groups: ProcessGroupCollection) -> bool:
    """Whether this is the rank that reports: the first of its tensor, context, pipeline and data parallel groups."""
    return not any(group.rank() for group in (groups.tp, groups.cp, groups.pp, groups.dp))
