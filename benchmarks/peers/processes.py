"""What all peers share on the driver's side: their processes, the folders they come from, and what a run gives."""

import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.shapes import Run

# What a peer's environment must not have: FSDP2's copies and products then wait for each other in one queue.
OVERLAP_FREELY: dict[str, str | None] = {"CUDA_DEVICE_MAX_CONNECTIONS": None}


@dataclass
class Result:
    """What one run of one peer gave: a mean time and a mean loss for each window of steps, in order."""

    step_ms: list[float]
    losses: list[float]
    peak_memory_gib: float
    versions: dict[str, str] = field(default_factory=dict[str, str])
    product_tflops: list[float] = field(default_factory=list[float])  # of a large product before and after, if measured

    @classmethod
    def read(cls, log: str, **measured: Any) -> "Result":
        """Return what the log's last JSON line says, whatever else it says, and what was read elsewhere in the log."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in (last_json(log) | measured).items() if name in known})


def torchrun(run: Run, program: str) -> list[str]:
    """Return the command that runs a module or a file with the run's words, one process for each GPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.gpus)]
    return [*launcher, *([] if program.endswith(".py") else ["-m"]), program, *run.words]


def check_switches(run: Run, *switches: str) -> None:
    """Raise ValueError if a run has a switch that its peer does not know: it would be measured without it."""
    if unknown := run.options.keys() - set(switches):
        raise ValueError(f"no switch {', '.join(sorted(unknown))}; there are {', '.join(switches)}")


def checkout(variable: str, file: str, what: str) -> Path:
    """Return the folder that the environment variable names.

    Raises:
        RuntimeError: it is not set, or `file` is not in the folder.
    """
    folder = os.environ.get(variable)
    if not folder or not (Path(folder) / file).exists():
        raise RuntimeError(f"{variable} is {folder!r}: set it to {what}, a folder with {file} in it")
    return Path(folder)


def last_json(log: str) -> dict[str, Any]:
    """Return the last line of a log that is a JSON object.

    Raises:
        RuntimeError: there is none, so the run failed.
    """
    for line in reversed(log.splitlines()):
        if line.startswith("{") and line.endswith("}"):
            return json.loads(line)
    raise RuntimeError(f"the run printed no result; its log ends with: {log[-2000:]}")
