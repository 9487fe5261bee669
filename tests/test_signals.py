"""Ending in order: a signal to one rank, an interval and a duration are one decision of all ranks."""

import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small import Text, small_state, text_loader, train
from test_data import groups

import minloop
from minloop.data import build_loader
from minloop.signals import STOP_SIGNALS

STEPS = 40


def train_until_asked(directory: str, rank: int, number: signal.Signals) -> tuple[int, str | None, bool]:
    """Train; in the third step one rank gets the signal. Returns where and why it ended, and whether handlers are."""
    state = small_state(tensor_model_parallel_size=2)
    loader, reason = text_loader(state), None
    before = signal.getsignal(number)
    with minloop.stop_signals() as stop:
        while state.iteration < STEPS and reason is None:
            if state.iteration == 2 and dist.get_rank() == rank:
                os.kill(os.getpid(), number)
            train(state, loader, 1)
            assert stop.requested(state.groups) is (state.iteration == 3)
            reason = stop.exit_reason(state, exit_interval=STEPS, exit_duration_in_mins=5)
        minloop.save_checkpoint(directory, state, loader)
    return state.iteration, reason, signal.getsignal(number) == before


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path: Path, rank: int, number: signal.Signals) -> None:
    ends = run_ranks(4, train_until_asked, str(tmp_path), rank, number)
    assert ends == [(3, f"{number.name} received", True)] * 4
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]


def intervals_and_durations() -> list[str | None]:
    state = small_state()
    with minloop.stop_signals(signals=()) as stop:
        state.iteration = 6
        reasons = [stop.exit_reason(state, exit_interval=n) for n in (4, 3)]
        if dist.get_rank() == 1:
            stop.since -= 61  # its clock alone says that the minute has passed
        return [*reasons, stop.exit_reason(state, exit_duration_in_mins=1), stop.exit_reason(state)]


def test_intervals_and_durations_are_agreed() -> None:
    interval, duration = "iteration 6 is a multiple of exit_interval (3)", "exit_duration_in_mins (1) reached"
    with minloop.stop_signals(signals=()) as stop, pytest.raises(ValueError, match=r"in_mins \(0\) must be positive"):
        stop.exit_reason(mock.Mock(), exit_duration_in_mins=0)
    assert run_ranks(2, intervals_and_durations) == [[None, interval, duration, None]] * 2


def test_a_second_ctrl_c_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with minloop.stop_signals() as outer, minloop.stop_signals() as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert stop.received is outer.received is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loaders_workers_read_on_until_their_rank_ends() -> None:
    """torchrun sends SIGTERM to all processes of a rank, which is to take one more step; multiprocessing does, too."""
    plain, loader = (build_loader(Text(), groups(), micro_batch_size=2, num_workers=n) for n in (0, 1))
    for _ in range(8):
        for worker in multiprocessing.active_children():
            for number in STOP_SIGNALS:
                subprocess.run(["kill", f"-{number.value}", str(worker.pid)], check=True)
        assert torch.equal(next(loader)["tokens"], next(plain)["tokens"])
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(timeout=20)
    assert worker.exitcode == 0


def test_in_another_thread_it_is_refused() -> None:
    errors: list[RuntimeError] = []

    def enter() -> None:
        try:
            with minloop.stop_signals():
                pass
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter, name="worker")
    thread.start()
    thread.join()
    assert "stop_signals in thread 'worker'" in str(errors[0])
