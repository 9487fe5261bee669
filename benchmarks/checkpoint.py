"""What does a checkpoint cost?  Llama-3-8B's layers in bf16 with ZeRO-1: 14 bytes of state a parameter.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node N benchmarks/checkpoint.py layers=8 directory=DIR

A first word names another shape of shapes.py (`tiny` runs on a CPU, where nothing is recorded). In one job, from the
second save on, with one checkpoint on disk at a time:

    rates        a pinned buffer off each device, and plain files of as many threads into the directory, with fsync
    plain        torch.distributed.checkpoint's save and async_save of the same tensors, with as many threads
    sync, async  minloop's, with and without checksums; while the asynchronous ones write, training goes on
    load         into the same layout, with and without comparing digests before; and into TP2 where there are two GPUs

`stall_s` is how long the training thread is blocked, that of the slowest rank; `seconds` is until all is on the disk
(of an asynchronous save: seen between steps, and so up to a step late). Host memory is the process's own peak: files in
a memory-backed directory are not in it. Rows go to results/checkpoint.json.
"""

import contextlib
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import minloop
from benchmarks.shapes import SHAPES, Run, read_run
from benchmarks.throughput import batches, build
from minloop.checkpoint.writing import writers
from minloop.disk import LOCK
from minloop.optimizer import inner_optimizers

RESULT = Path(__file__).parent / "results" / "checkpoint.json"
BUFFER = 2**30 if torch.cuda.is_available() else 2**22
ON_GPU = torch.cuda.is_available()
Measured = tuple[str, dict[str, Any]]


class Clock:
    """Seconds of a block, of the slowest rank, from a moment when all ranks and GPUs have come to it."""

    def __enter__(self) -> "Clock":
        torch.cuda.synchronize()
        dist.barrier()
        self.begin, self.stall = time.perf_counter(), 0.0
        return self

    def stalled(self) -> None:
        """The training thread may go on."""
        self.stall = time.perf_counter() - self.begin

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self.begin
        self.seconds, self.stall = (
            max(every) for every in zip(*gathered((seconds, self.stall or seconds)), strict=True)
        )


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first() -> bool:
    return dist.get_rank() == 0


def emptied(directory: Path) -> Path:
    """The directory, with nothing in it but the lock of this run, for one checkpoint."""
    dist.barrier()
    if first():
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    dist.barrier()
    return directory


def device_rate(rounds: int = 8) -> float:
    """GB/s of each GPU into a pinned buffer, all GPUs at once."""
    here = torch.empty(BUFFER, dtype=torch.uint8, device=torch.cuda.current_device())
    host = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=ON_GPU)
    host.copy_(here)
    with Clock() as clock:
        for _ in range(rounds):
            host.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
    return rounds * BUFFER / clock.seconds / 1e9


def disk_rate(directory: Path) -> float:
    """GB/s of all ranks together: each of their writing threads writes one file and has it on the disk."""
    content = memoryview(bytearray(BUFFER // 16))
    count = max(1, 16 * 8 // writers())  # 8 buffers a rank

    def write(number: int) -> None:
        with (directory / f"{dist.get_rank()}_{number}").open("wb", buffering=0) as file:
            for _ in range(count):
                file.write(content)
            os.fsync(file.fileno())

    with Clock() as clock, ThreadPoolExecutor(writers()) as pool:
        list(pool.map(write, range(writers())))
    return dist.get_world_size() * writers() * count * len(content) / clock.seconds / 1e9


def reset_peak() -> None:
    """Let the process's peak of host memory begin anew (Linux)."""
    gc.collect()
    if ON_GPU:
        torch._C._host_emptyCache()  # pinned memory that the plain saves leave behind
    with contextlib.suppress(OSError):  # not allowed everywhere: the peak is then that of all before, too
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return max(gathered(int(lines["VmHWM"].split()[0]) * 1024 / 1e9))


def written(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def row(clock: Clock, size: int, **more: Any) -> dict[str, Any]:
    return {
        "stall_s": round(clock.stall, 3),
        "seconds": round(clock.seconds, 3),
        "gb_per_s": round(size / clock.seconds / 1e9, 3),
        "peak_host_gb": round(peak_gb(), 2),
    } | more


def plain_state(state: minloop.TrainState) -> dict[str, torch.Tensor]:
    """Weights, and this rank's own ranges of master weights and moments, as they lie in memory."""
    tensors = {name: x.detach() for chunk in state.chunks for name, x in chunk.named_parameters()}
    for optimizer in inner_optimizers(state.optimizer):
        for number, (parameter, held) in enumerate(optimizer.optimizer.state.items()):
            prefix = f"optimizer.{dist.get_rank()}.{number}"
            tensors[f"{prefix}.param"] = parameter.detach()
            tensors |= {f"{prefix}.{name}": x for name, x in held.items() if torch.is_tensor(x) and x.numel() > 1}
    return tensors


def plain(state: minloop.TrainState, directory: Path, train: Callable[[], float]) -> Iterator[Measured]:
    """torch.distributed.checkpoint as it comes, but for the number of threads."""
    tensors: Any = plain_state(state)

    reset_peak()
    writer = dcp.FileSystemWriter(emptied(directory), thread_count=writers())
    with Clock() as clock:
        dcp.save(tensors, storage_writer=writer)
    yield "plain sync", row(clock, written(directory))
    gloo: Any = dist.new_group(backend="gloo")
    writer = dcp.FileSystemWriter(directory, thread_count=writers(), cache_staged_state_dict=ON_GPU)  # pinned
    steps: list[float] = []
    for _ in range(2):
        reset_peak()
        emptied(directory)
        with Clock() as clock:
            answer: Any = dcp.async_save(tensors, storage_writer=writer, process_group=gloo)
            clock.stalled()
            steps = train_until(answer.done, train)
            answer.result()
    yield "plain async", row(clock, written(directory), step_s_meanwhile=steps)


def train_until(done: Callable[[], bool], train: Callable[[], float]) -> list[float]:
    """Seconds of each step until all ranks say that they are done."""
    steps: list[float] = []
    while not all(gathered(done())):
        steps.append(round(train(), 3))
    return steps


def saves(state: minloop.TrainState, directory: Path, train: Callable[[], float]) -> Iterator[Measured]:
    for checksums in (False, True):
        name = " with checksums" if checksums else ""
        for _ in range(1 if checksums else 2):  # memory for copies is made in the first
            target = emptied(directory)
            reset_peak()
            with Clock() as clock:
                minloop.save_checkpoint(target, state, checksums=checksums)
        yield f"sync{name}", row(clock, written(directory))
        target = emptied(directory)
        reset_peak()
        with Clock() as clock:
            pending = minloop.start_save(target, state, checksums=checksums)
            clock.stalled()
            steps = train_until(pending.done, train)
            pending.wait()
        yield f"async{name}", row(clock, written(directory), step_s_meanwhile=steps)


def load(state: minloop.TrainState, directory: Path, name: str, verify: bool) -> Measured:
    reset_peak()
    with Clock() as clock:
        minloop.load_checkpoint(directory, state, verify=verify)
        torch.cuda.synchronize()
    return name, row(clock, written(directory), verified=verify)


def measure(run: Run, directory: Path) -> dict[str, Any]:
    state = build(run)
    data = cycle([*batches(run, state, 4)])
    count = run.shape.num_microbatches(state.groups.dp.size())

    def train() -> float:
        begin = time.perf_counter()
        minloop.train_step(state, data, num_microbatches=count)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    alone = [round(train(), 3) for _ in range(4)][1:]
    result: dict[str, Any] = {
        "shape": run.shape.name,
        "num_layers": run.shape.num_layers,
        "gpus": dist.get_world_size(),
        "chip": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "directory": str(directory),
        "threads": writers(),
        "step_s": alone,
        "device_to_host_gb_per_s": round(device_rate(), 2),
        "disk_gb_per_s": round(disk_rate(emptied(directory)), 2),
    }
    for name, measured in (*plain(state, directory, train), *saves(state, directory, train)):
        result[name] = measured
        report(name, measured)
    own = sum(path.stat().st_size for path in directory.rglob(f"__{dist.get_rank()}_*"))
    result["bytes_per_gpu"] = max(gathered(own))
    copying = result["bytes_per_gpu"] / result["device_to_host_gb_per_s"] / 1e9
    result["async_stall_over_copying"] = round(result["async"]["stall_s"] / copying, 3)
    result["sync_share_of_disk"] = round(result["sync"]["gb_per_s"] / result["disk_gb_per_s"], 3)
    for verify in (True, False):
        name, measured = load(state, directory, "load verified" if verify else "load", verify)
        result[name] = measured
        report(name, measured)
    if dist.get_world_size() == 2:
        del state, train, data
        minloop.shutdown_distributed()
        gc.collect()
        torch.cuda.empty_cache()
        split = build(replace(run, options=run.options | {"tensor_model_parallel_size": "2"}))
        name, measured = load(split, directory, "load into TP2", verify=False)
        result[name] = measured
        report(name, measured)
    return result


def report(name: str, measured: dict[str, Any]) -> None:
    if first():
        print(name, json.dumps(measured), flush=True)


def main(words: list[str]) -> None:
    if not words or words[0] not in SHAPES:
        words = ["C", *words]
    words = [word.replace("layers=", "num_layers=") if word.startswith("layers=") else word for word in words]
    run = read_run(words)
    options = dict(run.options)
    directory = Path(options.pop("directory")) / "benchmark"
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    shape = replace(run.shape, global_batch_size=run.shape.micro_batch_size * gpus)
    result = measure(replace(run, shape=shape, gpus=gpus, options=options), directory)
    emptied(directory)
    if first():
        result |= {
            "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
            "date": datetime.now(UTC).date().isoformat(),
        }
        print(json.dumps(result, indent=1))
        if ON_GPU:
            same = ("shape", "num_layers", "gpus")
            earlier = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
            kept = [old for old in earlier if any(old[name] != result[name] for name in same)]
            RESULT.write_text(json.dumps({"rows": [*kept, result]}, indent=1) + "\n")
    minloop.shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1:])
