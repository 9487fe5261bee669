"""How long does the first step take to come?  README's main command, from the process's start to its lines.

    PYTHONPATH=$PWD python benchmarks/startup.py repeats=5

Seconds until the first and second step's lines and until the end of examples/train.py on two ranks: once with no
compiled Python files at all (`cold`), then `repeats` times (`warm`, the medians). Rows of each machine go to
results/startup.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "startup.json"
NAMES = ("first_step_s", "second_step_s", "end_s")


def launch(bytecode: str, directory: str) -> dict[str, float]:
    """Run the example in `directory`; `bytecode` is where Python keeps compiled files."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        ROOT / "examples" / "train.py",
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    begin, times = time.perf_counter(), list[float]()
    with subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration" in line:
                times.append(time.perf_counter() - begin)
    if process.returncode or len(times) < 2:
        raise RuntimeError(f"{command} ended with {process.returncode} after {len(times)} steps")
    return dict(zip(NAMES, (times[0], times[1], time.perf_counter() - begin), strict=True))


def main(repeats: int = 5) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = [launch(f"{scratch}/bytecode", f"{scratch}") for _ in range(repeats + 1)]
    row = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores",
        "cold": {name: round(runs[0][name], 2) for name in NAMES},
        "warm": {name: round(statistics.median(run[name] for run in runs[1:]), 2) for name in NAMES},
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(row))
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    rows = [other for other in rows if other["machine"] != row["machine"]] + [row]
    RESULT.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main(**{name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])})
