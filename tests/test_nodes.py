"""Several machines: one is lost and comes back; a directory that only some of them see is refused by all."""

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from ranks import free_port, run_ranks, start_server
from small import rounding, small_state, text_loader, train
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import minloop
from minloop.checkpoint import shared

QUICK = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4}  # seconds after which a silent machine counts as lost


def refusal(action: Callable[[], object]) -> str:
    begin = time.monotonic()
    try:
        action()
    except (RuntimeError, OSError) as error:
        assert time.monotonic() - begin < 10
        return f"{type(error).__name__}: {error}"
    return "none"


def each_with_its_own(directory: str) -> dict[str, str]:
    """Ranks 0 and 1 are one machine, rank 2 another: the same paths lead elsewhere there."""
    state = small_state()
    root, rank = Path(directory), dist.get_rank()
    disk = root / f"disk{rank // 2}"
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    with mock.patch.object(shared, "PATIENCE", 0.3):
        told = {
            "start": refusal(lambda: minloop.shared_directory("run")),
            "save": refusal(lambda: minloop.save_checkpoint("run", state)),
            "start_save": refusal(lambda: minloop.start_save("run", state)),
        }
        dist.barrier()
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
        assert left == ["disk0", "disk0/run", "disk0/run/.lock", "disk1"], left
        dist.barrier()
        assert minloop.shared_directory("../common") == disk / "../common"
        copy = Path("run", minloop.save_checkpoint(root / "common", state).name)
        whole = root / "common" / copy.name
        told["nothing"] = refusal(lambda: minloop.load_checkpoint("run", state))
        if rank == 2:
            shutil.copytree(whole, copy)
        told["others"] = refusal(lambda: minloop.load_checkpoint("run", state))
        if rank == 2:  # as a machine has that wrote its own part alone
            (copy / "__0_0.distcp").unlink()
        if rank == 0:
            shutil.copytree(whole, copy)
        told["part"] = refusal(lambda: minloop.load_checkpoint("run", state, verify=False))
        if rank == 2:
            shutil.copy(whole / "__0_0.distcp", copy)
        assert minloop.load_checkpoint("run", state) == copy  # whole copies are as good as one
        if rank == 2:
            shutil.rmtree(copy)
        told["absent"] = refusal(lambda: minloop.load_weights(copy, state))
    minloop.shutdown_distributed()
    return told


def test_a_directory_of_each_machines_own_is_refused_by_every_rank(tmp_path: Path) -> None:
    for told in run_ranks(3, each_with_its_own, str(tmp_path)):
        assert told.pop("nothing").startswith("FileNotFoundError"), told
        assert all("is not the same directory on all ranks: 1 of 3 (rank 2 on " in text for text in told.values()), told
        for name in ("start", "save", "start_save"):
            assert "save into a directory on a file system that all machines share" in told[name], told
        assert "see a checkpoint there, and rank 0 does not" in told["others"], told
        for name in ("part", "absent"):
            assert "copy all of the checkpoint to each" in told[name], told


def train_until_told(directory: str) -> None:
    """Up to step 6, and there wait to be told that the other machine is back; then, as two ranks again, up to 9."""
    state = small_state()
    checkpoints, loader = minloop.shared_directory(directory), text_loader(state)
    if minloop.latest_checkpoint(checkpoints):
        minloop.load_checkpoint(checkpoints, state, loader)
    ranks, last = dist.get_world_size(), 9 if state.iteration == 6 else 6
    with minloop.stop_signals() as stop, Path(directory, "log").open("a") as log:
        while state.iteration < last:
            loss, _ = train(state, loader, 1)[0]
            if minloop.is_first_rank(state.groups):
                print(json.dumps([state.iteration, ranks, loss]), file=log, flush=True)
            if state.iteration in (2, last):
                minloop.save_checkpoint(checkpoints, state, loader)
            if ranks == 2 and state.iteration == 3:
                time.sleep(60 * dist.get_rank())  # rank 1, to be killed here
        while last == 6 and not stop.requested(state.groups):
            time.sleep(0.05)
    minloop.shutdown_distributed()
    if stop.received:
        os._exit(0)  # a function's process, unlike a script's, would wait for the agent that waits for its end


def agent(number: int, port: int, directory: str) -> None:
    """What torchrun does on a machine; its ranks are forked, which spares them their imports."""
    multiprocessing.set_start_method(None, force=True)
    os.environ["NCCL_HOSTID"] = f"machine {number}"  # both machines have the same GPU
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else no machine that comes later is let in
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=2,
            nproc_per_node=1,
            run_id="run",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"is_host": number == 0, "last_call_timeout": 1} | QUICK,
            max_restarts=1,
            start_method="fork",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        elastic_launch(config, train_until_told)(directory)


def start(number: int, port: int, directory: Path) -> ForkServerProcess:
    process = multiprocessing.get_context("forkserver").Process(target=agent, args=(number, port, str(directory)))
    process.start()
    return process


def kill(process: ForkServerProcess) -> None:
    """The agent and its ranks at once."""
    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            each.kill()
    process.join()


def logged(directory: Path) -> list[list[Any]]:
    log = directory / "log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(directory: Path, ranks: int, iteration: int) -> None:
    end = time.monotonic() + 60
    while not any(entry[:2] == [iteration, ranks] for entry in logged(directory)):
        assert time.monotonic() < end, logged(directory)
        time.sleep(0.05)


def undisturbed(steps: int) -> list[tuple[float, float]]:
    state = small_state()
    return train(state, text_loader(state), steps)


def test_a_machine_is_lost_and_comes_back(tmp_path: Path) -> None:
    start_server()
    port = free_port()
    agents = [start(number, port, tmp_path) for number in range(2)]
    try:
        wait_for(tmp_path, 2, 3)
        kill(agents[1])
        wait_for(tmp_path, 1, 6)
        agents[1] = start(1, port, tmp_path)
        for process in agents:
            process.join(60)
        assert [process.exitcode for process in agents] == [0, 0]
    finally:
        for process in agents:
            kill(process)
    log = logged(tmp_path)
    assert [entry[:2] for entry in log] == [  # alone from the checkpoint of step 2 on
        *([step, 2] for step in (1, 2, 3)),
        *([step, 1] for step in (3, 4, 5, 6)),
        *([step, 2] for step in (7, 8, 9)),
    ]
    losses = [loss for _, _, loss in log]
    assert losses[:3] == [loss for loss, _ in run_ranks(2, undisturbed, 3)[0]]
    alone = [loss for loss, _ in run_ranks(1, undisturbed, 9)[0]]
    assert losses[3:] == pytest.approx(alone[2:], rel=rounding(1e-5))
