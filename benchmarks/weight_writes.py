"""What does it save that Adam writes the weights as it updates their master weights (minloop/weight_writes.py)?

    PYTHONPATH=$PWD python benchmarks/weight_writes.py

Shape A in one CUDA graph, twice, and C with one microbatch, on one GPU: by minloop and with mcore's copy after the
update (`copied_weights=True` of throughput.py) in turn, each run a process of its own. Results go to
results/weight_writes.json: the median step of each, in milliseconds, and the ratio. Words name another case instead:
`python benchmarks/weight_writes.py tiny steps=9`, whose figures are printed only.
"""

import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compare_peers import machine, measure, read_words, timed

RESULT = Path(__file__).parent / "results" / "weight_writes.json"
CASES = [(["A", "steps=60", "window=20"], 2), (["C", "steps=16", "global_batch_size=1"], 1)]
"""Words, and how often."""


def step_ms(words: list[str]) -> tuple[float, dict[str, str]]:
    """The median of a run's steps after the warm-up, and what it ran with."""
    asked = read_words([words[0], "minloop", *words[1:]])
    result = measure("minloop", asked)
    return statistics.median(timed(result, asked)), result.versions


def compare(words: list[str], rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"minloop": [], "copied": []}
    versions: dict[str, str] = {}
    for _ in range(rounds):
        for name, more in (("minloop", []), ("copied", ["copied_weights=True"])):
            taken, versions = step_ms(words + more)
            times[name].append(round(taken, 3))
    ratio = statistics.median(times["copied"]) / statistics.median(times["minloop"])
    return {"words": words, "step_ms": times, "ratio": round(ratio, 4), "versions": versions}


def main(words: list[str]) -> None:
    rows = [compare(*case) for case in ([(words, 1)] if words else CASES)]
    for row in rows:
        print(row)
    if not words:
        found = {"machine": machine(), "rows": rows, "date": datetime.now(UTC).date().isoformat()}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
