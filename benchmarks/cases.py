"""Ways to train one shape side by side: each a run of throughput.py in a process group of its own, a row for each.

The words of a program that does so are names of its cases, all if there is none, and `name=value`: a shape (`shape=D`),
`warmup=3` steps that do not count, `timeout=300` seconds of a case, and what shapes.read_run reads. A row is the case,
the median tokens per second and GPU, the highest peak of memory on the first rank, and the loss of each step.
"""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_peers import RESULTS, Comparison, machine, measure
from benchmarks.shapes import Run, read_run

SHOWN = (
    "case", "num_layers", "parameters", "estimate_gib", "peak_gib", "estimate_error", "tokens_per_s_per_gpu",
    "efficiency", "of_product", "last_loss", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the words ask for: some cases of one run, and how long each may take, seconds."""

    names: list[str]
    run: Run
    warmup: int
    timeout: int


def words(fields: dict[str, Any]) -> dict[str, str]:
    """The fields as words that throughput.py reads."""
    return {name: str(value) for name, value in fields.items()}


def read_cases(given: list[str], cases: dict[str, Any], defaults: dict[str, str]) -> Asked:
    """Read a program's words. Raises ValueError for a case that there is not."""
    names = [word for word in given if "=" not in word] or [*cases]
    if unknown := set(names) - cases.keys():
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    counts = defaults | dict(word.split("=", 1) for word in given if "=" in word)
    shape, warmup, timeout = counts.pop("shape"), int(counts.pop("warmup")), int(counts.pop("timeout"))
    run = read_run([shape, *(f"{name}={value}" for name, value in counts.items())])
    return Asked(names, run, warmup, timeout)


def one_run(run: Run, fields: dict[str, Any]) -> Run:
    """The run with a case's fields; those that are of the run or its shape, in their place."""
    base, *own = run.words
    return read_run([base, *own, *(f"{name}={value}" for name, value in words(fields).items())])


def that_fit(asked: Asked, cases: dict[str, dict[str, Any]]) -> Asked:
    """Leave out, and name, cases that say more `gpus` than there are; without any GPU as many CPU ranks train."""
    gpus = torch.cuda.device_count()
    needed = {name: cases[name].get("gpus", asked.run.gpus) for name in asked.names}
    too_large = [name for name in asked.names if 0 < gpus < needed[name]]
    for name in too_large:
        print(f"{name} is left out: it needs {needed[name]} GPUs, and there are {gpus}", flush=True)
    return replace(asked, names=[name for name in asked.names if name not in too_large])


def row(name: str, fields: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """Run one case; what it measured, or why it did not."""
    run = one_run(asked.run, fields)
    made: dict[str, Any] = {"case": name, "fields": words(fields), "words": run.words}
    try:
        result = measure("minloop", Comparison(run, ["minloop"], 1, asked.warmup, asked.timeout))
    except RuntimeError as error:
        return made | {"error": str(error)}
    ms = statistics.median(result.step_ms[asked.warmup :])
    return made | {
        "peak_gib": round(result.peak_memory_gib, 2),
        "tokens_per_s_per_gpu": round(run.shape.tokens_per_step / run.gpus / ms * 1000, 1),
        "last_loss": result.losses[-1],
        "step_ms": [round(one, 2) for one in result.step_ms],
        "losses": result.losses,
        "versions": result.versions,
        "product_tflops": result.product_tflops,
    }


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the rows, in the place of earlier ones of the same cases."""
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    cases = {made["case"] for made in rows}
    file.parent.mkdir(exist_ok=True)
    kept = [old for old in earlier if old["case"] not in cases]
    file.write_text(json.dumps({"machine": machine(), "rows": kept + rows}, indent=1) + "\n")


def keep(made: Iterable[dict[str, Any]], file: str) -> None:
    """Write each row, as it is made, to results/`file`, and say what it shows."""
    rows: list[dict[str, Any]] = []
    for one in made:
        rows.append(one)
        write(rows, RESULTS / file)
        print({name: one[name] for name in SHOWN if name in one}, flush=True)


def run_cases(asked: Asked, cases: dict[str, dict[str, Any]], file: str) -> None:
    """Run the cases that were asked for in turn, and keep their rows."""
    keep((row(name, cases[name], asked) for name in asked.names), file)
