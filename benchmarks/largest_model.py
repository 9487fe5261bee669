"""How large a model do two GPUs train?  Llama-3-8B's layers at sequence 4096, as many as each kind of sharding has room
for.

    PYTHONPATH=$PWD python benchmarks/largest_model.py                      # every case, one or two minutes each
    PYTHONPATH=$PWD python benchmarks/largest_model.py zero1 fsdp2 budget=128 timeout=300
    PYTHONPATH=$PWD python benchmarks/largest_model.py shape=tiny budget=0.165

Words as cases.py says, and `budget=128`, the GiB that `minloop.estimate_memory` may expect. It says how many layers
fit; three steps with so many show whether they do. If not, a sixteenth is taken off, up to `TRIES` runs in all. Models
of fully sharded kinds are built in parts (`init_model_with_meta_device`). Rows go to results/largest_model.json.
"""

import itertools
import sys
from dataclasses import replace
from typing import Any

import minloop
from benchmarks.cases import Asked, keep, read_cases, row
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


def largest(name: str, asked: Asked, budget: float) -> dict[str, Any]:
    """The row of the largest model of a case that trained."""
    layers, made = most_layers(asked.run, CASES[name], budget), dict[str, Any]()
    for tried in range(1, TRIES + 1):
        run = with_layers(asked.run, layers)
        config = minloop.TransformerConfig(**run.shape.transformer_fields())
        made = row(name, CASES[name] | {"num_layers": layers}, asked) | {
            "num_layers": layers,
            "parameters": count_parameters(config, vocab_size=run.shape.vocab_size).total,
            "estimate_gib": round(estimate(run, CASES[name]).total / 2**30, 2),
            "tries": tried,
        }
        if "error" not in made:
            break
        layers = layers * 15 // 16
    return made


def main(words: list[str]) -> None:
    budget = float(dict(word.split("=", 1) for word in words if "=" in word).get("budget", 128))
    asked = read_cases([word for word in words if not word.startswith("budget=")], CASES, DEFAULTS)
    keep((largest(name, asked, budget) for name in asked.names), "largest_model.json")


if __name__ == "__main__":
    main(sys.argv[1:])
