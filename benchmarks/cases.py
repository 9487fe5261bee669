"""Ways to train one shape side by side: each a run of throughput.py, a row for each.

The words of a program that does so are names of its cases, all if there is none, and `name=value`: a shape (`shape=D`),
`warmup=3` steps that do not count, `timeout=300` seconds of a case, and what shapes.read_run reads. A row is the case,
the median tokens per second and GPU, the highest peak of memory on the first rank, and the loss of each step.

Cases of as many GPUs run one after another, in the processes that case_runner.py starts; then those of another number.
"""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.case_runner import results
from benchmarks.compare_peers import RESULTS, machine
from benchmarks.peers.processes import Result
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
    """Read a program's words. Raises ValueError for a case that there is not, or too few steps."""
    names = [word for word in given if "=" not in word] or [*cases]
    if unknown := set(names) - cases.keys():
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    counts = defaults | dict(word.split("=", 1) for word in given if "=" in word)
    shape, warmup, timeout = counts.pop("shape"), int(counts.pop("warmup")), int(counts.pop("timeout"))
    run = read_run([shape, *(f"{name}={value}" for name, value in counts.items())])
    if run.steps <= warmup:
        raise ValueError(f"steps={run.steps} leave none after warmup={warmup}: take more steps, or a smaller warmup")
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


def run_cases(asked: Asked, cases: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run the cases that were asked for; what each measured, or why it did not, as it comes."""
    runs = [(name, one_run(asked.run, cases[name])) for name in asked.names]
    counts = [*dict.fromkeys(run.gpus for _, run in runs)]
    runs.sort(key=lambda each: counts.index(each[1].gpus))
    for (name, run), result in zip(runs, results([run for _, run in runs], asked.timeout), strict=True):
        made = {"case": name, "fields": words(cases[name]), "words": run.words}
        yield made | ({"error": str(result)} if isinstance(result, RuntimeError) else row(run, result, asked.warmup))


def row(run: Run, result: Result, warmup: int) -> dict[str, Any]:
    """What a run gave, its rate without the steps of the warm-up."""
    ms = statistics.median(result.step_ms[warmup:])
    return {
        "peak_gib": round(result.peak_memory_gib, 2),
        "tokens_per_s_per_gpu": round(run.shape.tokens_per_step / run.gpus / ms * 1000, 1),
        "last_loss": result.losses[-1],
        "step_ms": [round(one, 2) for one in result.step_ms],
        "losses": result.losses,
        "versions": result.versions,
        "product_tflops": result.product_tflops,
    }


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the rows, in the place of earlier ones of the same cases, of the same shape on as many GPUs.

    One that failed takes no other's place than that of one that failed, too.
    """

    def key(made: dict[str, Any]) -> list[str]:
        return [made["case"], *made.get("words", [])[:2]]

    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    file.parent.mkdir(exist_ok=True)
    measured = [key(old) for old in earlier if "error" not in old]
    rows = [made for made in rows if "error" not in made or key(made) not in measured]
    kept = [old for old in earlier if key(old) not in [key(made) for made in rows]]
    file.write_text(json.dumps({"machine": machine(), "rows": kept + rows}, indent=1) + "\n")


def keep(made: Iterable[dict[str, Any]], file: str) -> None:
    """Say what each row shows, as it is made; on a GPU write it to results/`file`."""
    rows: list[dict[str, Any]] = []
    for one in made:
        rows.append(one)
        if torch.cuda.is_available():
            write(rows, RESULTS / file)
        print({name: one[name] for name in SHOWN if name in one}, flush=True)
