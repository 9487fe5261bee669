"""Run a function on several ranks from a plain pytest test.

    def total(base):
        tensor = torch.tensor([base + torch.distributed.get_rank()])
        torch.distributed.all_reduce(tensor)
        return tensor

    def test_total():
        assert run_ranks(2, total, 10, init="gloo") == [21, 21]

Every rank is a process of its own, forked from one server process that has imported torch and megatron-core already,
so a run costs a fraction of a second and not the seconds of those imports. A rank sees what torchrun would give it
(RANK, WORLD_SIZE, MASTER_ADDR, ...), the caller's environment and working directory, and nothing of its memory.

Where there are fewer GPUs than ranks, ranks share them: NCCL takes those of one GPU for ranks of several machines. That
shows whether they compute the same, not how fast, as each of their kernels waits for the others' turn.
"""

import faulthandler
import gc
import io
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

PRELOAD = [
    *("pytest", "minloop", "megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.optimizer"),
    # torch and mcore import these only when they build an optimizer or save: 0.4 s for every rank
    *("torch._dynamo", "megatron.core.models.mimo", "megatron.core.dist_checkpointing.strategies.state_dict_saver"),
    *("transformers.models.llama.modeling_llama", "megatron.core.tokenizers.text"),  # 5 s, for ranks of some tests
]
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
"""Of the libraries on GPUs. Without it one run in several dozen differed from another in the last bits of a loss."""
GRACE = 2.0  # seconds in which the other ranks may end by themselves once one has failed


class RankError(Exception):
    """A rank failed, or did not end in time. The message starts with the traceback of the rank that failed first."""


@dataclass
class _Rank:
    number: int
    process: ForkServerProcess
    pid: int
    connection: Connection
    folder: Path
    ended: float = math.inf  # time.monotonic() at which the function returned or the rank failed
    result: bytes = b""
    failure: str = ""

    def __str__(self) -> str:
        return f"rank {self.number}"

    def read(self, name: Literal["output", "stacks"]) -> str:
        path = self.folder / name
        return path.read_text(errors="replace").strip() if path.exists() else ""


def start_server() -> None:
    """Start the process from which ranks are forked, unless it runs: it then does its imports in the background."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    # One thread per rank, as ranks share few cores: OpenMP reads it when it is loaded. And torch must ask NVML whether
    # there is a GPU, as a process that has asked CUDA itself cannot fork processes that use it.
    settings = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with mock.patch.dict(os.environ, settings):
        forkserver.ensure_running()


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, init: str = "", **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks; return what it returned, in rank order.

    `function` is a function of a module (a rank imports it by name); arguments and results are what `torch.save` takes,
    and tensors come back on the CPU. `init="gloo"` initialises a default group on that backend, `init="any"` on one for
    what trains here, NCCL for GPUs; else there is none.
    What ranks print is printed here when all have ended. No rank, nor any process that it started, is left behind.

    Raises:
        RankError: a rank raised, exited or was killed, or some rank still ran after `timeout` seconds.
    """
    __tracebackhide__ = True
    start_server()
    job = _dumps((init, function, args, kwargs))
    environment = {**os.environ, **_torchrun_environment(world_size)}
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for number in range(world_size):
                ranks.append(_start(number, Path(folder, str(number)), job, environment))
            _collect(ranks, time.monotonic() + timeout, timeout)
        finally:
            _kill(ranks)
            for rank in ranks:
                if output := rank.read("output"):
                    print(f"----- output of {rank} -----\n{output}")
    return [torch.load(io.BytesIO(rank.result), map_location="cpu", weights_only=False) for rank in ranks]


def init_gloo() -> None:
    """Initialise a bare default group on gloo from the environment, for tests of what lies below `init_distributed`."""
    torch.distributed.init_process_group("gloo")


def _init_default_group(backend: str) -> None:
    if backend == "any":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)


def _start(number: int, folder: Path, job: bytes, environment: dict[str, str]) -> _Rank:
    folder.mkdir()
    ours, theirs = multiprocessing.Pipe()
    environment = {**environment, "RANK": str(number), **place(number, torch.cuda.device_count())}
    process = multiprocessing.get_context("forkserver").Process(
        target=_rank_main, args=(theirs, folder, job, environment, os.getcwd())
    )
    process.start()
    theirs.close()
    assert process.pid is not None
    return _Rank(number, process, process.pid, ours, folder)


def _collect(ranks: Sequence[_Rank], deadline: float, timeout: float) -> None:
    """Receive every rank's result, then let all ranks end together; raise RankError if that does not come about."""
    __tracebackhide__ = True
    running = list(ranks)
    while running and (left := deadline - time.monotonic()) > 0:
        ready = wait([end for rank in running for end in (rank.connection, rank.process.sentinel)], left)
        for rank in [r for r in running if r.connection in ready or r.process.sentinel in ready]:
            _receive(rank)
            running.remove(rank)
            if rank.failure:
                deadline = min(deadline, time.monotonic() + GRACE)
    if not running and not any(rank.failure for rank in ranks):
        # No rank leaves while another still needs it, for instance for the key-value store that rank 0 serves.
        for rank in ranks:
            with suppress(OSError):
                rank.connection.send_bytes(b"leave")
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.exitcode:
                rank.failure = f"exit code {rank.process.exitcode} after its function had returned"
        running = [rank for rank in ranks if rank.process.exitcode is None]
    if failed := sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.ended):
        raise RankError(_failure_message(failed, running))
    if running:
        raise RankError(_timeout_message(running, timeout))


def _receive(rank: _Rank) -> None:
    try:
        ok, rank.ended, report = torch.load(io.BytesIO(rank.connection.recv_bytes()), weights_only=False)
        rank.result, rank.failure = (report, "") if ok else (b"", report)
    except (EOFError, OSError):
        rank.ended = (
            -math.inf
        )  # its peers notice sooner than we do, and such a death seldom has its cause in another rank
        rank.process.join(GRACE)
        rank.failure = f"ended without a Python exception, exit code {rank.process.exitcode}"


def _failure_message(failed: Sequence[_Rank], running: Sequence[_Rank]) -> str:
    first_line, *other_lines = [f"{rank} failed: {rank.failure.splitlines()[-1]}" for rank in failed]
    lines = [first_line.replace(" failed", " failed first", 1), failed[0].failure]
    lines += [f"then {line}" for line in other_lines]
    lines += [f"killed while still running: {', '.join(map(str, running))}"] if running else []
    return "\n".join(lines)


def _timeout_message(running: Sequence[_Rank], timeout: float) -> str:
    for rank in running:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(0.5)  # the signal makes faulthandler write; nothing tells when it has
    lines = [f"still running after {timeout:g} s: {', '.join(map(str, running))}"]
    return "\n\n".join(lines + [f"stacks of {rank}:\n{rank.read('stacks')}" for rank in running])


def _kill(ranks: Sequence[_Rank]) -> None:
    """End every rank and what it has started: a rank leads a process group of its own."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.process.kill()  # it may not have come to make its group yet
    for rank in ranks:
        rank.process.join()


def _rank_main(pipe: Connection, folder: Path, job: bytes, environment: dict[str, str], cwd: str) -> None:
    gc.freeze()  # a collection would look at all that the server imported, and so copy its pages
    os.setpgid(0, 0)
    output = (folder / "output").open("wb")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    faulthandler.enable()  # an abort in C++ says where Python was
    faulthandler.register(signal.SIGUSR1, file=(folder / "stacks").open("w"), all_threads=True)
    threading.Thread(target=_die_with_parent, name="die with parent", daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # the platform's own, as in a process that torchrun starts
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    try:
        init, function, args, kwargs = torch.load(io.BytesIO(job), weights_only=False)
        if init:
            _init_default_group(init)
        result = _dumps(function(*args, **kwargs))
        report = (True, time.monotonic(), result)
    except BaseException:  # SystemExit too: a rank that exits has not returned
        report = (False, time.monotonic(), traceback.format_exc().strip())
    pipe.send_bytes(_dumps(report))
    if report[0]:
        pipe.recv_bytes()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _dumps(value: object) -> bytes:
    """By value: plain pickling of tensors between processes would pass file descriptors of shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _torchrun_environment(world_size: int) -> dict[str, str]:
    """What torchrun sets for every rank alike."""
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}


def place(number: int, gpus: int) -> dict[str, str]:
    """Which GPU a rank has; with more ranks than GPUs, of which of the machines that NCCL is to see."""
    if not 0 < gpus <= number:
        return {"LOCAL_RANK": str(number)}
    return {"LOCAL_RANK": str(number % gpus), "NCCL_HOSTID": f"machine {number // gpus}"}


def free_port() -> int:
    """A free port, below those that the system gives to outgoing connections: one of them could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
