"""What minloop relies on inside mcore and torch, beyond their public names. A new version fails here, not in a run."""

from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random
from ranks import run_ranks
from small import small_state
from torch.distributed import distributed_c10d

import minloop

CHECKED = ("0.19.2",)
"""Versions of megatron-core whose internals were read for the places below. Read them again before adding one."""


def test_the_version_was_checked() -> None:
    assert metadata.version("megatron-core") in CHECKED


def test_internals_are_where_they_were() -> None:
    assert filesystem_async._results_queue is None  # checkpoint/save.py puts a queue of this process there
    assert hasattr(random, "_lazy_call")  # cpu.py: bound at import
    assert hasattr(distributed_c10d, "_get_default_store")  # distributed.py: one look-up to find two ranks on one GPU
    # checkpoint/optimizer_state.py numbers weights as this method does
    assert hasattr(distrib_optimizer.DistributedOptimizer, "load_parameter_state_from_fully_reshardable")


def save(directory: str) -> tuple[int, Any]:
    minloop.save_checkpoint(directory, small_state(ddp={"use_distributed_optimizer": True}))
    children = len(psutil.Process().children(recursive=True))
    minloop.shutdown_distributed()
    return children, filesystem_async._results_queue


def test_a_save_leaves_no_process_and_no_queue(tmp_path: Path) -> None:
    assert run_ranks(1, save, str(tmp_path)) == [(0, None)]
