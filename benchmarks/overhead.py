"""What does minloop's step cost over a hand-written megatron-core step with the same settings?

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 benchmarks/overhead.py A steps=100

Words as for throughput.py; launches are not captured in a graph, which would hide the host's time. Both steps train the
same model on the same batches in one process, in turn, `steps` at a time, five times each, and so does minloop's step
in parts (`begin_step`, `forward_backward`, `finish_step`). The hand-written step is what one would write around mcore:
no check of token ids, no report to other ranks, an integer count of tokens, and a loss that nobody reads. Results go to
results/overhead.json, without a GPU to results/overhead_cpu.json, of `tiny` as it is nowhere.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import minloop
from benchmarks.shapes import SHAPES, Run, read_run
from benchmarks.throughput import batches, build

ON_GPU = torch.cuda.is_available()
RESULT = Path(__file__).parent / "results" / ("overhead.json" if ON_GPU else "overhead_cpu.json")
ROUNDS = 5


def plain_loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
    total = (output.float() * mask).sum()
    return total, mask.sum().to(torch.int32), {"lm loss": total.detach()}


def plain_forward(data: Iterator[minloop.Batch], model: torch.nn.Module) -> Any:
    batch = {name: value.to(torch.cuda.current_device(), non_blocking=True) for name, value in next(data).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(plain_loss, batch["loss_mask"])


def plain_step(run: Run, state: minloop.TrainState, data: Iterator[minloop.Batch]) -> None:
    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    schedule: Any = get_forward_backward_func(pp_size=1, vp_size=None)
    schedule(
        forward_step_func=plain_forward,
        data_iterator=data,
        model=state.chunks[0],
        num_microbatches=run.shape.num_microbatches(run.gpus),
        seq_length=run.shape.sequence_length,
        micro_batch_size=run.shape.micro_batch_size,
        forward_only=False,
        pg_collection=state.groups,
    )
    state.optimizer.step()


def step_in_parts(state: minloop.TrainState, data: Iterator[minloop.Batch], count: int) -> None:
    minloop.begin_step(state)
    minloop.forward_backward(state, data, num_microbatches=count)
    minloop.finish_step(state)


def timed(step: Callable[[], Any], steps: int) -> float:
    """Milliseconds per step of `steps` steps, the GPU waited for at the end alone."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1000


def main(words: list[str]) -> None:
    run = read_run(words)
    run = replace(run, options={"cuda_graph_impl": "none"} | run.options)
    state = build(run)
    data = cycle([*batches(run, state, 8)])
    count = run.shape.num_microbatches(run.gpus)
    steps: dict[str, Callable[[], Any]] = {
        "minloop": lambda: minloop.train_step(state, data, num_microbatches=count),
        "hand-written": lambda: plain_step(run, state, data),
        "in parts": lambda: step_in_parts(state, data, count),
    }
    for step in steps.values():
        timed(step, 5)
    with minloop.manual_gc():
        rounds = [{name: timed(step, run.steps) for name, step in steps.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(r[name] for r in rounds) for name in steps}
    result = {
        "words": run.words,
        "chip": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "ms_per_step": {name: [round(r[name], 3) for r in rounds] for name in steps},
        "ratio": round(statistics.median(r["minloop"] / r["hand-written"] for r in rounds), 4),
        "ratio_in_parts": round(statistics.median(r["in parts"] / r["minloop"] for r in rounds), 4),
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(", ".join(f"{name} {ms:.2f} ms" for name, ms in medians.items()), f"a step: {result['ratio']:.3f} times")
    print(f"in parts: {result['ratio_in_parts']:.3f} times the whole step")
    if run.shape != SHAPES["tiny"]:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    minloop.shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1:])
