"""Does a checkpoint come back as it was from ten other layouts?  Weights, master weights and moments, every element.

    uv run python benchmarks/reshard_chain.py              seed 1; `3` as a word is another seed
    uv run python benchmarks/reshard_chain.py 3 hops=2     a shorter chain, printed only

Small bf16 models train for three steps in one layout and are saved. Each of ten random layouts on up to eight CPU ranks
loads the checkpoint before it and saves, and so does the first layout in the end. Results: results/reshard_chain.json.
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

from minloop.messages import without_warnings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

with without_warnings():  # of mcore, about packages that are not installed
    from ranks import run_ranks  # the tests are no package
    from reshard import differing_tensors, load_and_save, random_layout, train_and_save
    from sameness_cases import ARCHITECTURES, LLAMA

RESULT = Path(__file__).parent / "results" / "reshard_chain.json"
MODELS = {"Llama": LLAMA, "MoE, DeepSeek-like": ARCHITECTURES["MoE, DeepSeek-like"]}


def chain(name: str, draw: random.Random, hops: int) -> dict[str, Any]:
    experts = "num_moe_experts" in MODELS[name]
    layouts = [random_layout(draw, experts=experts) for _ in range(1 + hops)]
    layouts.append(layouts[0])
    model = MODELS[name] | {"bf16": True}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, str(number))) for number in range(len(layouts))]
        _, ranks, options = layouts[0]
        run_ranks(ranks, train_and_save, paths[0], model | options, timeout=600)
        for number, (text, ranks, options) in enumerate(layouts[1:], start=1):
            begin = time.perf_counter()
            run_ranks(ranks, load_and_save, paths[number - 1], paths[number], model | options, timeout=600)
            print(f"{name}: {text} on {ranks} ranks, {time.perf_counter() - begin:.0f} s", flush=True)
        ((tensors, differing),) = run_ranks(1, differing_tensors, paths, timeout=600)
    print(f"{name}: {tensors} tensors, {len(differing)} differ", flush=True)
    return {"model": name, "layouts": [text for text, _, _ in layouts], "tensors": tensors, "differing": differing}


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    seed = next((int(word) for word in words if "=" not in word), 1)
    hops = int(given.get("hops", "10"))
    draw = random.Random(seed)
    rows = [chain(name, draw, hops) for name in MODELS]
    if hops == 10:
        versions = {name: version(name) for name in ("torch", "megatron-core")}
        content = {"seed": seed, "machine": platform.machine(), "versions": versions, "chains": rows}
        RESULT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if any(row["differing"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
