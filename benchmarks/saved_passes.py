"""What do the passes over memory save that minloop's steps do without (minloop/weight_writes.py, first_gradients.py)?

    PYTHONPATH=$PWD python benchmarks/saved_passes.py

Shape A in one CUDA graph, twice, and C with one microbatch, on one GPU: by minloop, with mcore's copy of the master
weights after the update (`copied_weights=True` of throughput.py), and with all gradients zeroed before the first
microbatch adds to them (`zeroed_gradients=True`) in turn. Results go to results/saved_passes.json: the median step of
each, in milliseconds, and how many times as long as minloop's it takes. Words name another case instead:
`python benchmarks/saved_passes.py tiny steps=9`, whose figures are printed only.
"""

import json
import math
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.case_runner import results
from benchmarks.compare_peers import machine
from benchmarks.shapes import read_run

RESULT = Path(__file__).parent / "results" / "saved_passes.json"
CASES = [(["A", "steps=80", "window=20"], 2), (["C", "steps=16", "global_batch_size=1"], 1)]
"""Words, and how often."""
WAYS = {"minloop": [], "copied_weights": ["copied_weights=True"], "zeroed_gradients": ["zeroed_gradients=True"]}
WARMUP, TIMEOUT = 5, 200  # steps and seconds


def compare(words: list[str], rounds: int) -> dict[str, Any]:
    """The median step of each way, once a round, and their ratios to minloop's. Raises RuntimeError if a run fails."""
    ways = [*WAYS] * rounds
    runs = [read_run(words + WAYS[way]) for way in ways]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    versions: dict[str, str] = {}
    for way, run, result in zip(ways, runs, results(runs, TIMEOUT), strict=True):
        if isinstance(result, RuntimeError):
            raise result
        counted = result.step_ms[math.ceil(WARMUP / run.window) :]
        times[way].append(round(statistics.median(counted), 3))
        versions = result.versions
    ours, *others = (statistics.median(times[way]) for way in WAYS)
    ratios = {way: round(theirs / ours, 4) for way, theirs in zip([*WAYS][1:], others, strict=True)}
    return {"words": words, "step_ms": times, "ratio": ratios, "versions": versions}


def main(words: list[str]) -> None:
    rows = [compare(*case) for case in ([(words, 1)] if words else CASES)]
    for row in rows:
        print(row)
    if not words:
        found = {"machine": machine(), "rows": rows, "date": datetime.now(UTC).date().isoformat()}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
