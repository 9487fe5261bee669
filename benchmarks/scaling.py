"""How much of one GPU's speed is left on two and four?  Shape C with more tokens for more GPUs, or split over them.

    PYTHONPATH=$PWD CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/scaling.py   # about 80 s a case
    PYTHONPATH=$PWD python benchmarks/scaling.py dp1 dp2 steps=12
    PYTHONPATH=$PWD python benchmarks/scaling.py shape=tiny tp_comm_overlap=False   # small enough for a CPU

Words as cases.py says, and fields of the cases, in the place of their own. Data parallel cases (ZeRO-1) give every GPU
16 microbatches, so that the whole batch grows with the GPUs. Tensor parallel cases split the batch of one GPU's case,
dp1, with sequence parallelism and `tp_comm_overlap`, without NVLink multicast, which not every machine grants, unless
UB_SKIPMC=0 is set. A case that needs more GPUs than there are is left out.
"efficiency" is the rate per GPU over that of the first case of the call, "of_product" the same with each rate over that
of a large matrix product beside it, so that a colder chip counts for nothing. Rows go to results/scaling.json.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Asked, keep, read_cases, run_cases, that_fit

DEFAULTS = {"shape": "C", "steps": "8", "warmup": "3", "timeout": "300"}
MICROBATCHES = 16  # of each GPU


def data_parallel(gpus: int) -> dict[str, Any]:
    return {"gpus": gpus, "global_batch_size": MICROBATCHES * gpus}


def tensor_parallel(gpus: int) -> dict[str, Any]:
    overlapped = {"sequence_parallel": True, "tp_comm_overlap": True}
    return {"gpus": gpus, "global_batch_size": MICROBATCHES, "tensor_model_parallel_size": gpus} | overlapped


CASES: dict[str, dict[str, Any]] = {
    **{f"dp{gpus}": data_parallel(gpus) for gpus in (1, 2, 4)},
    **{f"tp{gpus}": tensor_parallel(gpus) for gpus in (2, 4)},  # tp1 is dp1
}


def against(first: dict[str, Any], made: dict[str, Any]) -> dict[str, float]:
    """A row's rate over the first row's, plain and with each over its own matrix product's; nothing if one failed."""
    if "error" in first or "error" in made:
        return {}
    ratio = made["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"]
    products = [statistics.mean(each["product_tflops"] or [0]) for each in (first, made)]
    of_product = {"of_product": round(ratio * products[0] / products[1], 4)} if all(products) else {}
    return {"efficiency": round(ratio, 4)} | of_product


def compared(asked: Asked, cases: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    first: dict[str, Any] = {}
    for made in run_cases(asked, cases):
        first = first or made
        yield made | against(first, made)


def main(words: list[str]) -> None:
    os.environ.setdefault("UB_SKIPMC", "1")  # for the processes that train
    given = {word.split("=", 1)[0] for word in words if "=" in word}
    cases = {name: {key: value for key, value in case.items() if key not in given} for name, case in CASES.items()}
    keep(compared(that_fit(read_cases(words, cases, DEFAULTS), cases), cases), "scaling.json")


if __name__ == "__main__":
    main(sys.argv[1:])
