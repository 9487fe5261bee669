"""How many tokens per second does minloop train?  One shape of shapes.py, as the words after it say.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 benchmarks/throughput.py C steps=20
    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 2 benchmarks/throughput.py C gpus=2 \\
        tensor_model_parallel_size=2 sequence_parallel=True
    ... benchmarks/throughput.py C fp8=hybrid fp8_recipe=tensorwise fp8_param=True
    ... benchmarks/throughput.py E gpus=2 expert_model_parallel_size=2 moe_router_force_load_balancing=True

Words `name=value` are counts and fields of the shape (see shapes.read_run); `warmup=5` steps that do not count;
`profile=FILE`, where kernels, launches and waits of one more step are listed; `host_profile=FILE`, for which the Python
stacks of one more step are looked at every millisecond; and fields of mcore's TransformerConfig,
DistributedDataParallelConfig and OptimizerConfig, by their names, in the place of those that minloop chooses;
`reshard_after_forward=True` asks for torch FSDP2, `copied_weights=True` for mcore's copy of master weights,
`zeroed_gradients=True` for gradients that are all zeroed before the first microbatch. What is set
here by hand is in SETTINGS; the rest is what minloop's build functions choose.

Prints the rate, then a line of JSON with the time of each window and its loss, which compare_peers.py reads.
"""

import ast
import dataclasses
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.enums import AttnBackend

import minloop
from benchmarks import weights
from benchmarks.shapes import LEARNING_RATE, Run, read_run
from benchmarks.tokens import microbatches

SETTINGS: dict[str, Any] = {
    "bf16": True,
    "lr": LEARNING_RATE,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "use_distributed_optimizer": True,
    "check_for_nan_in_grad": False,
}
NO_FIELDS = ("warmup", "profile", "host_profile", "copied_weights", "zeroed_gradients")
WITHOUT = {
    "copied_weights": "minloop.optimizer.fuse_weight_writes",
    "zeroed_gradients": "minloop.data_parallel.overwrite_first_gradients",
}
"""Words, and what a run goes without for them."""
RESULT = '{"step_ms": '  # how the last line begins
OF_SHAPE: dict[str, dict[str, Any]] = {"A": {"cuda_graph_impl": "full_iteration"}}  # bound by launches


def build(run: Run) -> minloop.TrainState:
    """The state of one run, from the benchmark's weights where a rank has them whole to begin with."""
    given = {name: read(name, value) for name, value in run.options.items() if name not in NO_FIELDS}
    torch_fsdp = {name: given.pop(name) for name in ("reshard_after_forward",) if name in given}
    settings = run.shape.transformer_fields() | SETTINGS | OF_SHAPE.get(run.shape.name, {}) | given

    def of(kind: type[Any]) -> dict[str, Any]:
        return {f.name: settings[f.name] for f in dataclasses.fields(kind) if f.name in settings}

    known = of(minloop.TransformerConfig) | of(minloop.OptimizerConfig) | of(minloop.DistributedDataParallelConfig)
    if unknown := settings.keys() - known.keys():
        raise ValueError(f"no field of mcore's configs: {', '.join(sorted(unknown))}")
    config = minloop.build_config(**of(minloop.TransformerConfig))
    instances = settings.get("num_distributed_optimizer_instances", 1)
    groups = minloop.init_distributed(config, seed=1, num_distributed_optimizer_instances=instances)
    if config.tp_comm_overlap:
        lengths = {"seq_length": run.shape.sequence_length, "micro_batch_size": run.shape.micro_batch_size}
        minloop.init_tp_overlap(config, **lengths)
    chunks = minloop.build_gpt_model(
        config,
        groups,
        vocab_size=run.shape.vocab_size,
        max_sequence_length=run.shape.sequence_length,
        position_embedding_type="rope",
        rotary_base=run.shape.rotary_base,
        share_embeddings_and_output_weights=False,
    )
    whole = config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1
    if whole and not config.init_model_with_meta_device:
        first_expert = groups.ep.rank() * run.shape.num_moe_experts // groups.ep.size()
        for chunk in chunks:
            weights.fill(chunk.named_parameters(), weights.megatron_core(run.shape, first_expert))
    ddp_config = minloop.build_ddp_config(config, **of(minloop.DistributedDataParallelConfig), **torch_fsdp)
    sharded = bool(torch_fsdp) or ddp_config.use_megatron_fsdp
    chunks = (minloop.wrap_fsdp if sharded else minloop.wrap_ddp)(chunks, ddp_config, groups)
    optimizer_fields = {name: value for name, value in of(minloop.OptimizerConfig).items() if name != "bf16"}
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, **optimizer_fields)
    return minloop.TrainState(chunks, minloop.build_optimizer(chunks, optimizer_config, groups), None, config, groups)


def read(name: str, word: str) -> Any:
    if word.startswith("torch."):  # a dtype
        return getattr(torch, word.removeprefix("torch."))
    if name == "attention_backend":
        return AttnBackend[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def batches(run: Run, state: minloop.TrainState, steps: int) -> Iterator[minloop.Batch]:
    """This data parallel rank's microbatches of all steps, made beforehand, in pinned memory if there is a GPU."""
    place = torch.Tensor.pin_memory if torch.cuda.is_available() else lambda tensor: tensor
    made: list[minloop.Batch] = []
    for step in range(steps):
        for text in microbatches(run.shape, step, state.groups.dp.rank(), state.groups.dp.size()):
            length = text.shape[1] - 1
            batch = {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": torch.ones(len(text), length),
                "position_ids": torch.arange(length).expand(len(text), -1).contiguous(),
            }
            made.append({name: place(value) for name, value in batch.items()})
    return iter(made)


def train(run: Run, state: minloop.TrainState, data: Iterator[minloop.Batch]) -> tuple[list[float], list[float]]:
    """Milliseconds per step, and mean loss, of each window. The GPU is waited for at their edges alone."""
    count = run.shape.num_microbatches(state.groups.dp.size())
    step_ms, losses, window = [], [], torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with minloop.manual_gc():
        for step in range(1, run.steps + 1):
            window += minloop.train_step(state, data, num_microbatches=count).loss
            if step % run.window == 0:
                torch.cuda.synchronize()
                end = time.perf_counter()
                step_ms.append((end - begin) * 1000 / run.window)
                losses.append(window.item() / run.window)
                window.zero_()
                begin = time.perf_counter()
    return step_ms, losses


def product_rate(seconds: float = 0.5) -> float:
    """TFLOP/s of a bf16 product of 8192 × 8192 random matrices: what the chip gives now, as warm as it is."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # no group has chosen it yet
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times: list[float] = []
    while sum(times) < seconds:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 20 * 2 * 8192**3 / statistics.median(times) / 1e12


def report(run: Run, config: minloop.TransformerConfig, ms: float, products: tuple[float, float]) -> str:
    sizes = {"vocab_size": run.shape.vocab_size, "sequence_length": run.shape.sequence_length}
    rate = run.shape.tokens_per_step / run.gpus / ms * 1000
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = minloop.peak_tflops(chip, torch.bfloat16)
    lines = [f"{run.shape.name} on {run.gpus} × {chip}: {rate:,.0f} tokens/s per GPU, {ms:.2f} ms a step"]
    for name, causal in (("causal", True), ("full", False)):
        tflops = rate * minloop.flops_per_token(config, **sizes, causal=causal) / 1e12
        shares = [f"{tflops / peak:.1%} of the datasheet's {peak:.0f}"] if peak else []
        shares += [
            f"{tflops / p:.1%} of a product {when} it ({p:.0f})"
            for when, p in zip(("before", "after"), products, strict=True)
            if p
        ]
        lines.append(f"  {name} attention: {tflops:.1f} TFLOP/s, {', '.join(shares)}")
    return "\n".join(lines)


def profile(state: minloop.TrainState, data: Iterator[minloop.Batch], count: int, file: str) -> None:
    """One step's kernels by time, and what the host launched and waited for."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        minloop.train_step(state, data, num_microbatches=count)
        torch.cuda.synchronize()
    events: list[Any] = [e for e in profiler.key_averages() if not e.is_user_annotation]  # around kernels in the list
    kernels = sorted((e for e in events if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total)
    host = [e for e in events if e.key.startswith(("cuda", "cu", "aten::item", "aten::copy_"))]
    with open(file, "w") as out:
        total = sum(e.self_device_time_total for e in kernels)
        print(f"{total / 1000:.2f} ms of kernels, {sum(e.count for e in kernels)} of them", file=out)
        for e in kernels:
            print(f"{e.self_device_time_total / 1000:10.3f} ms {e.count:6d} × {e.key[:150]}", file=out)
        for e in sorted(host, key=lambda e: -e.count):
            print(f"host: {e.count:6d} × {e.key}, {e.self_cpu_time_total / 1000:.2f} ms", file=out)


def host_profile(state: minloop.TrainState, data: Iterator[minloop.Batch], count: int, file: str) -> None:
    """Where the host was in one step: how many looks found each line of Python innermost, and how many on a stack.

    Backward passes run in a thread of their own; between its lines of Python the first one waits in the engine.
    """
    stop, innermost, within = threading.Event(), Counter[str](), Counter[str]()

    def look() -> None:
        while not stop.wait(0.001):
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident():
                    stack = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)]
                    innermost[stack[-1]] += 1
                    within.update(set(stack))

    looker = threading.Thread(target=look)
    looker.start()
    minloop.train_step(state, data, num_microbatches=count)
    torch.cuda.synchronize()
    stop.set()
    looker.join()
    with open(file, "w") as out:
        for title, counter in (("innermost", innermost), ("on the stack", within)):
            print(title, file=out)
            for line, looks in counter.most_common(120):
                print(f"{looks:6d} {line}", file=out)


def main(words: list[str]) -> None:
    run = read_run(words)
    warmup = int(run.options.get("warmup", 5))
    before = product_rate()
    with ExitStack() as stack:
        for name in WITHOUT.keys() & run.options.keys():
            stack.enter_context(mock.patch(WITHOUT[name]))
        state = build(run)
    profiles = [(look, run.options[look.__name__]) for look in (profile, host_profile) if look.__name__ in run.options]
    data = batches(run, state, run.steps + len(profiles))
    step_ms, losses = train(run, state, data)
    timed = step_ms[-(-warmup // run.window) :] or step_ms[-1:]
    peak = torch.cuda.max_memory_allocated() / 2**30
    first = minloop.is_first_rank(state.groups)
    for look, file in profiles:
        look(state, data, run.shape.num_microbatches(state.groups.dp.size()), file if first else os.devnull)
    config = state.config
    minloop.shutdown_distributed()
    if first:
        del state
        torch.cuda.empty_cache()
        products = (before, product_rate())
        print(report(run, config, statistics.median(timed), products))
        packages = ["torch", "megatron-core", *(["transformer-engine"] if torch.cuda.is_available() else [])]
        installed = {found.name for found in metadata.distributions()}
        packages += [name for name in ("flash-attn-3", "flash-attn-4") if name in installed]
        versions = {name: metadata.version(name) for name in packages}
        result = {"step_ms": step_ms, "losses": losses, "peak_memory_gib": peak, "versions": versions}
        print(json.dumps(result | {"product_tflops": [round(rate) for rate in products]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
