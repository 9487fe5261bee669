"""Does a long run's memory grow? 2,000 small steps with all that surrounds them, on two ranks, with GPUs or without.

    torchrun --nproc-per-node 2 benchmarks/memory_growth.py

Every 100 steps there are an evaluation of two sets and a save in the background, every 10 a record in a JSONL file and
TensorBoard; Python's garbage collector runs after saves alone (`manual_gc`). Writes results/memory_growth.json, on
GPUs memory_growth_gpu.json: the resident bytes of each rank every 100 steps, without those of mapped files, which come
and go as the system likes, and the bytes that PyTorch has allocated and reserved on its GPU; and by how many bytes a
step each grows from step 500 on (a line by least squares; a page has 4,096).
"""

import gc
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's minloop

import minloop

STEPS, EVERY, SETTLED, SEQUENCE_LENGTH = 2_000, 100, 500, 64
ON_GPU = torch.cuda.is_available()
RESULT = Path(__file__).parent / "results" / ("memory_growth_gpu.json" if ON_GPU else "memory_growth.json")
KINDS = ("resident_bytes", "device_allocated_bytes", "device_reserved_bytes")[: 3 if ON_GPU else 1]


def build() -> minloop.TrainState:
    config = minloop.build_config(num_layers=2, hidden_size=64, num_attention_heads=4)
    groups = minloop.init_distributed(config, seed=1)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=SEQUENCE_LENGTH)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    scheduler = minloop.build_scheduler(optimizer, global_batch_size=8, train_iters=STEPS, lr_warmup_iters=10)
    return minloop.TrainState(chunks, optimizer, scheduler, config, groups)


def bytes_now() -> tuple[int, ...]:
    """This process's bytes of each of `KINDS`."""
    memory = psutil.Process().memory_info()
    resident = memory.rss - memory.shared
    return (resident, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if ON_GPU else (resident,)


def train(state: minloop.TrainState, folder: str) -> list[tuple[int, ...]]:
    """Train; returns this rank's `bytes_now` every `EVERY` steps."""
    data_config = minloop.build_dataset_config(sequence_length=SEQUENCE_LENGTH, vocab_size=256)
    loader, *held_out = (minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4) for _ in range(3))
    sets, sinks = dict(zip("ab", held_out, strict=True)), list[minloop.Sink]()
    if minloop.is_first_rank(state.groups):
        sinks = [minloop.jsonl_sink(f"{folder}/run.jsonl"), minloop.tensorboard_sink(folder)]
        sinks.append(minloop.console_sink(train_iters=STEPS))
    timer, seen = minloop.StepTimer(state, sequence_length=SEQUENCE_LENGTH), list[tuple[int, ...]]()
    while state.iteration < STEPS:
        metrics = minloop.train_step(state, loader, num_microbatches=1)
        if state.iteration % 10 == 0:
            record = minloop.step_record(state, metrics) | timer.lap()
            for sink in sinks:
                sink(record)
        if state.iteration % EVERY == 0:
            with timer.paused():
                minloop.evaluate(state, sets, num_microbatches=1, eval_iters=2)
            saved = minloop.start_save(folder, state, loader, keep_newest=2)
            gc.collect()  # of the save before: torch makes classes for every tensor that it writes, 3 kB in cycles
            seen.append(bytes_now())
            if state.iteration == STEPS:
                saved.wait()
    return seen


def growth(steps: numpy.ndarray, sizes: list[int]) -> float:
    """Bytes a step once settled."""
    settled = steps >= SETTLED
    return round(float(numpy.polyfit(steps[settled], numpy.array(sizes)[settled], 1)[0]), 1)


def main() -> None:
    state = build()
    with tempfile.TemporaryDirectory() as own_folder, minloop.manual_gc():
        folders = [own_folder]
        torch.distributed.broadcast_object_list(folders)
        own = train(state, folders[0])
        everyones: list[list[tuple[int, ...]]] = [[] for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(everyones, own)  # the folder goes when all are done
    if minloop.is_first_rank(state.groups):
        steps = numpy.arange(EVERY, STEPS + 1, EVERY)
        sizes = {kind: [[now[i] for now in rank] for rank in everyones] for i, kind in enumerate(KINDS)}
        name = torch.cuda.get_device_name() if ON_GPU else "no GPU"
        result = {
            "machine": f"{platform.machine()}, {len(everyones)} ranks, {name}",
            "versions": {name: version(name) for name in ("torch", "megatron-core")}
            | {"python": platform.python_version()},
            "steps": steps.tolist(),
            **sizes,
            "growth_bytes_per_step": {kind: [growth(steps, rank) for rank in ranks] for kind, ranks in sizes.items()},
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(result["growth_bytes_per_step"])
    minloop.shutdown_distributed()


if __name__ == "__main__":
    main()
