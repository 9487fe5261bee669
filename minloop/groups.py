"""Process groups of a layout beside others: on some of the world's ranks, or a second layout in one process.

`init_distributed` makes mcore's own groups, one layout per process, which mcore keeps as globals, too. What is made
here is in the `ProcessGroupCollection` alone, and mcore 0.19 trains with it. The globals that it asks all the same:

    memory buffer      scratch space between two operations; made if it is not there, shared by the layouts
    random streams     one set per process; `seed_ranks` sets those of a layout, before its model is built
    ranks and groups   read by what `build_groups` refuses: multi-token prediction, pipeline layouts, hierarchical and
                       hybrid context parallelism, FP8 scales
    the default group  asked while an optimizer is built, saved or loaded: see `as_the_world`
"""

import contextlib
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from minloop.alive import destroy, usable
from minloop.checks import check_config
from minloop.cpu import cpu_backend
from minloop.distributed import created, refuse_gloo_on_gpus
from minloop.init_checks import DEFAULT_ORDER, check_world_size

c10d: Any = dist.distributed_c10d  # of whose private parts `new_group` makes a group

DENSE = {
    **{"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "mp": "tp-pp", "tp_cp": "tp-cp", "dp_cp": "dp-cp"},
    **{"tp_dp_cp": "tp-dp-cp", "intra_dist_opt": "tp-dp-cp-pp"},
}
EXPERT = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp"}
"""Names of groups, and the axes that each spans: of all layers, and of experts."""

SAME = {
    **{"intra_dp_cp": "dp_cp", "dp_cp_gtp_remat": "dp_cp", "intra_expt_dp": "expt_dp"},
    **{"expt_dp_gtp_remat": "expt_dp", "tp_ep_pp_with_egtp_remat": "tp_ep_pp"},
}
"""Groups that are another one unless weights are rematerialised or the distributed optimizer has several instances."""

ABSENT = ("hcp", "inter_dist_opt", "gtp_remat", "expt_gtp_remat", "dp_cp_ag", "expt_dp_ag")


def build_groups(
    config: TransformerConfig,
    ranks: Sequence[int] | None = None,
    *,
    timeout: timedelta = timedelta(minutes=10),
    order: str = DEFAULT_ORDER,
) -> ProcessGroupCollection:
    """Make the groups of a layout on some ranks of the default group, or beside other layouts on the same ones.

        actor = minloop.init_distributed(config, seed=1234)
        reference = minloop.build_groups(minloop.replace_layout(config, tensor_model_parallel_size=1))

    Only `ranks` call it, and communicate, to train, save and load; others do something else meanwhile.
    `shutdown_distributed` destroys the groups. No random stream is seeded: call ``seed_ranks(seed, groups, config)``
    before the model is built. Groups of the same ranks are one group. Without a GPU the CPU backend is switched on, as
    by `init_distributed`.

    Args:
        config: its parallel sizes decide the groups; the data parallel size is what remains of `ranks`.
        ranks: global ranks in the order of the layout, the same on all of them; by default all of the default group.
        timeout: how long a collective may wait for a rank.
        order: in which ranks are numbered, as in mcore.
    Raises:
        RuntimeError: no default group, or on GPUs one on gloo; or not all `ranks` came within `timeout`.
        ValueError: the number of ranks does not fit the layout, this rank is not among them, another rank was given
            another layout or order of them, or something that reads mcore's globals.
    """
    check_config(config)
    if not dist.is_initialized():
        raise RuntimeError("build_groups needs a default group: init_distributed or the host makes it")
    refuse_gloo_on_gpus()
    ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    _check(config, ranks, order)
    _compare(config, ranks, order)
    created.callback(cpu_backend().undo)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # pyright: ignore[reportPrivateUsage]  # has no public setter
        parallel_state._set_global_memory_buffer()  # pyright: ignore[reportPrivateUsage]
        created.callback(parallel_state.destroy_global_memory_buffer)
    members = _members(config, ranks, order)
    made: dict[tuple[int, ...], Any] = {}
    for own in sorted({own for own in members.values() if dist.get_rank() in own}):
        made[own] = new_group(own, timeout)
    found: dict[str, Any] = {name: made.get(own) for name, own in members.items()}
    found |= {name: found[other] for name, other in SAME.items()} | dict.fromkeys(ABSENT)
    return ProcessGroupCollection(**found)


def check_groups(config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Raise ValueError unless the groups are all there, and have the sizes that `config` names."""
    if lacking := [name for name in DENSE | EXPERT if getattr(groups, name) is None]:
        raise ValueError(f"the groups lack {', '.join(lacking)}: build_groups or init_distributed makes all")
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": groups.tp,
        "pipeline_model_parallel_size": groups.pp,
        "context_parallel_size": groups.cp,
        "expert_model_parallel_size": groups.ep,
        "expert_tensor_parallel_size": groups.expt_tp,
    }
    for name, group in sizes.items():
        if group.size() != getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)} in the config, but the groups were made for {group.size()}: pass "
                "the config that init_distributed was given, or shut down and init again with this one"
            )


def spans_the_world(groups: ProcessGroupCollection) -> bool:
    """Whether the layout has all ranks of the default group."""
    return groups.tp_dp_cp.size() * groups.pp.size() == dist.get_world_size()


@contextlib.contextmanager
def as_the_world(groups: ProcessGroupCollection) -> Generator[None]:
    """While inside, the ranks of a layout are the default group of this process, numbered from 0 in their order.

    mcore 0.19 and PyTorch's distributed checkpoints know the default group alone where an optimizer's parameter groups
    are aligned (mcore's optimizer/__init__.py, `_get_param_groups`), a save is planned
    (dist_checkpointing/strategies/torch.py, `async_save`, which gives PyTorch no group), its files are named, or what
    ranks hold is compared: other ranks would have to take part, and wait for ever if they do not. Groups of the layout
    are numbered alike, so that ranks and groups agree. It is for the whole process: other threads of a host must not
    ask for ranks, nor communicate on the default group, meanwhile.

    Raises:
        RuntimeError: the groups cannot be used, see `usable`.
    """
    with usable(groups), contextlib.nullcontext() if spans_the_world(groups) else _numbered_anew(groups):
        yield


@contextlib.contextmanager
def _numbered_anew(groups: ProcessGroupCollection) -> Generator[None]:
    known, world = c10d._world.pg_group_ranks, c10d._world.default_pg
    layout = known[groups.intra_dist_opt]
    before = {group: ranks for group, ranks in known.items() if ranks.keys() <= layout.keys()}
    for group, ranks in before.items():
        known[group] = {layout[rank]: place for rank, place in ranks.items()}
    c10d._world.default_pg = groups.intra_dist_opt
    try:
        yield
    finally:
        c10d._world.default_pg = world
        known.update({group: ranks for group, ranks in before.items() if group in known})


def _check(config: TransformerConfig, ranks: Sequence[int], order: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world)) or rank not in ranks:
        raise ValueError(
            f"ranks={ranks}: they must be different global ranks below {world}, and rank {rank}, which called, one of "
            "them; other ranks do not call build_groups"
        )
    if world > 1 and c10d._get_default_group().bound_device_id is not None:
        raise ValueError(
            f"ranks={ranks} of {world}: the default group was made with device_id, so that all its ranks would have to "
            "take part in making any of a layout's groups; make it without"
        )
    check_world_size(config, len(ranks), order)
    refused = ("mtp_num_layers", "pipeline_model_parallel_layout", "hierarchical_context_parallel_sizes", "fp8", "fp4")
    refused += ("hybrid_context_parallel", "mtp_standalone")
    asked = [f"{name}={value!r}" for name in refused if (value := getattr(config, name, None))]
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: mcore reads the groups for it from its globals, of which a process has one set: use "
            "init_distributed, on all ranks of the default group"
        )


def _compare(config: TransformerConfig, ranks: list[int], order: str) -> None:
    """Raise ValueError if one of these ranks came before with another layout; no rank waits for it."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    names += ("expert_model_parallel_size", "expert_tensor_parallel_size")
    own = repr({"ranks": ranks, "order": order} | {name: getattr(config, name) for name in names})
    store = c10d._world.pg_map[c10d._get_default_group()][1]
    key = f"minloop/layouts/{sorted(ranks)}"
    count = store.add(f"{key}/of rank {dist.get_rank()}", 1)  # the layouts of these ranks so far
    first = store.compare_set(f"{key}/{count}", "", own).decode()
    if first != own:
        raise ValueError(
            f"the ranks disagree on the layout to build: {own} on rank {dist.get_rank()}, {first} on another; call "
            "build_groups with the same config, ranks and order on all of them, in new processes"
        )


def _members(config: TransformerConfig, ranks: Sequence[int], order: str) -> dict[str, tuple[int, ...]]:
    """The global ranks of each of this rank's groups, by name."""
    size, place = len(ranks), list(ranks).index(dist.get_rank())
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    etp, ep = config.expert_tensor_parallel_size or tp, config.expert_model_parallel_size
    dense = RankGenerator(tp=tp, ep=1, dp=size // (tp * pp * cp), pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=size // (etp * ep * pp), pp=pp, cp=1, order=order)
    members: dict[str, tuple[int, ...]] = {}
    for generator, names in ((dense, DENSE), (expert, EXPERT)):
        for name, axes in names.items():
            own = next(group for group in generator.get_ranks(axes) if place in group)
            members[name] = tuple(ranks[number] for number in own)
    stages = members["pp"]
    # the first stage's copy of an embedding, and the last one's where it is tied
    return members | {"embd": (stages[0], stages[-1])[: min(pp, 2)], "pos_embd": stages[:1]}


def new_group(ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group by its members alone, until `shutdown_distributed`; its backend is by default the default group's.

    `torch.distributed.new_group` wants all ranks of the world, or with use_local_synchronization counts, in the name by
    which members meet, the groups that this rank has made so far: ranks that differ in it would wait for ever.
    """
    usual, store = c10d._world.pg_map[c10d._get_default_group()]
    count = store.add(f"minloop/groups/{ranks}/of rank {dist.get_rank()}", 1)  # made again, they must meet anew
    name, place = c10d.GroupName(f"minloop/{ranks}/{count}"), ranks.index(dist.get_rank())
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks), place, list(ranks), backend or usual, store, name, timeout=timeout
        )
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"not all of ranks {list(ranks)} came within {timeout} to make a group: one ended, raised an error, or "
            "disagrees on the config, the ranks or their order, which must be the same on all; then start all anew"
        ) from error
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    created.callback(destroy, group)
    return group
