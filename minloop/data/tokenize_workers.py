"""The part of tokenizing files that many processes do: records to documents of token ids, in order."""

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy

from minloop.data.sources import Chunk, Format, format_of
from minloop.data.tokenizers import Tokenizer, encode


@dataclass(frozen=True)
class TokenizeJob:
    """What makes tokens of a record."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    split_sentences: Callable[[str], Iterable[str]] | None
    dtype: type[numpy.number]


@dataclass(frozen=True)
class Encoded:
    """A chunk's documents, by key as `IndexedWriter.write` takes them, and its malformed records."""

    parts: dict[str, tuple[bytes, numpy.ndarray, numpy.ndarray]]
    malformed: list[tuple[int, str]]


def encode_all(job: TokenizeJob, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield chunks, without their records, and what became of them, in order; few of them are held at a time."""
    if workers == 0:
        yield from ((chunk, _encode_chunk(job, chunk)) for chunk in chunks)
        return
    # Forked processes share the tokenizer, whatever it is, and the caller's script needs no `if __name__ == ...`.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(job,))
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in chunks:
            pending.append((replace(chunk, records=[]), pool.submit(_encode_in_worker, chunk)))
            if len(pending) > 2 * workers:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_jobs: list[TokenizeJob] = []  # a worker's one


def _start_worker(job: TokenizeJob) -> None:
    _jobs.append(job)
    threading.Thread(target=_die_with_parent, name="die with parent", daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _encode_in_worker(chunk: Chunk) -> Encoded:
    return _encode_chunk(_jobs[0], chunk)


def _encode_chunk(job: TokenizeJob, chunk: Chunk) -> Encoded:
    ids: dict[str, list[Any]] = {key: [] for key in job.keys}
    lengths: dict[str, list[int]] = {key: [] for key in job.keys}
    sequences: dict[str, list[int]] = {key: [] for key in job.keys}
    malformed: list[tuple[int, str]] = []
    kind = format_of(chunk.path)
    for number, record in enumerate(chunk.records, chunk.start.record + 1):
        if kind == "jsonl" and not record.strip():
            continue
        try:
            texts = _texts(job, kind, record)
        except (ValueError, RecursionError) as error:
            malformed.append((number, str(error)))
            continue
        for key, sentences in texts.items():
            encoded = [some for sentence in sentences if (some := encode(job.tokenizer, sentence)).size]
            sequences[key].append(len(encoded))
            if encoded and job.append_eod:
                encoded[-1] = numpy.append(encoded[-1], job.tokenizer.eod)
            ids[key] += encoded
            lengths[key] += map(len, encoded)
    parts = {
        key: (
            numpy.concatenate(ids[key] or [[]], dtype=job.dtype, casting="unsafe").tobytes(),
            numpy.array(lengths[key], dtype=numpy.int32),
            numpy.array(sequences[key], dtype=numpy.int64),
        )
        for key in job.keys
    }
    return Encoded(parts, malformed)


def _texts(job: TokenizeJob, kind: Format, record: Any) -> dict[str, list[str]]:
    """The strings of each key; ValueError says what is wrong with the record."""
    if kind == "text":
        record = {job.keys[0]: record.decode()}
    elif kind == "jsonl":
        record = json.loads(record.decode())
    if not isinstance(record, dict) or any(key not in record for key in job.keys):
        found = list(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"no {' and '.join(map(repr, job.keys))} in {found}")
    texts: dict[str, list[str]] = {}
    for key in job.keys:
        strings = record[key] if isinstance(record[key], list) else [record[key]]
        for string in strings:
            if not isinstance(string, str):
                raise ValueError(f"{key!r} holds {type(string).__name__}, not text")
            string.encode()  # half of a surrogate pair is no character, and no tokenizer takes it
        split = job.split_sentences
        texts[key] = strings if split is None else [sentence for string in strings for sentence in split(string)]
    return texts
