"""What makes a mixture of experts fast?  Eight layers of Qwen3-30B-A3B, each way of computing them in its own run.

    PYTHONPATH=$PWD python benchmarks/moe.py                         # every case, about a minute each
    PYTHONPATH=$PWD python benchmarks/moe.py all_fused no_permute_fusion steps=8 moe_router_force_load_balancing=True

Words as cases.py says. `all_fused` is what `minloop.build_config` chooses for one GPU, ep2 the same over two; each of
the others leaves out one of its parts. Rows go to results/moe.json after each.
"""

import sys
from typing import Any

from benchmarks.cases import keep, read_cases, run_cases, that_fit

DEFAULTS = {"shape": "E", "steps": "7", "warmup": "4", "timeout": "240"}
CASES: dict[str, dict[str, Any]] = {
    "all_fused": {},
    "no_permute_fusion": {"moe_permute_fusion": False},
    "no_router_fusion": {"moe_router_fusion": False},
    # which multiplies all experts in one launch only where it adds to main_grad itself
    "a_product_for_each_expert": {"gradient_accumulation_fusion": False},
    "no_grouped_gemm": {"moe_grouped_gemm": False},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "ep2": {"gpus": 2, "expert_model_parallel_size": 2},
    "ep2_no_permute_fusion": {"gpus": 2, "expert_model_parallel_size": 2, "moe_permute_fusion": False},
    "ep2_allgather": {"gpus": 2, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
}

if __name__ == "__main__":
    asked = that_fit(read_cases(sys.argv[1:], CASES, DEFAULTS), CASES)
    keep(run_cases(asked, CASES), "moe.json")
