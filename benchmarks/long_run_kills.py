"""Does a run that is killed twenty times end as if nothing had been?  examples/long_run.py, two ranks, on the CPU.

    PYTHONPATH=$PWD python benchmarks/long_run_kills.py [kills=20] [train_iters=400]

Under torchrun with restarts, at random moments: one rank or all by `kill -9`, a rank by SIGTERM (the run then saves and
ends with exit code 0), torchrun and its ranks at once, and a rank that stands still (SIGSTOP), which costs the time-out
of 5 s and torchrun's 30 s of patience. What ended is started again by the same command. Weights, and of every step the
loss, gradient norm and learning rate, are compared with those of a run that nobody disturbed. The result goes to
results/long_run.json.
"""

import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import minloop
from minloop.metrics import OF_THE_MACHINE

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "long_run.json"
PATIENCE = 120.0  # seconds in which a run must come to its next step
START = "import sys; sys.path.insert(0, {examples!r}); import long_run; long_run.main(**{options!r})"


class LongRun:
    """examples/long_run.py under torchrun, and the ranks that are alive of it."""

    def __init__(self, folder: Path, *, ranks: int = 2, **options: Any) -> None:
        self.folder, self.ranks = folder, ranks
        self.options = {"directory": str(folder), **options}
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[tuple[int, ...], float] = {}  # ranks → the time of the last record when they were first seen
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, max_restarts: int) -> subprocess.Popen[bytes]:
        script = START.format(examples=str(ROOT / "examples"), options=self.options)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={self.ranks}", f"--max-restarts={max_restarts}", "--no-python"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [*launcher, sys.executable, "-c", script],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def alive(self) -> list[psutil.Process]:
        """The ranks' processes, first rank first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.process is not None and self.process.poll() is None:
                children = psutil.Process(self.process.pid).children()
                return sorted(children, key=lambda child: child.pid)
        return []

    def records(self) -> list[dict[str, float]]:
        """What is logged, but for the machine's own numbers."""
        log = self.folder / "log.jsonl"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []  # what follows the last one is being written
        return [{k: v for k, v in json.loads(line).items() if k not in OF_THE_MACHINE} for line in lines]

    def trains(self, without: Sequence[psutil.Process] = ()) -> bool:
        """Whether the ranks that are alive, none of them one of `without`, have logged a step."""
        ranks, last = (
            [rank.pid for rank in self.alive()],
            max((record["time"] for record in self.records()), default=0.0),
        )
        if len(ranks) < self.ranks or {*ranks} & {rank.pid for rank in without}:
            return False
        return last > self.seen.setdefault(tuple(ranks), last)

    def outcome(self) -> tuple[list[dict[str, float]], bytes]:
        """Every record but for its time, and the weights at the end."""
        records = [{k: v for k, v in record.items() if k != "time"} for record in self.records()]
        with tempfile.TemporaryDirectory() as folder:
            return records, minloop.export_weights(self.folder, folder).read_bytes()


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> float:
    """Return the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > patience:
            raise TimeoutError(f"not within {patience} s")
        time.sleep(0.05)
    return time.monotonic() - begin


def disturb(run: LongRun, kind: str) -> None:
    """End or stop something of a run that trains."""
    assert run.process is not None
    ranks = run.alive()
    victims = {
        "one rank": [random.choice(ranks)],
        "all ranks": ranks,
        "torchrun": [psutil.Process(run.process.pid), *ranks],
    }
    if kind in victims:
        for victim in victims[kind]:
            victim.kill()
    else:
        random.choice(ranks).send_signal(getattr(signal, kind))


def survive(run: LongRun, kinds: Sequence[str], longest: float = 3.0) -> list[dict[str, Any]]:
    """Disturb a run so, each up to `longest` seconds after it trains, and let it end. Returns what became of each."""
    history: list[dict[str, Any]] = []
    try:
        for kind in kinds:
            process = run.process or run.start(max_restarts=1000)
            wait_until(run.trains)
            time.sleep(random.uniform(0, longest))
            iteration, ranks = run.records()[-1]["iteration"], run.alive()
            disturb(run, kind)
            if kind in ("SIGTERM", "torchrun"):
                exit_code, run.process = process.wait(PATIENCE), None
                assert exit_code == (0 if kind == "SIGTERM" else -9), f"{kind}: exit code {exit_code}"
                run.start(max_restarts=1000)
            seconds = wait_until(partial(run.trains, without=ranks))
            history.append({"kind": kind, "iteration": iteration, "seconds_until_it_trains": round(seconds, 1)})
            print(history[-1], flush=True)
        process = run.process or run.start(max_restarts=1000)
        assert process.wait(PATIENCE * 5) == 0
    finally:
        if run.process is not None:
            for rank in run.alive():
                rank.kill()
            run.process.kill()
            run.process.wait()
    return history


def main(words: Sequence[str]) -> None:
    options = {"kills": 20, "train_iters": 400} | {name: int(value) for name, value in (w.split("=") for w in words)}
    kinds = ["one rank", "all ranks", "SIGTERM", "one rank", "torchrun", "one rank", "all ranks", "SIGSTOP"]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"train_iters": options["train_iters"], "num_files": 50, "timeout_in_seconds": 5}
        plain, killed = (LongRun(Path(folder, name), **settings) for name in ("plain", "killed"))
        survive(plain, [])
        undisturbed = time.monotonic() - begin
        history = survive(killed, [kinds[index % len(kinds)] for index in range(options["kills"])])
        (records, weights), (expected, weights_expected) = killed.outcome(), plain.outcome()
        superseded = Path(killed.folder, "log.jsonl.superseded")
        replayed = len(superseded.read_text().splitlines()) if superseded.exists() else 0
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 2 ranks on gloo",
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        **options,
        "records_compared": len(expected),
        "records_equal": records == expected,
        "weights_equal": weights == weights_expected,
        "steps_trained_again": replayed,
        "seconds_undisturbed": round(undisturbed, 1),
        "seconds_in_all": round(time.monotonic() - begin, 1),
        "history": history,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "history"}, indent=1))
    assert result["records_equal"], "the logs differ"
    assert result["weights_equal"], "the weights differ"


if __name__ == "__main__":
    main(sys.argv[1:])
