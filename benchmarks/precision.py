"""Does FP8 train like bf16? One model on real text, from the same weights, in every precision.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 benchmarks/precision.py
    ... benchmarks/precision.py bf16 fp8_delayed steps=50

Words are names of CASES, all if there is none, and `name=value`: `steps=200`, `shape=text`. The text is Python's
standard library, byte by byte; every case reads the same windows of it in the same order. Losses (nats per byte) and
the steps that fp16's scaling skipped go to results/precision.json after every case, from which docs/precision.py draws.
A case that fails is written down with its error, and the next one runs. How far runs of one precision come apart by
themselves is what bf16's with weights rounded otherwise say. Calls for other cases may share the GPU: nothing is timed.
"""

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import minloop
from benchmarks import weights
from benchmarks.compare_peers import RESULTS, machine
from benchmarks.shapes import SHAPES, Shape

# 8 thousand bytes a step
TEXT = Shape("text", 24, 1024, 2816, 16, 16, 256, 1024, 8, 8)

WIDE_HEADS = {"num_attention_heads": 8, "num_query_groups": 8}  # of 128 channels, which FP8 attention needs on Hopper

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "bf16_rounded_1": {"bf16": True, "rounding_seed": 1},
    "bf16_rounded_2": {"bf16": True, "rounding_seed": 2},
    "fp16_dynamic": {"fp16": True, "initial_loss_scale": 2.0**16, "loss_scale_window": 50},
    "fp16_static": {"fp16": True, "loss_scale": 16.0},  # of the sum over 8 thousand tokens
    "fp8_delayed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_tensorwise": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_blockwise": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "blockwise"},
    "fp8_param": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
    "bf16_wide_heads": {"bf16": True} | WIDE_HEADS,
    "fp8_wide_heads": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"} | WIDE_HEADS,
    "fp8_attention": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_dot_product_attention": True}
    | WIDE_HEADS,
}


def text(num_bytes: int = 8 * 2**20) -> torch.Tensor:
    """The standard library's sources, one after another in a fixed order: uint8 [num_bytes]."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(1).shuffle(files)
    joined = bytearray()
    for path in files:
        joined += path.read_bytes()
        if len(joined) >= num_bytes:
            break
    return torch.frombuffer(joined[:num_bytes], dtype=torch.uint8)


def batches(shape: Shape, seed: int = 1) -> Iterator[minloop.Batch]:
    """Microbatches of windows of the text, drawn by one generator: the same for every case."""
    source, generator = text(), torch.Generator().manual_seed(seed)
    span = torch.arange(shape.sequence_length + 1)
    while True:
        starts = torch.randint(len(source) - len(span), (shape.micro_batch_size, 1), generator=generator)
        windows = source[starts + span].long()
        yield {
            "tokens": windows[:, :-1].contiguous(),
            "labels": windows[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape.micro_batch_size, shape.sequence_length),
            "position_ids": span[:-1].expand(shape.micro_batch_size, -1).contiguous(),
        }


def build(shape: Shape, fields: dict[str, Any], steps: int) -> minloop.TrainState:
    """The state of one case, from the benchmark's weights."""

    def of(kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}

    config = minloop.build_config(**(shape.transformer_fields() | of(minloop.TransformerConfig)))
    groups = minloop.init_distributed(config, seed=1)
    chunks = minloop.build_gpt_model(
        config,
        groups,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.sequence_length,
        position_embedding_type="rope",
    )
    for chunk in chunks:
        weights.fill(chunk.named_parameters(), weights.megatron_core(shape))
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    settings = {"lr": 3e-4, "adam_beta2": 0.95, "weight_decay": 0.1}
    own = {name: value for name, value in of(minloop.OptimizerConfig).items() if name not in ("bf16", "fp16")}
    own.pop("fp8_recipe", None)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, **(settings | own))
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    scheduler = minloop.build_scheduler(
        optimizer, global_batch_size=shape.global_batch_size, train_iters=steps, lr_warmup_iters=steps // 4
    )
    state = minloop.TrainState(chunks, optimizer, scheduler, config, groups)
    if "rounding_seed" in fields:
        weights.round_otherwise(state, fields["rounding_seed"])
    return state


def train(shape: Shape, fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses of all steps, skipped steps, and losses in evaluation.

    The evaluation between the halves shows that FP8's cached weights are made anew where a forward pass needs them.
    """
    state, data = build(shape, fields, steps), batches(shape)
    count = minloop.num_microbatches(shape.global_batch_size, shape.micro_batch_size, state.groups)
    losses: list[torch.Tensor] = []
    evaluations: list[float] = []
    for step in range(steps):
        losses.append(minloop.train_step(state, data, num_microbatches=count).loss)
        if step + 1 in (steps // 2, steps):
            evaluations.append(minloop.eval_step(state, batches(shape, 2), num_microbatches=count).loss.item())
    made = {
        "losses": [round(loss.item(), 5) for loss in losses],
        "evaluations": [round(loss, 5) for loss in evaluations],
        "skipped": state.skipped_iterations,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
    minloop.shutdown_distributed()
    return made


def attempt(name: str, shape: Shape, steps: int) -> dict[str, Any]:
    """What a case gives, or its error."""
    fields = CASES[name]
    shape = replace(shape, **{field: value for field, value in fields.items() if field in Shape.__dataclass_fields__})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return train(shape, fields, steps)
    except Exception as error:  # whatever it is, the other cases are still worth their time
        if torch.distributed.is_initialized():
            minloop.shutdown_distributed()
        return {"error": f"{type(error).__name__}: {error}"}


def main(given: list[str]) -> None:
    names = [word for word in given if "=" not in word] or [*CASES]
    if unknown := set(names) - CASES.keys():
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    options = {"steps": "200", "shape": "text"} | dict(word.split("=", 1) for word in given if "=" in word)
    shape, steps = (SHAPES | {"text": TEXT})[options["shape"]], int(options["steps"])
    file = RESULTS / "precision.json"
    for name in names:
        made = attempt(name, shape, steps) | {"fields": {k: str(v) for k, v in CASES[name].items()}}
        # read anew, as another GPU may make other cases meanwhile
        cases: dict[str, Any] = json.loads(file.read_text())["cases"] if file.exists() else {}
        cases[name] = made
        cases = {known: cases[known] for known in CASES if known in cases}
        versions = {package: metadata.version(package) for package in ("torch", "megatron-core")}
        about = {"machine": machine(), "date": datetime.now(UTC).date().isoformat(), "versions": versions}
        if torch.cuda.is_available():
            file.write_text(json.dumps(about | {"shape": shape.name, "cases": cases}) + "\n")
        shown = {key: cases[name][key] for key in ("skipped", "error") if key in cases[name]}
        print(name, shown, cases[name].get("losses", [])[-1:], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
