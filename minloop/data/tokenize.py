"""Files of text to the .bin and .idx files that mcore's datasets read: by many processes, resumable."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.core.datasets.indexed_dataset import DType

from minloop.data.progress import show_progress
from minloop.data.sources import check_inputs, read_chunks
from minloop.data.tokenize_workers import TokenizeJob, encode_all
from minloop.data.tokenizers import Tokenizer, check_eod
from minloop.data.work import EXAMPLES, Counts, UnfinishedWork
from minloop.messages import logger


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_to_indexed` wrote.

    Attributes:
        prefixes: key → the prefix of its .bin and .idx.
        documents: in each of them.
        tokens: key → tokens written, ends of documents included.
        empty: documents without a token, counted for every key; they are in the index, as in Megatron-LM's.
        malformed: records left out.
        examples: the first hundred of these, "path:line: reason"; lines, and rows of Parquet, count from 1.
    """

    prefixes: dict[str, str]
    documents: int
    tokens: dict[str, int]
    empty: int
    malformed: int
    examples: list[str]


def tokenize_to_indexed(
    inputs: str | Path | Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = True,
    split_sentences: Callable[[str], Iterable[str]] | None = None,
    num_workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    resume: bool = True,
) -> TokenizeReport:
    """Tokenize files into ``<output_prefix>_<key>_document``.bin and .idx, byte for byte what Megatron-LM's
    tools/preprocess_data.py writes.

    The files appear under their names only when they are whole. Until then all is in ``<output_prefix>.unfinished``,
    and calling it again after a run was killed goes on with that. Memory holds a few megabytes a process, and the
    largest document. On a terminal, with rich, a bar shows the progress. Call it on one rank.

    Args:
        inputs: files in order. .jsonl, .json and .ndjson hold a JSON object a line (empty lines are passed over),
            .parquet a row a document; any other file is one document, UTF-8. All but Parquet may be .gz or .zst.
        keys: the fields or columns to write, each to files of its own. Their values are strings, or lists of strings:
            the document's sequences.
        append_eod: end every document with `tokenizer.eod`.
        split_sentences: makes each string several sequences; the names then end in "_sentence".
        num_workers: processes, the cores that this one may use unless given; 0 works in this process.
        on_error: whether a malformed record (not JSON, not UTF-8, a key that is absent or not text) stops the run or is
            left out, counted and reported.
        resume: False throws away what an unfinished run has left, and begins anew.
    Raises:
        ValueError: an input that does not exist or is damaged, a malformed record, no document with a token, a token
            id that is not below tokenizer.vocab_size, names that are taken, an unfinished run with other arguments.
        RuntimeError: pyarrow is needed and missing, or another process writes the same files.
    """
    paths = [Path(inputs)] if isinstance(inputs, str | Path) else [Path(path) for path in inputs]
    check_inputs(paths, keys)
    if on_error not in ("raise", "skip") or len(set(keys)) < len(keys):
        raise ValueError(f"on_error ({on_error!r}) is 'raise' or 'skip', and keys ({list(keys)}) are given once each")
    if append_eod:
        check_eod(tokenizer)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    job = TokenizeJob(tokenizer, tuple(keys), append_eod, split_sentences, dtype)
    level = "document" if split_sentences is None else "sentence"
    names = {key: f"{output_prefix}_{key}_{level}" for key in keys}
    work = UnfinishedWork(str(output_prefix), names, _identity(paths, job), dtype, resume)
    try:
        if not work.finished:
            workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
            _write_all(work, paths, job, workers, on_error)
            _check_not_empty(work.counts, keys)
        work.finish()
    finally:
        work.close()
    counts = work.counts
    if counts.malformed:
        logger.warning("%d malformed records were left out, the first: %s", counts.malformed, counts.examples[0])
    return TokenizeReport(names, counts.documents, counts.tokens, counts.empty, counts.malformed, counts.examples)


def _identity(paths: Sequence[Path], job: TokenizeJob) -> dict[str, Any]:
    tokenizer: Any = job.tokenizer
    return {
        "inputs": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "keys": list(job.keys),
        "append_eod": job.append_eod,
        "split_sentences": job.split_sentences is not None,
        "tokenizer": [type(tokenizer).__name__, tokenizer.vocab_size, tokenizer.eod, _digest(tokenizer)],
    }


def _digest(tokenizer: Any) -> str | None:
    """Of the file that holds the vocabulary: another one may come to lie at the same path."""
    path = Path(getattr(tokenizer, "path", None) or "")
    path = path / "tokenizer.json" if path.is_dir() else path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write_all(work: UnfinishedWork, paths: list[Path], job: TokenizeJob, workers: int, on_error: str) -> None:
    chunks = read_chunks(paths, job.keys, work.position)
    with show_progress(f"{len(paths)} files", sum(path.stat().st_size for path in paths)) as show:
        for chunk, encoded in encode_all(job, chunks, workers):
            examples = [f"{chunk.path}:{number}: {reason}" for number, reason in encoded.malformed]
            if examples and on_error == "raise":
                raise ValueError(f"{examples[0]}; on_error='skip' leaves such records out")
            counts = work.counts
            counts.malformed += len(examples)
            counts.examples += examples[: EXAMPLES - len(counts.examples)]
            for key, part in encoded.parts.items():
                work.writers[key].write(*part)
                counts.tokens[key] = work.writers[key].tokens
                counts.empty += int((part[2] == 0).sum())
            counts.documents += len(encoded.parts[job.keys[0]][2])
            work.position = chunk.end
            work.save()
            show(chunk.bytes_read, counts.documents)


def _check_not_empty(counts: Counts, keys: Sequence[str]) -> None:
    if empty := [key for key in keys if not counts.tokens.get(key)]:
        raise ValueError(
            f"no document with a token for {', '.join(empty)}: the inputs hold {counts.documents} documents, and "
            f"{counts.malformed} malformed records"
        )
