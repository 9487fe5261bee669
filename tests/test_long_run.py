"""examples/long_run.py, killed under torchrun: it ends with the same bits; how a dead and a hanging rank end a run."""

import importlib
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import RankError, run_ranks
from small import DEVICE, small_state, text_loader, train

import minloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks and examples are no part of the package

from benchmarks.long_run_kills import LongRun, disturb, wait_until

GPU = DEVICE == "cuda"
BOUND = 90.0 if GPU else 30.0  # seconds in which all ranks end once one has died

OPTIONS: dict[str, Any] = {"train_iters": 40, "num_files": 40, "save_interval": 5, "eval_interval": 10}


def long_run(**options: Any) -> int:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    return importlib.import_module("long_run").main(**options)


def undisturbed(directory: str) -> int:
    return long_run(directory=directory, **OPTIONS)


@pytest.mark.usefixtures("shared_gpus")
def test_killed_twice_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    plain, killed = LongRun(tmp_path / "plain"), LongRun(tmp_path / "killed", **OPTIONS)
    assert run_ranks(2, undisturbed, str(plain.folder)) == [40, 40]

    process = killed.start(max_restarts=1)
    wait_until(killed.trains)
    ranks = killed.alive()
    disturb(killed, "all ranks")  # torchrun starts them again, from the newest checkpoint
    wait_until(partial(killed.trains, without=ranks))
    begin = time.monotonic()
    killed.alive()[1].kill()  # now all ends, the cause on top
    assert process.wait(BOUND) == 1
    assert time.monotonic() - begin < BOUND
    output = (killed.folder / "output").read_text()
    report = output[output.index("Root Cause (first observed failure)") :]
    assert "rank      : 1" in report
    assert "exitcode  : -9" in report

    assert run_ranks(2, undisturbed, str(killed.folder)) == [40, 40]
    records, weights = killed.outcome()
    expected, weights_expected = plain.outcome()
    assert records == expected
    assert len(records) == 44
    assert weights == weights_expected


def stopped_twice(directory: str) -> int:
    """Stopped after its first step; SIGTERM comes once more where the last save is waited for."""
    shut_down = minloop.shutdown_distributed

    def shut_down_slowly() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        shut_down()

    with mock.patch.object(minloop, "shutdown_distributed", shut_down_slowly):
        return long_run(directory=directory, exit_duration_in_mins=1e-6, **OPTIONS)


def test_a_second_signal_does_not_lose_the_last_save(tmp_path: Path) -> None:
    assert run_ranks(1, stopped_twice, str(tmp_path)) == [1]
    assert minloop.latest_checkpoint(tmp_path) == tmp_path / "iter_0000001"


def hang() -> None:
    state = small_state(init={"timeout": timedelta(seconds=20 if GPU else 2)}, tensor_model_parallel_size=2)
    loader = text_loader(state)
    train(state, loader, 1)
    if dist.get_rank() == 1:
        time.sleep(2 * BOUND)
    train(state, loader, 1)


def test_a_rank_that_hangs_ends_the_run_at_its_time_out() -> None:
    begin = time.monotonic()
    end = "ended without a Python exception" if GPU else ".*Timed out waiting 2000ms"  # NCCL's watchdog ends it
    with pytest.raises(RankError, match=f"rank 0 failed first: {end}") as error:
        run_ranks(2, hang)
    assert time.monotonic() - begin < BOUND
    assert "killed while still running: rank 1" in str(error.value)
