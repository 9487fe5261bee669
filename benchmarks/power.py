"""What bounds the speed of a shape, the chip's power? Clock and power while minloop trains it, and what limits them.

    PYTHONPATH=$PWD python benchmarks/power.py C steps=5
    PYTHONPATH=$PWD NVTE_FUSED_ATTN=0 python benchmarks/power.py C steps=5 attention_backend=flash

Words as for compare_peers.py, on one GPU; two steps warm up. nvidia-smi looks twice a second. Each run is added to
results/power_<shape>.json, in the place of one with the same words.
"""

import json
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compare_peers import machine, measure, read_words, timed

RESULTS = Path(__file__).parent / "results"
ASKED = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap,clocks_event_reasons.sw_thermal_slowdown"
LOOK = ["nvidia-smi", "-i", "0", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits", "-lms", "500"]


def samples(output: str) -> list[dict[str, Any]]:
    """Clock in MHz, power in W, and whether the limits of power and temperature lower the clock, of each look."""
    rows = [line.split(", ") for line in output.splitlines() if line.count(", ") == 3]
    return [
        {"mhz": int(mhz), "watts": float(watts), "power_cap": cap == "Active", "too_hot": hot == "Active"}
        for mhz, watts, cap, hot in rows
    ]


def row(words: list[str]) -> dict[str, Any]:
    asked = read_words([words[0], "minloop", "warmup=2", *words[1:]])
    with subprocess.Popen(LOOK, stdout=subprocess.PIPE, text=True) as looking:
        try:
            result = measure("minloop", asked)
        finally:
            looking.terminate()
        seen = samples(looking.communicate()[0])
    busy = [look for look in seen if look["watts"] > 0.9 * max(look["watts"] for look in seen)]
    found = {name: statistics.median(look[name] for look in busy) for name in ("mhz", "watts")}
    found |= {"power_cap": statistics.mean(look["power_cap"] for look in busy)}
    found |= {"too_hot": statistics.mean(look["too_hot"] for look in busy), "looks": len(busy)}
    steps = [round(taken, 1) for taken in timed(result, asked)]
    day = datetime.now(UTC).date().isoformat()
    return {"words": words, "step_ms": steps, **found, "versions": result.versions, "machine": machine(), "date": day}


def main(words: list[str]) -> None:
    made = row(words)
    print(made)
    file = RESULTS / f"power_{words[0]}.json"
    earlier = json.loads(file.read_text()) if file.exists() else []
    kept = [other for other in earlier if other["words"] != words]
    file.write_text(json.dumps([*kept, made], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
