"""Is minloop as fast as what trains the same model elsewhere? Every peer in turn, interleaved, on one machine.

    export PYTHONPATH=$PWD MEGATRON_LM=... TORCHTITAN=...
    python benchmarks/compare_peers.py C minloop megatron_lm steps=12 repeats=2

The first word is a shape of shapes.py; then peers, all of them if none is named; then `name=value`: what
shapes.read_run reads (`gpus=2`, `steps=12`, `window=1`, `global_batch_size=4`), one peer's switch with its name before
it (`megatron_lm.wgrad_fusion=off`), and here `repeats=2` rounds, `warmup=5` steps of each run that do not count,
`timeout=400` seconds a run may take, `log=FILE` to which all output goes.

minloop alone in another layout: `compare_peers.py C gpus=2 minloop minloop.tensor_model_parallel_size=2`.

Each run is a process of its own. Same tokens, same initial weights, Adam, fp32 masters, clipping at 1.0, no
recomputation. Rows go to results/peers_<shape>.json after every run; ratio_to_peer is minloop's tokens per second over
the peer's.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from megatron.core.transformer import TransformerConfig

import minloop
from benchmarks.peers.processes import Result, torchrun
from benchmarks.shapes import Run, read_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("minloop", "megatron_lm", "plain_torch", "hf_transformers", "torchtitan")
Parser = Callable[[str, Run], Result]


@dataclass
class Comparison:
    """What the words ask for: which peers make which run, how often, and how long a run may take."""

    run: Run
    peers: list[str]
    repeats: int = 2
    warmup: int = 5
    timeout: int = 400
    log: Path = Path(os.devnull)
    results: dict[str, list[Result]] = field(default_factory=dict[str, list[Result]])
    failures: dict[str, str] = field(default_factory=dict[str, str])


def read_words(words: list[str]) -> Comparison:
    """Read the command's words. Raises ValueError for a peer or shape that there is not, or too few steps."""
    named = [word for word in words[1:] if "=" not in word]
    if unknown := set(named) - set(PEERS):
        raise ValueError(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    own = {name: int(given.pop(name)) for name in ("repeats", "warmup", "timeout") if name in given}
    log = Path(given.pop("log", os.devnull))
    run = read_run([*words[:1], *(f"{name}={value}" for name, value in given.items())])
    asked = Comparison(run, named or list(PEERS), **own, log=log)
    if run.steps // run.window <= math.ceil(asked.warmup / run.window):
        raise ValueError(
            f"steps={run.steps} leave no window of {run.window} after warmup={asked.warmup}: take more steps"
        )
    return asked


def run_of(peer: str, run: Run) -> Run:
    """Return the run as one peer makes it, with its own switches by their own names and no other peer's."""
    options = {name.removeprefix(f"{peer}."): value for name, value in run.options.items()}
    return replace(run, options={name: value for name, value in options.items() if "." not in name})


def command_of(peer: str, run: Run) -> tuple[list[str], dict[str, str | None], Parser]:
    """Return a peer's command, what its environment needs (None: must not have), and the reader of its output."""
    if peer == "minloop":
        return torchrun(run, str(ROOT / "benchmarks" / "throughput.py")), {}, lambda log, _: Result.read(log)
    module = import_module(f"benchmarks.peers.{peer}")
    return *module.command(run), module.parse


def environment(needs: dict[str, str | None]) -> dict[str, str]:
    """Return this process's environment with a peer's needs; the peer's own modules come before this repository's."""
    paths = [needs.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
    merged = os.environ | needs | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return {name: value for name, value in merged.items() if value is not None}


def last_words(output: str) -> str:
    """Return the end of what a failed run printed, before torchrun's own report of it."""
    own = re.split(r"^[EW]\d{4} .*(?:failed \(exitcode|Sending process)", output, maxsplit=1, flags=re.MULTILINE)[0]
    return (own.strip() or output)[-1500:]


def measure(peer: str, asked: Comparison) -> Result:
    """Run one peer once. Raises RuntimeError, with the end of its output, if it fails or takes too long."""
    run = run_of(peer, asked.run)
    command, needs, parse = command_of(peer, run)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment(needs), cwd=ROOT, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=asked.timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers, which killing it would leave on the GPU
            output, _ = process.communicate()
            output += f"\nended after {asked.timeout} s"
    with asked.log.open("a") as file:
        file.write(f"==== {peer}: {' '.join(command)}\n{output}\n")
    if process.returncode != 0:
        raise RuntimeError(f"{peer}: exit code {process.returncode}; its output ends with: {last_words(output)}")
    return parse(output, run)


def timed(result: Result, asked: Comparison) -> list[float]:
    """Milliseconds per step of the windows after the warm-up."""
    return result.step_ms[math.ceil(asked.warmup / asked.run.window) :]


def row(peer: str, asked: Comparison) -> dict[str, Any]:
    """Return what all runs of one peer gave together."""
    run, results = run_of(peer, asked.run), asked.results[peer]
    shape = run.shape
    times = sorted(ms for result in results for ms in timed(result, asked))
    median = statistics.median(times)
    recipe, weights_too = run.options.get("fp8_recipe"), run.options.get("fp8_param") == "True"
    rate = shape.tokens_per_step / run.gpus / median * 1000
    flops = minloop.flops_per_token(
        TransformerConfig(**shape.transformer_fields()),
        vocab_size=shape.vocab_size,
        sequence_length=shape.sequence_length,
    )
    return {
        "shape": shape.name,
        "gpus": run.gpus,
        "layout": layout(run),
        "precision": (f"fp8 {recipe}" if recipe else "bf16") + (", weights too" if weights_too else ""),
        "sequence": shape.sequence_length,
        "tokens_per_s_per_gpu": round(rate, 1),
        "tflops_causal": round(rate * flops / 1e12, 1),
        "peak_memory_gib": round(max(result.peak_memory_gib for result in results), 2),
        "peer": peer,
        "ratio_to_peer": None,
        "median_ms": round(median, 2),
        "p90_ms": round(times[math.ceil(0.9 * len(times)) - 1], 2),
        "median_ms_by_round": [round(statistics.median(timed(result, asked)), 2) for result in results],
        "first_step_ms": round(results[0].step_ms[0] * run.window, 1),
        "losses": results[0].losses,
        "product_tflops": results[0].product_tflops,
        "words": run.words,
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")} | results[0].versions,
        "date": datetime.now(UTC).date().isoformat(),
    }


def layout(run: Run) -> str:
    """Return the run's layout as the sameness table names it: "TP2+SP", "PP2×DP2", "DP1" for one GPU."""
    fields = {"TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "CP": "context_parallel_size"}
    sizes = {name: int(run.options.get(field, 1)) for name, field in fields.items()}
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if run.options.get("sequence_parallel") == "True":
        parts[0] += "+SP"
    data_parallel = run.gpus // math.prod(sizes.values())
    if (experts := int(run.options.get("expert_model_parallel_size", 1))) > 1:
        return "×".join([*parts, f"DP{data_parallel}", f"EP{experts}"])
    return "×".join(parts if parts and data_parallel == 1 else [*parts, f"DP{data_parallel}"])


def table(asked: Comparison) -> list[dict[str, Any]]:
    """Return a row for each peer that ran, with minloop's speed and last loss beside the peer's if minloop ran."""
    rows = {peer: row(peer, asked) for peer in asked.peers if asked.results.get(peer)}
    own = rows.get("minloop")
    for peer, other in rows.items():
        if own and peer != "minloop":
            other["ratio_to_peer"] = round(own["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"], 4)
            if peer != "torchtitan" or asked.run.window == 1:  # which logs the last loss of a window, not the mean
                other["last_loss_difference"] = own["losses"][-1] / other["losses"][-1] - 1
    return list(rows.values())


def write(asked: Comparison) -> Path:
    """Write the rows so far, in the place of earlier ones of the same peers and words."""
    file = RESULTS / f"peers_{asked.run.shape.name}.json"
    rows = table(asked)
    earlier = json.loads(file.read_text())["rows"] if file.exists() else []
    made = [(made["peer"], made["words"]) for made in rows]
    kept = [old for old in earlier if (old["peer"], old["words"]) not in made]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "rows": kept + rows}, indent=1) + "\n")
    return file


def machine() -> str:
    """Return the GPUs, their driver and their power limit as nvidia-smi prints them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        return "; ".join(subprocess.run(query, capture_output=True, text=True).stdout.splitlines())
    except FileNotFoundError:
        return "no GPU"


def main(words: list[str]) -> None:
    asked = read_words(words)
    for number in range(asked.repeats):
        for peer in asked.peers:
            try:
                result = measure(peer, asked)
            except RuntimeError as error:  # the others are still worth their time
                asked.failures[peer] = str(error)
                print(f"round {number + 1} {peer} failed: {error}", flush=True)
                continue
            asked.results.setdefault(peer, []).append(result)
            write(asked)
            ms = statistics.median(timed(result, asked))
            print(f"round {number + 1} {peer}: {ms:.1f} ms a step, last loss {result.losses[-1]:.5f}", flush=True)
    for made in table(asked):
        print(
            {
                name: made[name]
                for name in ("peer", "tokens_per_s_per_gpu", "tflops_causal", "median_ms", "ratio_to_peer")
            }
        )
    if asked.failures:
        raise SystemExit(f"failed: {', '.join(asked.failures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
