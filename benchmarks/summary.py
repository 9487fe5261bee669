"""results/summary.json, one row per figure, from the other results:  python benchmarks/summary.py"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "shape gpus layout precision sequence tokens_per_s_per_gpu tflops_causal peak_memory_gib peer ratio_to_peer words "
    "versions date"
).split()


def rows() -> list[dict[str, Any]]:
    """Every row of peers_*.json, the fastest of a shape first."""
    found = [row for file in sorted(RESULTS.glob("peers_*.json")) for row in json.loads(file.read_text())["rows"]]
    found.sort(key=lambda row: (row["shape"], row["gpus"], -row["tokens_per_s_per_gpu"]))
    return [{name: row.get(name) for name in COLUMNS} for row in found]


def main() -> None:
    lines = [json.dumps(row) for row in rows()]
    (RESULTS / "summary.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
