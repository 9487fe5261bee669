"""Tokens a second: from text to .bin/.idx, from .bin/.idx to batches, and from one rank to its tensor parallel peer.

    MEGATRON_LM=/path/to/Megatron-LM TORCHTITAN=/site/packages python benchmarks/data.py
        [megabytes=30] [workers=2] [sequence_length=4096] [rounds=5]

All take turns, a round each, and a figure is the median of the rounds; `of_memmap` and `of_megatron_lm` are medians of
ratios within a round, which hold on a machine that others load, too. Results: results/data.json.

Tokenizing runs beside Megatron-LM's tools/preprocess_data.py on the same file, with the same tokenizer and as many
processes, if MEGATRON_LM names a checkout; its seconds are counted from when its own start-up is over, ours from the
call, and the files must be equal. Loading runs beside a plain numpy.memmap of the same tokens, and beside torchtitan's
loader if TORCHTITAN holds it, `datasets` and `torchdata`: that one tokenizes while it reads. num_workers=0 reads in the
process itself, 1 in one process of a DataLoader.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's minloop, and its examples
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ranks import run_ranks

import minloop
from examples.pretrain_text import source_files, train_tokenizer

RESULT = Path(__file__).parent / "results" / "data.json"
VOCAB_SIZE, SAMPLES = 32_000, 500


def write_text(path: Path, files: list[Path], megabytes: int) -> None:
    """Sources of the standard library, over and over, a file a line, until there are so many megabytes."""
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    with path.open("w", encoding="utf-8") as lines:
        while lines.tell() < megabytes * 1_000_000:
            for text in texts:
                lines.write(json.dumps({"text": text}) + "\n")
                if lines.tell() >= megabytes * 1_000_000:
                    break


def tokenize_ours(text: Path, tokenizer: Path, workers: int, output: str) -> float:
    built = minloop.build_tokenizer(tokenizer)
    start = time.perf_counter()
    report = minloop.tokenize_to_indexed(text, text.parent / output, built, num_workers=workers)
    return report.tokens["text"] / (time.perf_counter() - start)


def tokenize_theirs(text: Path, tokenizer: Path, workers: int, output: str, checkout: Path) -> float:
    command = [sys.executable, str(checkout / "tools/preprocess_data.py"), "--input", str(text), "--append-eod"]
    command += ["--output-prefix", str(text.parent / output), "--workers", str(workers)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
    started = 0.0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        for line in run.stdout or ():
            if re.match("Time to startup", line):
                started = time.perf_counter()
    seconds = time.perf_counter() - started
    if run.returncode or not started:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}")
    return minloop.describe_dataset(f"{text.parent / output}_text_document").tokens / seconds


def tokenizing(text: Path, tokenizer: Path, workers: int, rounds: int) -> list[dict[str, Any]]:
    checkout, rates = os.environ.get("MEGATRON_LM"), {"minloop": [0.0] * 0, "Megatron-LM": [0.0] * 0}
    for index in range(rounds):
        rates["minloop"].append(tokenize_ours(text, tokenizer, workers, f"ours{index}"))
        if checkout:
            rates["Megatron-LM"].append(tokenize_theirs(text, tokenizer, workers, f"theirs{index}", Path(checkout)))
            for suffix in ("bin", "idx"):
                ours, theirs = (text.parent / f"{name}{index}_text_document.{suffix}" for name in ("ours", "theirs"))
                if ours.read_bytes() != theirs.read_bytes():
                    raise RuntimeError(f"{ours} and {theirs} differ")
    return rows("tokenizing", rates, "Megatron-LM", "of_megatron_lm")


def gpt_dataset(prefix: Path, tokenizer: Path, sequence_length: int) -> Any:
    config = minloop.build_dataset_config(
        sequence_length=sequence_length,
        tokenizer=minloop.build_tokenizer(tokenizer),
        blend=([str(prefix)], None),
        split="1,0,0",
    )
    return minloop.build_gpt_datasets(config, (SAMPLES + 1, 0, 0))[0]


def our_batches(dataset: Any, num_workers: int) -> Iterator[Any]:
    alone: Any = types.SimpleNamespace(dp=types.SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    return minloop.build_loader(dataset, alone, micro_batch_size=1, num_workers=num_workers)


class Windows(Dataset[dict[str, torch.Tensor]]):
    """What a loop of twenty lines reads: windows of a memmap at random places, and the same shifted by one."""

    def __init__(self, prefix: Path, sequence_length: int) -> None:
        self.tokens, self.length = numpy.memmap(f"{prefix}.bin", dtype=numpy.uint16, mode="r"), sequence_length
        self.starts = numpy.random.default_rng(0).integers(0, len(self.tokens) - sequence_length - 1, SAMPLES + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[self.starts[index] : self.starts[index] + self.length + 1].astype(numpy.int64)
        return {"tokens": torch.from_numpy(window[:-1]), "labels": torch.from_numpy(window[1:])}


def torchtitan_batches(text: Path, tokenizer: Path, sequence_length: int, num_workers: int) -> Iterator[Any]:
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    def load(path: str) -> Any:
        return load_dataset("json", data_files=path, split="train", cache_dir=str(text.parent / "cache"))

    text_datasets.DATASETS["text"] = DatasetConfig(str(text), load, lambda sample: sample["text"])
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = "text", str(text)
    config.training.local_batch_size, config.training.seq_len = 1, sequence_length
    config.training.dataloader.num_workers = num_workers
    loader: Any = text_datasets.build_text_dataloader(1, 0, HuggingFaceTokenizer(str(tokenizer)), config)
    return ({"tokens": inputs["input"]} for inputs, _ in loader)


def rate(batches: Iterator[Any]) -> float:
    next(batches)  # workers are started, caches written
    start, tokens = time.perf_counter(), 0
    for _ in range(SAMPLES):
        tokens += next(batches)["tokens"].numel()
    return tokens / (time.perf_counter() - start)


def loading(text: Path, prefix: Path, tokenizer: Path, length: int, rounds: int) -> list[dict[str, Any]]:
    dataset, windows = gpt_dataset(prefix, tokenizer, length), Windows(prefix, length)
    makers: dict[str, Callable[[int], Iterator[Any]]] = {
        "minloop": lambda workers: our_batches(dataset, workers),
        "numpy.memmap": lambda workers: iter(DataLoader(windows, num_workers=workers)),
    }
    if site := os.environ.get("TORCHTITAN"):
        sys.path.append(site)
        makers["torchtitan"] = lambda workers: torchtitan_batches(text, tokenizer, length, workers)
    found: list[dict[str, Any]] = []
    for workers in (0, 1):
        rates: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, make in makers.items():
                rates[name].append(rate(make(workers)))
        found += [row | {"num_workers": workers} for row in rows("loading", rates, "numpy.memmap", "of_memmap")]
    return found


def tensor_parallel_rates(prefix: Path, tokenizer: Path, length: int, rounds: int) -> dict[str, list[float]]:
    """On each of two ranks: both read the same, or rank 0 reads and broadcasts every tensor."""
    dataset, first = gpt_dataset(prefix, tokenizer, length), torch.distributed.get_rank() == 0
    empty = {name: torch.empty_like(value) for name, value in next(our_batches(dataset, 0)).items()}

    def broadcast(batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = next(batches) if first else empty
            for value in batch.values():
                torch.distributed.broadcast(value, 0)
            yield batch

    rates: dict[str, list[float]] = {"each rank reads": [], "one reads and broadcasts": []}
    for _ in range(rounds):
        for name, batches in zip(rates, (our_batches(dataset, 0), broadcast(our_batches(dataset, 0))), strict=True):
            torch.distributed.barrier()
            rates[name].append(rate(batches))
    return rates


def rows(what: str, rates: dict[str, list[float]], other: str, of_other: str) -> list[dict[str, Any]]:
    """A row for each that ran, with its median and that of its ratios to `other`."""
    found: list[dict[str, Any]] = []
    for name, each in rates.items():
        if each:
            found.append({what: name, "tokens_per_s": round(statistics.median(each))})
            if rates[other] and name != other:
                ratios = [a / b for a, b in zip(each, rates[other], strict=True)]
                found[-1][of_other] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    words = {"megabytes": 30, "workers": len(os.sched_getaffinity(0)), "sequence_length": 4096, "rounds": 5}
    words |= {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    length, rounds = words["sequence_length"], words["rounds"]
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer, files = Path(folder, "text.jsonl"), Path(folder, "tokenizer"), source_files(None)
        write_text(text, files, words["megabytes"])
        train_tokenizer(files[:200], tokenizer, VOCAB_SIZE)
        found = tokenizing(text, tokenizer, words["workers"], rounds)
        prefix = Path(folder, "ours0_text_document")
        found += loading(text, prefix, tokenizer, length, rounds)
        rates = run_ranks(2, tensor_parallel_rates, prefix, tokenizer, length, rounds, init="gloo")[0]
        found += rows("tensor parallel ranks", rates, "one reads and broadcasts", "of_broadcast")
    for row in found:
        print(json.dumps(row))
    versions = {name: version(name) for name in ("torch", "megatron-core", "tokenizers")}
    where = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(), "machine": platform.machine()}
    content = {"date": time.strftime("%Y-%m-%d"), **words, **where, "versions": versions, "rows": found}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
