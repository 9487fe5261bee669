"""Tokens a second: from text to .bin/.idx, and from .bin/.idx to batches.

    MEGATRON_LM=/path/to/Megatron-LM python benchmarks/data.py [megabytes=30] [workers=2] [sequence_length=4096]

One JSON object a line. Tokenizing runs beside Megatron-LM's tools/preprocess_data.py on the same file, with the same
tokenizer and as many processes, if MEGATRON_LM names a checkout; its seconds are counted from when its own start-up is
over, ours from the call, and the files must be equal. Loading runs beside a plain numpy.memmap of the same tokens read
in the same sizes, by one process each.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's minloop, and its examples

import minloop
from examples.pretrain_text import source_files, train_tokenizer

VOCAB_SIZE, SAMPLES = 32_000, 2_000


def write_text(path: Path, files: list[Path], megabytes: int) -> None:
    """Sources of the standard library, over and over, a file a line, until there are so many megabytes."""
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    with path.open("w", encoding="utf-8") as lines:
        while lines.tell() < megabytes * 1_000_000:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def tokenize_ours(text: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    built = minloop.build_tokenizer(tokenizer)
    start = time.perf_counter()
    report = minloop.tokenize_to_indexed(text, text.parent / "ours", built, num_workers=workers)
    seconds = time.perf_counter() - start
    return {"tokenizing": "minloop", "seconds": seconds, "tokens_per_s": report.tokens["text"] / seconds}


def tokenize_theirs(text: Path, tokenizer: Path, workers: int, checkout: Path) -> dict[str, Any]:
    command = [sys.executable, str(checkout / "tools/preprocess_data.py"), "--input", str(text), "--append-eod"]
    command += ["--output-prefix", str(text.parent / "theirs"), "--workers", str(workers)]
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
    for suffix in ("bin", "idx"):
        ours, theirs = (text.parent / f"{name}_text_document.{suffix}" for name in ("ours", "theirs"))
        if ours.read_bytes() != theirs.read_bytes():
            raise RuntimeError(f"{ours} and {theirs} differ")
    tokens = minloop.describe_dataset(text.parent / "theirs_text_document").tokens
    return {"tokenizing": "Megatron-LM", "seconds": seconds, "tokens_per_s": tokens / seconds}


def our_batches(prefix: Path, tokenizer: Path, sequence_length: int, num_workers: int) -> Iterator[Any]:
    config = minloop.build_dataset_config(
        sequence_length=sequence_length,
        tokenizer=minloop.build_tokenizer(tokenizer),
        blend=([str(prefix)], None),
        split="1,0,0",
    )
    dataset: Any = minloop.build_gpt_datasets(config, (SAMPLES, 0, 0))[0]
    alone: Any = types.SimpleNamespace(dp=types.SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    return minloop.build_loader(dataset, alone, micro_batch_size=1, num_workers=num_workers)


def memmap_batches(prefix: Path, sequence_length: int) -> Iterator[Any]:
    """What a loop of twenty lines does: windows at random places, shifted by one."""
    tokens = numpy.memmap(f"{prefix}.bin", dtype=numpy.uint16, mode="r")
    for start in numpy.random.default_rng(0).integers(0, len(tokens) - sequence_length - 1, SAMPLES):
        window = torch.from_numpy(tokens[start : start + sequence_length + 1].astype(numpy.int64))
        yield {"tokens": window[None, :-1], "labels": window[None, 1:]}


def loading(name: str, batches: Iterator[Any]) -> dict[str, Any]:
    next(batches)  # workers are started, caches written
    start, tokens = time.perf_counter(), 0
    for _ in range(SAMPLES - 1):
        tokens += next(batches)["tokens"].numel()
    return {"loading": name, "tokens_per_s": tokens / (time.perf_counter() - start)}


def main() -> None:
    words = {"megabytes": 30, "workers": len(os.sched_getaffinity(0)), "sequence_length": 4096}
    words |= {name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer, files = Path(folder, "text.jsonl"), Path(folder, "tokenizer"), source_files(None)
        write_text(text, files, words["megabytes"])
        train_tokenizer(files[:200], tokenizer, VOCAB_SIZE)
        rows = [tokenize_ours(text, tokenizer, words["workers"])]
        if checkout := os.environ.get("MEGATRON_LM"):
            rows.append(tokenize_theirs(text, tokenizer, words["workers"], Path(checkout)))
        prefix, length = Path(folder, "ours_text_document"), words["sequence_length"]
        for num_workers in (0, 1):
            batches = our_batches(prefix, tokenizer, length, num_workers)
            rows.append(loading(f"minloop, num_workers={num_workers}", batches))
        rows.append(loading("numpy.memmap", memmap_batches(prefix, length)))
    for row in rows:
        print(json.dumps(words | row))


if __name__ == "__main__":
    main()
