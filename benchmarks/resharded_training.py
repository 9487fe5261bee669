"""Does training go on alike when a checkpoint is loaded into another layout, weights and optimizer?

    NVIDIA_TF32_OVERRIDE=0 CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/resharded_training.py    4 ranks; `2` are two
    CUDA_VISIBLE_DEVICES= python benchmarks/resharded_training.py        on CPU ranks, in fp32 alone

Ranks share GPUs where there are fewer (tests/ranks.py).

A Llama of 8 layers trains TRAINED steps in the first layout of LAYOUTS, is saved, and trains CONTINUED steps more. The
same steps are made from the checkpoint in every layout, the first one among them, and their losses compared, relative:
in fp32 (without TF32, by the variable above), and on GPUs in bf16, too.

In fp32 FP32_LIMIT is allowed. In bf16 a layout may differ no more than runs of the first layout do whose weights are
rounded otherwise after the load, as sameness_gpu.py measures it. "of_allowed" is a layout's part of either. Rows go to
results/resharded_training.json, in the place of earlier ones of the same devices, ranks and precision.
"""

import json
import os
import platform
import sys
import tempfile
from importlib import metadata, util
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from ranks import run_ranks
from sameness_cases import LLAMA, ZERO1, layout
from small import small_state, text_loader, train

import minloop
from benchmarks.sameness_gpu import SEEDS, worst
from benchmarks.weights import round_otherwise

RESULTS = Path(__file__).parent / "results" / "resharded_training.json"
TRAINED, CONTINUED, FP32_LIMIT = 10, 20, 1e-4
MODEL = LLAMA | {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "init_method_std": 0.05,
    "lr": 3e-4,  # at 1e-3 any rounding moves a single loss in bf16 as far as the whole spread
    "optimizer": {"adam_eps": 1e-5},  # with 1e-8 rounding grows: gradients near zero make steps of full size
}
LAYOUTS = {  # by the number of ranks; the first one trains and saves
    2: {
        "TP2": layout(2, tp=2),
        "DP2": layout(2),
        "PP2": layout(2, pp=2),
        "DP2 ZeRO-1": layout(2, ddp=ZERO1),
    },
    4: {
        "TP2×DP2": layout(4, tp=2),
        "TP4": layout(4, tp=4),
        "PP4": layout(4, pp=4),
        "TP2×PP2": layout(4, tp=2, pp=2),
        "DP4 ZeRO-1": layout(4, ddp=ZERO1),
    },
}


def train_and_save(directory, options):
    """(loss, gradient norm) of each step after the save, and whose layers they were."""
    state = small_state(seed=1, **options)
    loader = text_loader(state)
    train(state, loader, TRAINED)
    minloop.save_checkpoint(directory, state, loader)
    history, implementation = train(state, loader, CONTINUED), state.config.transformer_impl
    minloop.shutdown_distributed()
    return history, implementation


def go_on(directory, options, rounding_seed=None):
    """(loss, gradient norm) of the same steps, from the checkpoint."""
    state = small_state(seed=99, **options)
    loader = text_loader(state)
    minloop.load_checkpoint(directory, state, loader)
    if rounding_seed is not None:
        round_otherwise(state, rounding_seed)
    history = train(state, loader, CONTINUED)
    minloop.check_replicas(state)
    minloop.shutdown_distributed()
    return history


def runs(directory, layouts, precision):
    """On every rank: the uninterrupted run, those of all layouts, and in bf16 those with weights rounded otherwise."""
    model = MODEL | ({"bf16": True} if precision == "bf16" else {})
    first, *_ = layouts.values()
    straight, implementation = train_and_save(directory, model | first)
    resumed = {name: go_on(directory, model | options) for name, options in layouts.items()}
    seeds = SEEDS if precision == "bf16" else ()
    return straight, resumed, [go_on(directory, model | first, seed) for seed in seeds], implementation


def compare(ranks, precision):
    """One row of the results."""
    layouts = {name: options for name, (_, options) in LAYOUTS[ranks].items()}
    with tempfile.TemporaryDirectory() as directory:
        made = run_ranks(ranks, runs, directory, layouts, precision, timeout=500)
    straight, resumed, others, implementation = made[0]
    spread = [worst(one, other)["loss"] for one, other in combinations([straight, *others], 2)]
    allowed = max(spread) if precision == "bf16" else FP32_LIMIT
    differences = {name: worst(history, straight)["loss"] for name, history in resumed.items()}
    for name, difference in differences.items():
        print(f"{precision} {name:10} losses differ by {difference:.1e} at most, {allowed:.1e} allowed", flush=True)
    return {
        "precision": precision,
        "transformer_impl": implementation,
        "saved_in": next(iter(layouts)),
        "allowed": allowed,
        "losses_uninterrupted": [loss for loss, _ in straight],
        "cells": [
            {"layout": name, "worst_relative_loss": difference, "of_allowed": difference / allowed}
            for name, difference in differences.items()
        ],
    }


def machine(ranks):
    on_gpu = torch.cuda.is_available()
    packages = ("torch", "megatron-core", *(["transformer-engine"] if util.find_spec("transformer_engine") else []))
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}",
        "gpus": torch.cuda.device_count(),
        "ranks": ranks,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "steps": {"before": TRAINED, "compared": CONTINUED},
    }


def write(row):
    """Put a row in the place of an earlier one of its devices, ranks and precision."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [old for old in earlier if any(old[key] != row[key] for key in ("device", "gpus", "ranks", "precision"))]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([*kept, row], indent=1, ensure_ascii=False) + "\n")


def main(words):
    """Compare and write; returns whether every layout stayed within what is allowed."""
    on_gpu, ranks = torch.cuda.is_available(), int(words[0]) if words else 4
    if ranks not in LAYOUTS:
        raise ValueError(f"{ranks} ranks: there are layouts for {[*LAYOUTS]}")
    if on_gpu and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        raise ValueError("NVIDIA_TF32_OVERRIDE is not 0, so that fp32's products would be rounded to TF32: set it to 0")
    rows: list[dict[str, Any]] = []
    for precision in ("fp32", "bf16") if on_gpu else ("fp32",):
        rows.append(machine(ranks) | compare(ranks, precision))
        write(rows[-1])
    return all(cell["of_allowed"] <= 1 for row in rows for cell in row["cells"])


if __name__ == "__main__":
    if not main(sys.argv[1:]):
        sys.exit("some layouts differ by more than is allowed")
