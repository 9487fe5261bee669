"""What does it cost to shard weights and gradients, too?  Llama-3-8B at sequence 4096 by every kind of sharding.

    PYTHONPATH=$PWD python benchmarks/fsdp.py                        # every case on 2 GPUs, about 80 s each
    PYTHONPATH=$PWD python benchmarks/fsdp.py zero1_4 megatron_fsdp_4 hsdp_4 hsdp_4_outer_optimizer steps=10
    PYTHONPATH=$PWD python benchmarks/fsdp.py shape=tiny steps=6     # small enough for a CPU

Words as cases.py says. Names with a 4 need 4 GPUs, and are left out where there are fewer; HSDP shards over two GPUs
and repeats that on two more. Every case trains on the same tokens from the same weights, 20 steps; rows go to
results/fsdp.json after each.
"""

import sys
from typing import Any

from benchmarks.cases import keep, read_cases, run_cases, that_fit

DEFAULTS = {"shape": "D4096", "gpus": "2", "global_batch_size": "8", "steps": "20", "warmup": "5", "timeout": "200"}

MEGATRON: dict[str, Any] = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "gradient_accumulation_fusion": False,
}
TORCH: dict[str, Any] = {"use_distributed_optimizer": False, "gradient_accumulation_fusion": False}
FOUR: dict[str, Any] = {"gpus": 4, "global_batch_size": 16}
HSDP = MEGATRON | FOUR | {"num_distributed_optimizer_instances": 2}

CASES: dict[str, dict[str, Any]] = {
    "zero1": {},
    "megatron_fsdp": MEGATRON,
    "megatron_fsdp_double_buffer": MEGATRON | {"fsdp_double_buffer": True},
    "megatron_fsdp_fused_gradients": MEGATRON | {"gradient_accumulation_fusion": True},
    "fsdp2": TORCH | {"reshard_after_forward": True},
    "fsdp2_weights_stay": TORCH | {"reshard_after_forward": False},
    "zero1_4": FOUR,
    "megatron_fsdp_4": MEGATRON | FOUR,
    "hsdp_4": HSDP,
    "hsdp_4_outer_optimizer": HSDP | {"outer_dp_sharding_strategy": "optim"},  # its states over all four
}

if __name__ == "__main__":
    asked = that_fit(read_cases(sys.argv[1:], CASES, DEFAULTS), CASES)
    keep(run_cases(asked, CASES), "fsdp.json")
