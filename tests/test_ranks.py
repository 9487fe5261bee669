"""The harness that runs the other tests' ranks: results in order, the first failure first, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from ranks import RankError, init_gloo, place, run_ranks

from minloop.cpu import cpu_backend


def _sum_of_ranks(base: int) -> tuple[int, torch.Tensor]:
    rank = torch.distributed.get_rank()
    tensor = torch.tensor([base + rank])
    torch.distributed.all_reduce(tensor)
    return rank, tensor


def test_results_come_in_rank_order():
    results = run_ranks(3, _sum_of_ranks, 10, init="gloo")
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(tensor, torch.tensor([33])) for _, tensor in results)


def _initialise_by_hand() -> int:
    assert not torch.distributed.is_initialized()
    init_gloo()
    return torch.distributed.get_world_size()


def test_no_group_unless_asked_for():
    assert run_ranks(2, _initialise_by_hand) == [2, 2]


def _surroundings() -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    server = psutil.Process(os.getppid())
    return {
        **{name: os.environ[name] for name in (*names, "CALLERS_VARIABLE")},
        "directory": os.getcwd(),
        "threads": torch.get_num_threads(),
        "server_threads": server.num_threads(),
        "preloaded": "megatron.core" in sys.modules,
    }


def test_a_rank_is_surrounded_as_by_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CALLERS_VARIABLE", "seen")
    monkeypatch.chdir(tmp_path)
    results = run_ranks(2, _surroundings)
    local = [place(number, torch.cuda.device_count())["LOCAL_RANK"] for number in (0, 1)]
    assert [(r["RANK"], r["LOCAL_RANK"]) for r in results] == [("0", local[0]), ("1", local[1])]
    for result in results:
        assert result["WORLD_SIZE"] == result["LOCAL_WORLD_SIZE"] == "2"
        assert result["MASTER_ADDR"] == "127.0.0.1"
        assert result["MASTER_PORT"] == results[0]["MASTER_PORT"]
        assert result["OMP_NUM_THREADS"] == "1"
        assert result["threads"] == 1
        assert result["server_threads"] == 1, "ranks must be forked from a process of one thread"
        assert result["CALLERS_VARIABLE"] == "seen"
        assert result["directory"] == str(tmp_path)
        assert result["preloaded"]
    assert "MASTER_PORT" not in os.environ


def test_ranks_share_gpus_of_which_there_are_fewer() -> None:
    assert [place(number, gpus=0) for number in (0, 1)] == [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}]
    assert [place(number, gpus=2) for number in (0, 1)] == [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}]
    shared = [{"LOCAL_RANK": local, "NCCL_HOSTID": "machine 1"} for local in ("0", "1")]
    assert [place(number, gpus=2) for number in (2, 3)] == shared


def _fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise LookupError("the cause")
    torch.distributed.barrier()


def test_the_first_failure_is_shown_first():
    with pytest.raises(RankError) as error:
        run_ranks(3, _fail_on_rank_1, init="gloo")
    lines = str(error.value).splitlines()
    assert lines[0] == "rank 1 failed first: LookupError: the cause"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in _fail_on_rank_1" in str(error.value).split("LookupError: the cause")[1]
    rest = "\n".join(line for line in lines if line.startswith(("then ", "killed while still running: ")))
    assert "rank 0" in rest  # it fails of it, or is killed while it waits
    assert "rank 2" in rest


def _exit() -> None:
    sys.exit(0)


def _kill_rank_0() -> None:
    if torch.distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def test_a_rank_that_exits_or_dies_has_failed():
    with pytest.raises(RankError, match="rank 0 failed first: SystemExit: 0"):
        run_ranks(1, _exit)
    with pytest.raises(RankError, match=r"rank 0 failed first: ended without a Python exception, exit code -9"):
        run_ranks(2, _kill_rank_0, init="gloo")


def _wait_for_a_message_that_never_comes(folder: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    rank = torch.distributed.get_rank()
    (folder / str(rank)).write_text(f"{os.getpid()} {sleeper.pid}")
    if rank == 1:
        torch.distributed.recv(torch.zeros(1), src=0)


def _running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_time_out_names_the_stuck_rank_and_leaves_no_process(tmp_path: Path):
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        run_ranks(2, _wait_for_a_message_that_never_comes, tmp_path, init="gloo", timeout=3)
    assert time.monotonic() - start < 30
    assert str(error.value).startswith("still running after 3 s: rank 1\n")
    assert "in _wait_for_a_message_that_never_comes" in str(error.value)
    assert "rank 0" not in str(error.value)
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not any(_running(pid) for pid in pids)


def _print() -> None:
    print(f"out of {os.environ['RANK']}")
    os.write(2, b"err\n")


def test_output_reaches_the_caller(capsys: pytest.CaptureFixture[str]):
    run_ranks(2, _print)
    output = capsys.readouterr().out
    assert output == "----- output of rank 0 -----\nout of 0\nerr\n----- output of rank 1 -----\nout of 1\nerr\n"


def _save_checkpoint(folder: Path) -> list[int]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with cpu_backend():
        ours = torch.full((2,), float(rank)).cuda()
        weight = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", ours.clone(), (0, rank, size))
        dist_checkpointing.save({"weight": weight}, str(folder))
        weight.data = torch.zeros_like(ours)
        loaded: Any = dist_checkpointing.load({"weight": weight}, str(folder))
    assert torch.equal(loaded["weight"], ours)
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.slow
def test_checkpoints_can_be_saved(tmp_path: Path):
    """mcore's save spawns a helper process, which imports the rank's main module; it must end with the rank."""
    helpers = run_ranks(2, _save_checkpoint, tmp_path, init="any")
    assert any(tmp_path.glob("*.distcp"))
    assert all(helpers)
    assert not any(_running(pid) for pids in helpers for pid in pids)
