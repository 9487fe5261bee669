"""Does a checkpoint come back as it was from ten other layouts?  Weights, master weights and moments, every element.

    uv run python benchmarks/reshard_chain.py              seed 1; `3` as a word is another seed
    uv run python benchmarks/reshard_chain.py 3 hops=2     a shorter chain, printed only

Small bf16 models train for three steps in one layout and are saved. Each of ten random layouts on up to eight ranks
loads the checkpoint before it and saves, and so does the first layout in the end. Results: results/reshard_chain.json,
of GPUs (which ranks share where there are fewer, with Transformer Engine's layers, one model with its weights in FP8)
results/reshard_chain_gpu.json. FP8's weights follow from the master weights by scales of each layout, and so are
compared in the first layout alone, where the chain ends.
"""

import json
import platform
import random
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from minloop.messages import without_warnings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

with without_warnings():  # of mcore, about packages that are not installed
    from ranks import run_ranks  # the tests are no package
    from reshard import differing_tensors, load_and_save, random_layout, train_and_save
    from sameness_cases import ARCHITECTURES, LLAMA, MOE, ZERO1
    from small import WIDE

GPUS = torch.cuda.device_count()
RESULT = Path(__file__).parent / "results" / ("reshard_chain_gpu.json" if GPUS else "reshard_chain.json")
FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True}
ON_CPU: dict[str, dict[str, Any]] = {"Llama": LLAMA, "MoE, DeepSeek-like": ARCHITECTURES["MoE, DeepSeek-like"]}
ON_GPU: dict[str, dict[str, Any]] = {
    "Llama": LLAMA | WIDE,
    "MoE": LLAMA | MOE | WIDE,
    "Llama, weights in FP8": LLAMA | WIDE | FP8,
}


def chain(name: str, draw: random.Random, hops: int) -> dict[str, Any]:
    model = (ON_GPU if GPUS else ON_CPU)[name] | {"bf16": True}
    layouts = [random_layout(draw, experts="num_moe_experts" in model) for _ in range(1 + hops)]
    if "fp8" in model:  # which the distributed optimizer alone takes
        layouts = [(text.replace("DDP", "ZeRO-1"), ranks, {"ddp": ZERO1} | options) for text, ranks, options in layouts]
    layouts.append(layouts[0])
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, str(number))) for number in range(len(layouts))]
        _, ranks, options = layouts[0]
        run_ranks(ranks, train_and_save, paths[0], model | options, timeout=600)
        for number, (text, ranks, options) in enumerate(layouts[1:], start=1):
            begin = time.perf_counter()
            run_ranks(ranks, load_and_save, paths[number - 1], paths[number], model | options, timeout=600)
            print(f"{name}: {text} on {ranks} ranks, {time.perf_counter() - begin:.0f} s", flush=True)
        ((tensors, differing),) = run_ranks(1, differing_tensors, paths, "fp8" in model, timeout=600)
    print(f"{name}: {tensors} tensors, {len(differing)} differ", flush=True)
    return {"model": name, "layouts": [text for text, _, _ in layouts], "tensors": tensors, "differing": differing}


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    seed = next((int(word) for word in words if "=" not in word), 1)
    hops = int(given.get("hops", "10"))
    draw = random.Random(seed)
    rows = [chain(name, draw, hops) for name in (ON_GPU if GPUS else ON_CPU)]
    if hops == 10:
        packages = ("torch", "megatron-core", *(["transformer-engine"] if GPUS else []))
        versions = {name: version(name) for name in packages}
        device = f"{GPUS} × {torch.cuda.get_device_name()}" if GPUS else platform.machine()
        content = {"seed": seed, "machine": device, "versions": versions, "chains": rows}
        RESULT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if any(row["differing"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
