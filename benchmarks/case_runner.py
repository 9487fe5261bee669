"""Several runs of throughput.py one after another in the same processes, whose start takes longer than most runs.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 2 benchmarks/case_runner.py \\
        D gpus=2 steps=3 D gpus=2 steps=3 grad_reduce_in_fp32=False

A word without "=" begins a run; all have as many GPUs. Each prints what throughput.py prints. Where it leaves more on a
GPU than workspaces of libraries, the processes end, as the next run's peak of memory would not be its own. `results`
starts such processes, and new ones for what is left after that, or after a run that failed. A run that runs out of
memory after others is made once more in new processes: what they left may have been in its way.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from benchmarks import throughput
from benchmarks.compare_peers import ROOT, environment, last_words
from benchmarks.peers.processes import Result, torchrun
from benchmarks.shapes import Run

LEFT = 2**28
"""Bytes that may be allocated on a GPU before a run: workspaces of cuBLAS and Transformer Engine."""

NOT_FREE = "are still allocated on a GPU"

NO_MEMORY = ("out of memory", "OutOfMemoryError", "ALLOC_FAILED")
"""Words of torch, NCCL, cuBLAS and cuDNN where a GPU is full."""


def ran_out(text: str) -> bool:
    """Whether a run's output or error says that a GPU had too little memory."""
    return any(word in text for word in NO_MEMORY)


def results(runs: list[Run], timeout: int) -> Iterator[Result | RuntimeError]:
    """Make each run, neighbours of as many GPUs in the same processes; what it gave, as it comes, or why it failed.

    Args:
        timeout: seconds for each; the first of its processes has their start in it.
    """
    for _, neighbours in groupby(runs, key=lambda run: run.gpus):
        left = [*neighbours]
        while left:
            for result in together(left, timeout):
                left = left[1:]
                yield result


def together(runs: list[Run], timeout: int) -> Iterator[Result | RuntimeError]:
    """What each run gave, up to the first that failed, or that left too little memory; the processes end with it."""
    command = torchrun(runs[0], str(ROOT / "benchmarks" / "case_runner.py"))
    command += [word for run in runs[1:] for word in run.words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    place = 0
    with subprocess.Popen(command, env=environment({}), cwd=ROOT, **pipes) as process:
        try:
            for place in range(len(runs)):
                output = read(process, timeout, last=place == len(runs) - 1)
                if place > 0 and NOT_FREE in output:
                    print(next(line for line in output.splitlines() if NOT_FREE in line), flush=True)
                    return
                yield Result.read(output)
        except RuntimeError as error:
            if place > 0 and ran_out(str(error)):
                print(f"run {place} of these processes ran out of memory: once more in its own", flush=True)
                return
            yield error
        finally:
            process.terminate()  # torchrun then ends its workers, which killing it would leave on the GPU


def read(process: subprocess.Popen[str], timeout: int, *, last: bool) -> str:
    """Return what the next run prints; of the last one, when the processes have ended.

    Raises:
        RuntimeError: they failed, or it took too long and they were ended, before it had a result; with the end of
            the run's output.
    """
    begin, output = time.monotonic(), ""
    timer = threading.Timer(timeout, process.terminate)
    timer.start()
    try:
        for line in process.stdout or ():
            output += line
            if line.startswith(throughput.RESULT) and not last:
                return output
        code = process.wait()
    finally:
        timer.cancel()
    if time.monotonic() - begin >= timeout:
        output += f"\nended after {timeout} s"
    if code != 0 and not any(line.startswith(throughput.RESULT) for line in output.splitlines()):
        full = "a GPU is out of memory; " if ran_out(output) else ""  # of which the last words may say nothing
        raise RuntimeError(f"minloop: {full}exit code {code}; its output ends with: {last_words(output)}")
    return output


def split(words: list[str]) -> list[list[str]]:
    """The words of each run."""
    starts = [place for place, word in enumerate(words) if "=" not in word]
    return [words[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def free() -> int:
    """Free what earlier runs left behind; the bytes that are still allocated on this rank's GPU."""
    gc.collect()
    torch.compiler.reset()  # or what was compiled for one length is compiled anew for any, once there is another
    if not torch.cuda.is_available():
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # torch has no public name for it
    if base := sys.modules.get("transformer_engine.pytorch.module.base"):
        vars(base)["_dummy_wgrads"].clear()  # a gradient of each shape of weight, 1 GiB of the output layer alone
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # pinned memory, of an optimizer on the CPU
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def main(words: list[str]) -> None:
    if torch.cuda.is_available():  # `free` looks at it
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world_size = next(rendezvous("env://"))
    for number, run in enumerate(split(words)):
        if number:
            # Ranks wait for each other: one that fails early in this run would end the first rank, which may not have
            # said yet what the run before gave.
            names = [f"left before run {number} on rank {each}" for each in range(world_size)]
            store.set(names[rank], str(free()))
            left = max(int(store.get(name)) for name in names)
            if left > LEFT:
                if rank == 0:
                    print(f"{left / 2**20:.0f} MiB {NOT_FREE}: processes of their own for what is left", flush=True)
                return
        sys.excepthook = sys.__excepthook__  # every default group adds one more "[rank0]: " to a traceback's lines
        throughput.main(run)


if __name__ == "__main__":
    main(sys.argv[1:])
