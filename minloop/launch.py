"""Who this process is among all: torchrun's environment, or that of Slurm's srun; read, and never written."""

import functools
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from minloop.messages import say_once

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS")
GRACE = 10.0
"""Seconds after a time-out in which torch may still say why."""


class Launch(NamedTuple):
    """One process of a run: its place, and where rank 0 waits for the others."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return what a launcher said of this process: torchrun if it did, else srun; None if neither did.

    srun gives no address: rank 0's machine is the first of SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST), and the port is
    computed from the job's and the step's number. MASTER_ADDR and MASTER_PORT, where set, decide.

    Raises:
        RuntimeError: torchrun's or srun's variables are there in part, srun's name no machine, or one that is to be a
            number is none, or the rank not below the number of ranks.
    """
    present = [name for name in LAUNCH_VARIABLES if name in environment]
    if len(present) == len(LAUNCH_VARIABLES):
        rank, world_size = _rank_of(environment, "RANK", "WORLD_SIZE")
        port, local_rank = _integer(environment, "MASTER_PORT"), _integer(environment, "LOCAL_RANK")
        return Launch(rank, world_size, local_rank, environment["MASTER_ADDR"], port)
    if "RANK" not in present and all(name in environment for name in SLURM_VARIABLES):
        return _of_srun(environment)
    if not present:
        _check_alone(environment)
    else:
        missing = ", ".join(name for name in LAUNCH_VARIABLES if name not in present)
        raise RuntimeError(
            f"the launch environment has {', '.join(present)} but not {missing}: start the script with torchrun or "
            "srun, set all of them, or none for one process"
        )
    return None


def _check_alone(environment: Mapping[str, str]) -> None:
    """Raise RuntimeError for half of srun's variables. A batch script's own shell has SLURM_PROCID=0 in any case."""
    rank, count = (environment.get(name) for name in SLURM_VARIABLES)
    if rank is not None and (rank != "0" or "SLURM_STEP_NODELIST" in environment):
        raise RuntimeError(
            f"the launch environment has SLURM_PROCID={rank!r} but not SLURM_NTASKS: this process would train alone; "
            "start the script with srun, set both, or neither for one process"
        )
    if count is not None and count != "1":
        say_once(
            f"SLURM_NTASKS is {count} but there is no SLURM_PROCID: this process trains alone; start the script with "
            "srun for all of them"
        )


def _of_srun(environment: Mapping[str, str]) -> Launch | None:
    rank, world_size = _rank_of(environment, *SLURM_VARIABLES)
    if world_size == 1 and "MASTER_ADDR" not in environment:
        return None
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(hosts)
    if not address:
        raise RuntimeError(
            f"SLURM_PROCID is {rank} of SLURM_NTASKS {world_size}, but neither SLURM_JOB_NODELIST nor MASTER_ADDR "
            "names the machine of rank 0: start the script with srun, or set MASTER_ADDR"
        )
    job, step = (_integer(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _integer(environment, "MASTER_PORT") or 20_000 + (job * 8 + step) % 10_000
    # --gpus-per-task=1 shows each task its own GPU alone, as device 0
    alone = environment.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    return Launch(rank, world_size, 0 if alone else _integer(environment, "SLURM_LOCALID"), address, port)


def _rank_of(environment: Mapping[str, str], rank_name: str, world_name: str) -> tuple[int, int]:
    rank, world_size = _integer(environment, rank_name), _integer(environment, world_name)
    if not 0 <= rank < world_size:
        raise RuntimeError(
            f"{rank_name} is {rank} and {world_name} {world_size}: ranks are numbered from 0; start the script with "
            "torchrun or srun"
        )
    return rank, world_size


def _integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise RuntimeError(f"{name} is {text!r}, and is to be a number: start the script with torchrun or srun")
    return int(text)


def first_host(nodelist: str) -> str:
    """The first machine of a list in Slurm's notation: "gpu[07-09,12],login" → "gpu07".

    Source: Slurm's documentation of SLURM_JOB_NODELIST, of which ``scontrol show hostnames`` is the full reader.
    """
    match = re.match(r"([^,\[]*)((?:\[[^\]]*\][^,\[]*)*)", nodelist)
    return "" if match is None else match[1] + re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[2])


@functools.cache
def meet(launch: Launch, timeout: timedelta) -> tuple[Store, int, int]:
    """Meet the other ranks; the store lives as long as the process, since a rank may join the next group early.

    Returns:
        The store, this rank, the number of ranks.
    Raises:
        RuntimeError: the port is in use, or the ranks did not meet before the time-out.
    """
    rank, world_size, _, address, port = launch
    host = f"[{address}]" if ":" in address else address
    found: Future[tuple[Store, int, int]] = Future()

    def look() -> None:
        try:
            url = f"tcp://{host}:{port}?rank={rank}&world_size={world_size}"
            found.set_result(next(rendezvous(url, timeout=timeout)))
        except Exception as error:
            found.set_exception(error)

    # in a thread: to a program that is no store torch would listen for ever
    threading.Thread(target=look, daemon=True).start()
    try:
        return found.result(timeout.total_seconds() + GRACE)
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise RuntimeError(
                f"MASTER_PORT {port} is in use on {address}: another run holds it; choose a free port"
            ) from error
        raise RuntimeError(
            f"rank {rank} of {world_size} met no others at MASTER_ADDR {address}, MASTER_PORT {port} "
            f"({str(error) or f'no answer within {timeout}'}): start all ranks with the same two values, the address "
            "of rank 0's machine as all see it, and a port that no other program has"
        ) from error


def claim_gpu(local_rank: int) -> None:
    """Make this rank's GPU the current one; raise RuntimeError if there are not that many."""
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise RuntimeError(
            f"LOCAL_RANK is {local_rank} but this machine shows {count} GPU(s): start at most one rank per GPU "
            f"(torchrun --nproc-per-node {count})"
        )
    torch.cuda.set_device(local_rank)


def fault_environment(directory: str | Path, *, timeout: timedelta) -> dict[str, str]:
    """Return what to set before ranks with NCCL start, so that one that hangs or dies leaves word of what it was doing.

    Nothing is set here: ``os.environ | fault_environment(...)`` is for the program that starts the ranks; a shell needs
    the lines ``NAME=value``. After `timeout` without progress the flight recorder writes one file per rank, the last
    2000 collectives with their states and Python stacks, to be read by ``torchfrtrace``. On the CPU, gloo needs none.

    Args:
        directory: for the files ``nccl_trace_rank_0`` and so on; it must exist.
        timeout: the one that `init_distributed` is given. The watchdog of NCCL's watchdog, which ends a process whose
            collectives cannot even be aborted, waits a minute longer.
    Source: PyTorch's documentation of ProcessGroupNCCL's environment variables.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(timeout.total_seconds()) + 60),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{directory}/nccl_trace_rank_",
    }
