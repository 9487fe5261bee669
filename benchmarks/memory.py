"""What saves memory, how much, and what it costs in speed: shape D on two GPUs, each way of saving in its own run.

    PYTHONPATH=$PWD python benchmarks/memory.py                      # every case, about a minute each
    PYTHONPATH=$PWD python benchmarks/memory.py plain offload steps=4 timeout=120

Words are names of CASES, all if there is none, and `name=value`: `steps=3`, `warmup=1`, `timeout=90` seconds of a case,
`shape=D`, `gpus=2`, `global_batch_size=8`. Rows go to results/memory.json after every case: the highest peak over
steps, tokens per second and GPU, and what `minloop.estimate_memory` says of the same configs.
"""

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig

import minloop
from benchmarks.compare_peers import RESULTS, Comparison, machine, measure
from benchmarks.shapes import Run, read_run

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PRECISION_AWARE = {"use_precision_aware_optimizer": True}
MOMENTS = PRECISION_AWARE | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OFFLOAD = PRECISION_AWARE | {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,  # of D's 64 GB a rank: all of it fills the host's memory
    "overlap_cpu_optimizer_d2h_h2d": True,
}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "precision_aware": PRECISION_AWARE,
    "bf16_moments": MOMENTS,
    "bf16_gradients": PRECISION_AWARE | {"grad_reduce_in_fp32": False},
    "recompute_core_attn": selective("core_attn"),
    "recompute_mlp": selective("mlp"),
    "recompute_full": FULL,
    "offload": OFFLOAD,
}


def words(fields: dict[str, Any]) -> dict[str, str]:
    """The fields as words that throughput.py reads."""
    return {name: str(value) for name, value in fields.items()}


def estimate(run: Run, fields: dict[str, Any]) -> minloop.MemoryEstimate:
    """What minloop expects of this case, from configs as throughput.py builds them."""
    shape = run.shape

    def of(kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}

    kernels = {"bf16": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    config = minloop.build_config(**(shape.transformer_fields() | kernels | of(minloop.TransformerConfig)))
    sharded = {"use_distributed_optimizer": True}
    ddp_config = minloop.build_ddp_config(config, **(sharded | of(DistributedDataParallelConfig)))
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1e-5, **of(minloop.OptimizerConfig))
    return minloop.estimate_memory(
        config,
        ddp_config,
        optimizer_config,
        vocab_size=shape.vocab_size,
        sequence_length=shape.sequence_length,
        micro_batch_size=shape.micro_batch_size,
        world_size=run.gpus,
        position_embedding_type="rope",
    )


def row(name: str, run: Run, warmup: int, timeout: int) -> dict[str, Any]:
    """Run one case; what it measured, or why it did not, beside the estimate."""
    fields = CASES[name]
    expected = estimate(run, fields)
    made: dict[str, Any] = {"case": name, "fields": words(fields), "words": run.words}
    made["estimate_gib"] = {part: round(size / 2**30, 2) for part, size in asdict(expected).items()}
    made["estimate_gib"]["total"] = round(expected.total / 2**30, 2)
    one = Run(run.shape, run.gpus, run.steps, run.window, run.options | words(fields))
    try:
        result = measure("minloop", Comparison(one, ["minloop"], 1, warmup, timeout))
    except RuntimeError as error:
        return made | {"error": str(error)}
    ms = statistics.median(result.step_ms[warmup:])
    return made | {
        "peak_gib": round(result.peak_memory_gib, 2),
        "estimate_error": round(expected.total / 2**30 / result.peak_memory_gib - 1, 4),
        "tokens_per_s_per_gpu": round(run.shape.tokens_per_step / run.gpus / ms * 1000, 1),
        "losses": result.losses,
    }


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the rows, in the place of earlier ones of the same cases."""
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    cases = {made["case"] for made in rows}
    file.parent.mkdir(exist_ok=True)
    kept = [old for old in earlier if old["case"] not in cases]
    file.write_text(json.dumps({"machine": machine(), "rows": kept + rows}, indent=1) + "\n")


def main(given: list[str]) -> None:
    names = [word for word in given if "=" not in word] or [*CASES]
    if unknown := set(names) - CASES.keys():
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    counts = {"shape": "D", "gpus": "2", "global_batch_size": "8", "steps": "3", "warmup": "1", "timeout": "90"}
    counts |= dict(word.split("=", 1) for word in given if "=" in word)
    shape, warmup, timeout = counts.pop("shape"), int(counts.pop("warmup")), int(counts.pop("timeout"))
    run = read_run([shape, *(f"{name}={value}" for name, value in counts.items())])
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(row(name, run, warmup, timeout))
        write(rows, RESULTS / "memory.json")
        shown = ("case", "peak_gib", "estimate_error", "tokens_per_s_per_gpu", "error")
        print({key: rows[-1][key] for key in shown if key in rows[-1]}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
