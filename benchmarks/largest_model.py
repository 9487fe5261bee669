"""How large a model do two GPUs train?  Llama-3-8B's layers at sequence 4096, as many as each kind of sharding has room
for.

    PYTHONPATH=$PWD python benchmarks/largest_model.py                      # every case, one or two minutes each
    PYTHONPATH=$PWD python benchmarks/largest_model.py zero1 fsdp2 budget=128 timeout=300
    PYTHONPATH=$PWD python benchmarks/largest_model.py shape=tiny budget=0.165

Words as cases.py says, and `budget=128`, the GiB that `minloop.estimate_memory` may expect. It says how many layers
fit; three steps with so many show whether they do. If a GPU is full, a sixteenth is taken off, up to `TRIES` runs in
all, each after the other cases' runs; any other failure is the case's row. Models of fully sharded kinds are built in
parts (`init_model_with_meta_device`). Rows go to results/largest_model.json.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import minloop
from benchmarks.case_runner import ran_out
from benchmarks.cases import Asked, keep, read_cases, run_cases, words
from benchmarks.fsdp import MEGATRON, TORCH
from benchmarks.memory import FULL, estimate
from benchmarks.shapes import Run
from minloop.parameter_count import count_parameters

DEFAULTS = {"shape": "D4096", "gpus": "2", "global_batch_size": "2", "steps": "3", "warmup": "1", "timeout": "200"}
TRIES = 3

PARTS: dict[str, Any] = {"init_model_with_meta_device": True}
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "megatron_fsdp": MEGATRON | PARTS,
    "fsdp2": TORCH | {"reshard_after_forward": True} | PARTS,
}
CASES = KINDS | {f"{name}_recompute": fields | FULL for name, fields in KINDS.items()}


def with_layers(run: Run, layers: int) -> Run:
    return replace(run, shape=replace(run.shape, num_layers=layers))


def most_layers(run: Run, fields: dict[str, Any], budget: float) -> int:
    """The most layers that are expected to take no more than `budget` GiB."""
    sizes = ((layers, estimate(with_layers(run, layers), fields).total) for layers in itertools.count(1))
    return sum(1 for _ in itertools.takewhile(lambda size: size[1] <= budget * 2**30, sizes))


def with_size(made: dict[str, Any], run: Run, layers: int) -> dict[str, Any]:
    """A case's row, with the size of its model."""
    run = with_layers(run, layers)
    config = minloop.TransformerConfig(**run.shape.transformer_fields())
    return made | {
        "num_layers": layers,
        "parameters": count_parameters(config, vocab_size=run.shape.vocab_size).total,
        "estimate_gib": round(estimate(run, CASES[made["case"]]).total / 2**30, 2),
    }


def largest(asked: Asked, budget: float) -> Iterator[dict[str, Any]]:
    """The row of each case's largest model that trained, or of the last that did not."""
    layers = {name: most_layers(asked.run, CASES[name], budget) for name in asked.names}
    for name in [name for name, most in layers.items() if most == 0]:
        one = estimate(with_layers(asked.run, 1), CASES[name]).total / 2**30
        error = f"not even one layer fits budget={budget:g} GiB: it is expected to take {one:.3g} GiB"
        yield {"case": name, "fields": words(CASES[name]), "num_layers": layers.pop(name), "tries": 0, "error": error}
    for tried in range(1, TRIES + 1):
        cases = {name: CASES[name] | {"num_layers": most} for name, most in layers.items()}
        for made in run_cases(replace(asked, names=[*cases]), cases):
            name = made["case"]
            made = with_size(made, asked.run, layers.pop(name)) | {"tries": tried}
            fewer = made["num_layers"] * 15 // 16
            if not ran_out(made.get("error", "")) or tried == TRIES or fewer == 0:
                yield made
            else:
                layers[name] = fewer


def main(given: list[str]) -> None:
    budget = float(dict(word.split("=", 1) for word in given if "=" in word).get("budget", 128))
    asked = read_cases([word for word in given if not word.startswith("budget=")], CASES, DEFAULTS)
    keep(largest(asked, budget), "largest_model.json")


if __name__ == "__main__":
    main(sys.argv[1:])
