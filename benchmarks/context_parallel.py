"""What do sequences over two GPUs cost?  Llama-3-8B's layers, some of them, on sequences of 32 and 128 thousand tokens.

    PYTHONPATH=$PWD python benchmarks/context_parallel.py            # every case, one or two minutes each
    PYTHONPATH=$PWD python benchmarks/context_parallel.py 32k_cp1 32k_p2p timeout=200
    PYTHONPATH=$PWD python benchmarks/context_parallel.py shape=tiny num_layers=2 steps=3 sequence_length=64

Words as cases.py says; a `sequence_length` takes the place of both. Every case reads the same tokens from the same
weights, one sequence a step: the rates of one GPU and of two are per GPU, so that their quotient is what is lost. The
loss of a step is the same in all cases of a sequence length, but for rounding. With 128 thousand tokens all layers are
recomputed. Rows go to results/context_parallel.json after each.
"""

import sys
from typing import Any

from benchmarks.cases import keep, read_cases, run_cases, that_fit
from benchmarks.memory import FULL

DEFAULTS = {
    "shape": "D",
    "num_layers": "4",
    "global_batch_size": "1",
    "steps": "6",
    "warmup": "2",
    "timeout": "200",
}
LENGTHS: dict[str, dict[str, Any]] = {"32k": {"sequence_length": 32_768}, "128k": {"sequence_length": 131_072} | FULL}
KINDS: dict[str, dict[str, Any]] = {
    "cp1": {"gpus": 1},
    **{kind: {"gpus": 2, "context_parallel_size": 2, "cp_comm_type": kind} for kind in ("p2p", "a2a", "all_gather")},
}
CASES = {f"{length}_{kind}": a | b for length, a in LENGTHS.items() for kind, b in KINDS.items()}

if __name__ == "__main__":
    asked = read_cases(sys.argv[1:], CASES, DEFAULTS)
    given = {word.split("=", 1)[0] for word in sys.argv[1:]}
    kept = {name: {key: value for key, value in case.items() if key not in given} for name, case in CASES.items()}
    keep(run_cases(that_fit(asked, kept), kept), "context_parallel.json")
