"""Ending a run in order: signals that ask for it, an interval, a duration; agreed on by all ranks between two steps."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from minloop.everyone import over_all_ranks
from minloop.state import TrainState

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def pass_over_stop_signals(worker: int) -> None:
    """Leave the signals to the rank: a `worker_init_fn` of DataLoader, whose workers end when their rank does.

    torchrun and a terminal send a signal to all processes of a rank's group, Slurm to all of a task. A worker that died
    of it would make the rank fail in the midst of the step after which it is to save.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    """End this worker by SIGTERM of its rank, which waits for that where it exits with its loader open."""
    while True:
        received = signal.sigwaitinfo(STOP_SIGNALS)
        if (received.si_signo, received.si_pid) == (signal.SIGTERM, parent):
            os._exit(0)


class StopRequest:
    """Whether this run is to end after the step under way; from `stop_signals`.

    Attributes:
        received: the first signal that this rank received, or None.
        since: ``time.monotonic()`` when the context was entered, from which durations count.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.since = time.monotonic()

    def requested(self, groups: ProcessGroupCollection) -> bool:
        """Whether any rank has received a signal: the same answer on all ranks, all of which call it.

        One integer is reduced over the ranks, and reading it waits for the GPU: where steps are short, ask after every
        tenth of them. (If ranks asked themselves, one would leave while another enters a collective for ever.)
        """
        return self._agreed([self.received or 0], groups)[0] > 0

    def exit_reason(
        self, state: TrainState, *, exit_interval: int | None = None, exit_duration_in_mins: float | None = None
    ) -> str | None:
        """Why to leave the loop after this step, the same on all ranks, all of which call it; None to go on.

        Args:
            exit_interval: leave after iterations that are multiples of this number.
            exit_duration_in_mins: leave once so many minutes have passed on any rank since `stop_signals` was entered.
        Raises:
            ValueError: `exit_duration_in_mins` is not positive.
        """
        if exit_duration_in_mins is not None and not exit_duration_in_mins > 0:
            raise ValueError(f"exit_duration_in_mins ({exit_duration_in_mins}) must be positive, or None for no limit")
        minutes = (time.monotonic() - self.since) / 60
        over = exit_duration_in_mins is not None and minutes >= exit_duration_in_mins
        received, any_over = self._agreed([self.received or 0, int(over)], state.groups)
        if received:
            return f"{signal.Signals(received).name} received"
        if any_over:
            return f"exit_duration_in_mins ({exit_duration_in_mins}) reached"
        if exit_interval and state.iteration % exit_interval == 0:
            return f"iteration {state.iteration} is a multiple of exit_interval ({exit_interval})"
        return None

    def _agreed(self, values: list[int], groups: ProcessGroupCollection) -> list[int]:
        device = torch.cuda.current_device()
        return over_all_ranks(torch.tensor(values, device=device), groups).tolist()


@contextlib.contextmanager
def stop_signals(signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Generator[StopRequest]:
    """While inside, these signals ask the run to end after the step under way, and no longer end it by themselves.

    Ask with `StopRequest.requested` or `StopRequest.exit_reason` between two steps, save and leave the loop. A second
    Ctrl-C ends at once, with KeyboardInterrupt. On leaving, the handlers before are in force again: wait inside for a
    save that `start_save` began, by its ``wait()`` or by `shutdown_distributed`, or a second signal (srun and torchrun
    both pass one on) kills it. ``signals=()`` installs nothing, for the durations alone. A rank that is waiting in a
    collective meets the request after it. Of one within another both hear the signal.

    torchrun passes SIGTERM and SIGINT on to the ranks, waits for 30 seconds and kills; SIGUSR1 ends torchrun itself
    unless it is started with ``--signals-to-handle=SIGTERM,SIGINT,SIGUSR1``. It sends them to the processes that a rank
    has started, too: workers of `Loader` pass over them, those of a DataLoader of your own end, and the rank with them,
    unless they ignore them (its ``worker_init_fn``).

    Raises:
        RuntimeError: not in the main thread, where alone Python handles signals.
    """
    stop, wanted, interrupts = StopRequest(), tuple(signals), 0
    outer: dict[int, Any] = {}
    if wanted and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"stop_signals in thread {threading.current_thread().name!r}: Python handles signals in the main thread "
            "alone; enter it there, or give signals=() for the durations only"
        )

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if number in outer:
            outer[number](number, frame)
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        stop.received = stop.received or signal.Signals(number)

    with contextlib.ExitStack() as restore:
        for number in wanted:
            before = signal.signal(number, note)  # None: a handler that is not Python's and cannot be put back
            restore.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
            if getattr(before, "__code__", None) is note.__code__:
                outer[number] = before
        yield stop
