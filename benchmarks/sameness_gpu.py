"""Does every layout of two and four ranks train alike on GPUs, in bf16, with Transformer Engine's layers?

    CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/sameness_gpu.py      writes results/sameness_gpu.json
    python benchmarks/sameness_gpu.py EP4 "TP4+SP" Llama         some layouts and architectures, printed only
    python benchmarks/sameness_gpu.py EP4 Llama some.json        the same, written to a file of this name

Ranks share GPUs where there are fewer (tests/ranks.py). Without any, CPU ranks train, with mcore's local layers, and
nothing is written.

bf16 rounds every activation, so that no two layouts agree to the last digit. What can be asked is that a layout differs
from one GPU no more than one GPU differs from itself when its initial weights are rounded otherwise. That spread is
measured first: seven more runs on one GPU, each with about half of the weights moved to a neighbouring bf16 number; it
is the worst difference of any two of the eight. Compared are the losses and gradient norms of 20 Adam steps on the same
global batches, relative; "of_spread" is a layout's worst difference over the spread.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from itertools import combinations
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from ranks import run_ranks
from sameness_cases import LAYOUTS as ON_CPU
from sameness_cases import LLAMA, SP, ZERO1, layout
from small import shared_state, text_loader, train

import minloop
from benchmarks.weights import round_otherwise

RESULTS = Path(__file__).parent / "results" / "sameness_gpu.json"
STEPS, SEEDS = 20, range(1, 8)
MODEL = {
    "bf16": True,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "init_method_std": 0.05,
    "lr": 1e-3,
}
MOE = LLAMA | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
ARCHITECTURES = {
    "GPT-2": {},
    "Llama": LLAMA,
    "MoE, alltoall, grouped GEMM": MOE | {"moe_token_dispatcher_type": "alltoall"},
    "MoE, allgather, grouped GEMM": MOE | {"moe_token_dispatcher_type": "allgather"},
    "GPT-2, tied": {"gpt": {"share_embeddings_and_output_weights": True}},
}
LAYOUTS = {
    "TP2": layout(2, tp=2),
    "TP2+SP": layout(2, tp=2, **SP),
    "PP2": layout(2, pp=2),
    "PP2 VPP2": layout(2, pp=2, vpp=2),
    "CP2 p2p": layout(2, cp=2, cp_comm_type="p2p"),
    "CP2 a2a": layout(2, cp=2, cp_comm_type="a2a"),
    "CP2 all_gather": layout(2, cp=2, cp_comm_type="all_gather"),
    "EP2": layout(2, ep=2),
    "TP2+SP, ETP1, EP2": layout(2, tp=2, ep=2, expert_tensor_parallel_size=1, **SP),
    "DP2": layout(2),
    "DP2 ZeRO-1, both overlaps": layout(2, ddp=ZERO1),
    "PP2 VPP2×DP2 ZeRO-1": layout(4, pp=2, vpp=2, ddp=ZERO1),
    **{
        name: ON_CPU[name]
        for name in (
            *("TP4+SP", "TP2+SP×PP2", "TP2+SP×CP2 ZeRO-1", "CP4 p2p", "CP4 a2a+p2p [2, 2]"),
            *("EP4", "TP2+SP×EP2", "TP2+SP×EP2, ETP1"),
        )
    },
}


def run(directory, options, *, first=False, rounding_seed=None):
    """(loss, gradient norm) of each step, from the weights in `directory`, which the first run writes."""
    state = shared_state(directory, first, **(MODEL | options))
    if rounding_seed is not None:
        round_otherwise(state, rounding_seed)
    history = train(state, text_loader(state), STEPS)
    minloop.check_replicas(state)
    minloop.shutdown_distributed()
    return history


def references(folder, options):
    """A run on one GPU, and those with weights rounded otherwise."""
    straight = run(folder, options, first=True)
    return straight, [run(folder, options, rounding_seed=seed) for seed in SEEDS]


def row(directory, options, architectures):
    """Architecture → its run in one layout, or why it is refused."""
    results = {}
    for name, architecture in architectures.items():
        try:
            results[name] = run(f"{directory}/{name}", architecture | options)
        except (ValueError, AssertionError, NotImplementedError) as error:
            minloop.shutdown_distributed()
            results[name] = str(error)
    return results


def worst(history, reference):
    """The worst relative difference of losses, and of gradient norms."""
    pairs = list(zip(history, reference, strict=True))
    return {
        name: max(abs(a[position] - b[position]) / abs(b[position]) for a, b in pairs)
        for position, name in enumerate(("loss", "grad_norm"))
    }


def measure(result, layouts, architectures):
    """Fill in the losses and spreads on one GPU, then the cells; yield after each row of them."""
    gpus = torch.cuda.device_count()
    # Everything here waits for the host more than for the GPUs, until ranks share one and wait for each other's turns.
    rows = 5 if gpus >= max(ranks for ranks, _ in layouts.values()) else 1
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(5 if gpus else 1) as pool,
        ThreadPoolExecutor(rows) as pool_of_rows,
    ):
        cases = [(f"{directory}/{name}", options) for name, options in architectures.items()]
        made = pool.map(lambda case: run_ranks(1, references, *case, timeout=500)[0], cases)
        runs = dict(zip(architectures, made, strict=True))
        spreads = {
            name: {
                key: max(worst(one, other)[key] for one, other in combinations([straight, *others], 2))
                for key in ("loss", "grad_norm")
            }
            for name, (straight, others) in runs.items()
        }
        result["losses_on_one_gpu"] = {name: [loss for loss, _ in straight] for name, (straight, _) in runs.items()}
        result |= {"spread_on_one_gpu": spreads, "cells": []}
        print(json.dumps(spreads, indent=1), flush=True)

        def train_row(case):
            return run_ranks(case[0], row, directory, case[1], architectures, timeout=500)[0]

        trained = pool_of_rows.map(train_row, layouts.values())
        for (name, (ranks, _)), outcomes in zip(layouts.items(), trained, strict=True):
            for architecture, outcome in outcomes.items():
                cell = {"layout": name, "architecture": architecture, "ranks": ranks}
                cell |= compared(outcome, runs[architecture][0], spreads[architecture])
                result["cells"].append(cell)
                print(cell, flush=True)
            yield


def compared(outcome, reference, spread):
    """What a cell says of one run, or of its refusal."""
    if isinstance(outcome, str):
        return {"refused": outcome}
    difference = worst(outcome, reference)
    return difference | {"of_spread": max(difference[key] / spread[key] for key in ("loss", "grad_norm"))}


def main(words):
    names = [word for word in words if not word.endswith(".json")]
    files = [Path(word) for word in words if word.endswith(".json")] or ([] if names else [RESULTS])
    if unknown := set(names) - LAYOUTS.keys() - ARCHITECTURES.keys():
        raise ValueError(f"neither a layout nor an architecture: {', '.join(sorted(unknown))}")
    on_gpu = torch.cuda.is_available()
    layouts = {name: case for name, case in LAYOUTS.items() if name in names} or LAYOUTS
    architectures = {name: case for name, case in ARCHITECTURES.items() if name in names} or ARCHITECTURES
    packages = ("torch", "megatron-core", *(["transformer-engine"] if util.find_spec("transformer_engine") else []))
    result = {name.replace("-", "_"): metadata.version(name) for name in packages} | {"steps": STEPS}
    result["gpu"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}" if on_gpu else "none"
    for _ in measure(result, layouts, architectures):
        for file in files if on_gpu else ():
            file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    ratios = [cell["of_spread"] for cell in result["cells"] if "of_spread" in cell]
    within = sum(ratio <= 1 for ratio in ratios)
    print(f"{within} of {len(ratios)} cells are within the spread, the largest at {max(ratios):.2f} of it")


if __name__ == "__main__":
    main(sys.argv[1:])
