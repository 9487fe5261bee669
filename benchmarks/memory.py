"""What saves memory, how much, and what it costs in speed: shape D, each way of saving in its own run.

    PYTHONPATH=$PWD OMP_NUM_THREADS=16 python benchmarks/memory.py   # every case, about a minute each
    PYTHONPATH=$PWD python benchmarks/memory.py plain offload steps=4 timeout=120

Words are names of CASES, all if there is none, and `name=value`: `steps=3`, `warmup=1`, `timeout=240` seconds a case,
`shape=D`, `gpus=2`, `global_batch_size=8`. Rows go to results/memory.json after every case: the highest peak over
steps, tokens per second and GPU, and what `minloop.estimate_memory` says of the same configs. An optimizer on the CPU
steps with OMP_NUM_THREADS threads a rank; with one where several ranks are started without it.
"""

import sys
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig

import minloop
from benchmarks.cases import keep, one_run, read_cases, run_cases, that_fit
from benchmarks.shapes import Run

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PRECISION_AWARE = {"use_precision_aware_optimizer": True}
MOMENTS = PRECISION_AWARE | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OFFLOAD = PRECISION_AWARE | {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,  # of D's 64 GB a rank: all of it fills the host's memory
    "overlap_cpu_optimizer_d2h_h2d": True,
}
ONE_GPU = {"grad_reduce_in_fp32": False, "gpus": 1}


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
    # one GPU holds D only with less than 14 bytes a parameter, and few of its activations
    "one_gpu_recompute_full": ONE_GPU | MOMENTS | FULL,
    "one_gpu_recompute_mlp": ONE_GPU | MOMENTS | selective("core_attn", "mlp"),
    "one_gpu_offload": ONE_GPU | FULL | OFFLOAD,
}


def estimate(run: Run, fields: dict[str, Any]) -> minloop.MemoryEstimate:
    """What minloop expects of this case, from configs as throughput.py builds them."""
    shape = run.shape

    def of(kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}

    kernels = {"bf16": True, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    config = minloop.build_config(**(shape.transformer_fields() | kernels | of(minloop.TransformerConfig)))
    torch_fsdp = "reshard_after_forward" in fields
    ddp_fields = of(TorchFullyShardedDataParallelConfig if torch_fsdp else DistributedDataParallelConfig)
    ddp_config = minloop.build_ddp_config(config, **({"use_distributed_optimizer": True} | ddp_fields))
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


def with_estimate(made: dict[str, Any], run: Run) -> dict[str, Any]:
    """A case's row, with the estimate beside what it measured."""
    fields = CASES[made["case"]]
    try:
        expected = estimate(one_run(run, fields), fields)
    except ValueError as error:  # mostly the run's own, which does not end the others
        return {"error": str(error)} | made
    parts = asdict(expected) | {"total": expected.total}
    made["estimate_gib"] = {part: round(size / 2**30, 2) for part, size in parts.items()}
    if made.get("peak_gib"):  # none on a CPU
        made["estimate_error"] = round(expected.total / 2**30 / made["peak_gib"] - 1, 4)
    return made


def main(given: list[str]) -> None:
    counts = {"shape": "D", "gpus": "2", "global_batch_size": "8", "steps": "3", "warmup": "1", "timeout": "240"}
    asked = that_fit(read_cases(given, CASES, counts), CASES)
    keep((with_estimate(made, asked.run) for made in run_cases(asked, CASES)), "memory.json")


if __name__ == "__main__":
    main(sys.argv[1:])
