"""Text to .bin and .idx: as Megatron-LM writes them, whatever the files, the processes, and the moment of a kill."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from pyarrow import parquet

import minloop
import minloop.data.sources
import minloop.data.tokenize
import minloop.data.work
from minloop.data import build_byte_tokenizer, build_tokenizer, tokenize_to_indexed
from minloop.data.indexed import check_indexed

REFERENCE = Path(__file__).parent / "megatron_lm_indexed"
BYTES = build_byte_tokenizer()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def documents(prefix: str) -> list[bytes]:
    indexed: Any = IndexedDataset(prefix)
    return [bytes(document.tolist()) for document in indexed]


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".idx", ".unfinished"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few lines, and the state saved after each."""
    monkeypatch.setattr(minloop.data.sources, "CHUNK_BYTES", 200)
    monkeypatch.setattr(minloop.data.work, "SAVE_SECONDS", 0.0)


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_those_of_megatron_lm(tmp_path: Path, append_eod: bool, num_workers: int):
    report = tokenize_to_indexed(
        REFERENCE / "documents.jsonl",
        tmp_path / "ours",
        build_tokenizer(REFERENCE),
        keys=["text", "title"],
        append_eod=append_eod,
        num_workers=num_workers,
    )
    name = "reference_eod" if append_eod else "reference"
    for key, prefix in report.prefixes.items():
        assert prefix == f"{tmp_path}/ours_{key}_document"
        for suffix in ("bin", "idx"):
            theirs = REFERENCE / f"{name}_{key}_document.{suffix}"
            assert Path(f"{prefix}.{suffix}").read_bytes() == theirs.read_bytes(), theirs
    assert (report.documents, report.empty, report.malformed) == (5, 2, 0)
    assert len(written(tmp_path)) == 4


def test_index_is_mcores_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over several blocks of the index, empty documents among them."""
    monkeypatch.setattr("minloop.data.indexed._BLOCK", 7)
    texts = ["x" * (index % 5) for index in range(50)]
    report = tokenize_to_indexed(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tmp_path / "a", BYTES)
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), DType.optimal_dtype(256))
    for text in texts:
        ids: Any = numpy.array(list(text.encode() + b"\xff" * bool(text)))
        builder.add_document(ids, [len(ids)] if text else [])
    builder.finalize(str(tmp_path / "b.idx"))
    for suffix in ("bin", "idx"):
        assert Path(f"{report.prefixes['text']}.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    assert report.empty == 10


def test_every_format_gives_the_same(tmp_path: Path, small_chunks: None):
    texts = [f"{index} größer {'word ' * (index % 9)}" for index in range(100)]
    plain = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(plain.read_bytes())
    parquet.write_table(pyarrow.table({"id": range(100), "text": texts}), tmp_path / "a.parquet", row_group_size=30)
    (tmp_path / "files").mkdir()
    (tmp_path / "b.JSONL").write_bytes(plain.read_bytes())
    files = [tmp_path / "files" / f"{index}.py" for index in range(100)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, "utf-8")
    for index, inputs in enumerate(
        [plain, tmp_path / "b.JSONL", tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.zst", tmp_path / "a.parquet", files]
    ):
        report = tokenize_to_indexed(inputs, tmp_path / str(index), BYTES, num_workers=0)
        assert documents(report.prefixes["text"]) == [text.encode() + b"\xff" for text in texts]
        assert report.tokens == {"text": sum(len(text.encode()) + 1 for text in texts)}


def test_sentences(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "One. Two."}, {"text": "Three."}])
    report = tokenize_to_indexed(source, tmp_path / "a", BYTES, split_sentences=lambda text: text.split(" "))
    assert report.prefixes == {"text": f"{tmp_path}/a_text_sentence"}
    assert documents(report.prefixes["text"]) == [b"One.", b"Two.\xff", b"Three.\xff"]
    index: Any = IndexedDataset(report.prefixes["text"])
    assert index.document_indices.tolist() == [0, 2, 3]


MALFORMED = [
    (b'{"text": "cut', "Invalid control character"),
    (b'{"text": "\xff"}', "can't decode byte 0xff"),
    (b'{"body": ""}', r"no 'text' in \['body'\]"),
    (b'["text"]', "no 'text' in list"),
    (b'{"text": 3}', "'text' holds int, not text"),
    (b'{"text": "\\ud83d"}', "surrogates not allowed"),
]


@pytest.mark.parametrize(("line", "reason"), MALFORMED)
def test_malformed_line_is_named(tmp_path: Path, line: bytes, reason: str):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}')
    with pytest.raises(ValueError, match=rf"a.jsonl:3: .*{reason}.*; on_error='skip' leaves"):
        tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=0)
    assert written(tmp_path) == ["a.unfinished"]
    report = tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=0, on_error="skip")
    assert documents(report.prefixes["text"]) == [b"good\xff", b"last\xff"]
    assert (report.malformed, len(report.examples), report.documents) == (1, 1, 2)
    assert report.examples[0].startswith(f"{source}:3: ")
    assert written(tmp_path) == ["a_text_document.bin", "a_text_document.idx"]


def test_plain_text_that_is_not_utf_8_is_named(tmp_path: Path):
    (tmp_path / "good.txt").write_text("größer", "utf-8")
    (tmp_path / "latin.txt").write_text("größer", "latin-1")
    inputs = [tmp_path / "latin.txt", tmp_path / "good.txt"]
    with pytest.raises(ValueError, match=r"latin.txt:1: .*can't decode byte 0xf6"):
        tokenize_to_indexed(inputs, tmp_path / "a", BYTES, num_workers=0)
    report = tokenize_to_indexed(inputs, tmp_path / "a", BYTES, num_workers=0, on_error="skip", resume=False)
    assert (documents(report.prefixes["text"]), report.malformed) == (["größer".encode() + b"\xff"], 1)


def kill_after(chunks: int, source: Path, prefix: Path, num_workers: int) -> None:
    """Tokenize in a process that is killed before it writes its next chunk."""

    def work() -> None:
        save = minloop.data.work.UnfinishedWork.save
        left = [chunks]

        def save_and_count(*args: Any, **options: Any) -> None:
            save(*args, **options)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        minloop.data.work.UnfinishedWork.save = save_and_count
        tokenize_to_indexed(source, prefix, BYTES, num_workers=num_workers)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("suffix", "num_workers"), [("jsonl", 0), ("jsonl", 2), ("jsonl.gz", 0), ("parquet", 0)])
def test_killed_run_is_gone_on_with(
    tmp_path: Path, suffix: str, num_workers: int, small_chunks: None, monkeypatch: pytest.MonkeyPatch
):
    records = [{"text": f"{index} " * 20} for index in range(256)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    if suffix == "jsonl.gz":
        source = tmp_path / "a.jsonl.gz"
        source.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    elif suffix == "parquet":
        source = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(records), source)
    expected = [record["text"].encode() + b"\xff" for record in records]
    kill_after(2, source, tmp_path / "a", num_workers)
    assert written(tmp_path) == ["a.unfinished"]
    with (tmp_path / "a.unfinished" / "text.bin").open("ab") as file:
        file.write(b"what came after the last save")
    saved = (tmp_path / "a.unfinished" / "text.lengths").read_bytes()
    os.truncate(tmp_path / "a.unfinished" / "text.lengths", 0)
    with pytest.raises(ValueError, match=r"text.lengths has lost what was written"):
        tokenize_to_indexed(source, tmp_path / "a", BYTES)
    (tmp_path / "a.unfinished" / "text.lengths").write_bytes(saved)
    with pytest.raises(ValueError, match=r"unfinished run of something else \(append_eod: True there, False here\)"):
        tokenize_to_indexed(source, tmp_path / "a", BYTES, append_eod=False)
    read: list[int] = []
    encode_all = minloop.data.tokenize.encode_all

    def watched(job: Any, chunks: Any, workers: int) -> Any:
        return encode_all(job, (read.append(len(chunk.records)) or chunk for chunk in chunks), workers)

    monkeypatch.setattr("minloop.data.tokenize.encode_all", watched)
    report = tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=num_workers)
    assert documents(report.prefixes["text"]) == expected
    assert report.documents == 256
    assert 0 < sum(read) < 256
    assert written(tmp_path) == ["a_text_document.bin", "a_text_document.idx"]


def test_run_killed_between_its_last_renames_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "title": "two"}])
    moves: list[str] = []
    replace = os.replace

    def failing(old: Any, new: Any) -> None:
        if str(new).endswith((".bin", ".idx")):
            moves.append(str(new))
            if len(moves) == 3:
                raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        tokenize_to_indexed(source, tmp_path / "a", BYTES, keys=["text", "title"], num_workers=0)
    report = tokenize_to_indexed(source, tmp_path / "a", BYTES, keys=["text", "title"], num_workers=0)
    assert [documents(prefix) for prefix in report.prefixes.values()] == [[b"one\xff"], [b"two\xff"]]
    assert report.tokens == {"text": 4, "title": 4}
    with pytest.raises(ValueError, match=r"a_text_document.idx exists: choose another output_prefix"):
        tokenize_to_indexed(source, tmp_path / "a", BYTES, keys=["text", "title"])
    assert len(written(tmp_path)) == 4


def test_two_runs_at_once_are_refused(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    parent, child = multiprocessing.Pipe()

    def hold() -> None:
        names = {"text": str(tmp_path / "x")}
        work = minloop.data.work.UnfinishedWork(str(tmp_path / "a"), names, {}, numpy.uint16, True)
        child.send("held")
        time.sleep(60)
        work.close()

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    try:
        assert parent.recv() == "held"
        with pytest.raises(RuntimeError, match="another process is writing"):
            tokenize_to_indexed(source, tmp_path / "a", BYTES)
    finally:
        process.kill()
        process.join()
    assert tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=0).documents == 1


def test_killed_workers_end_the_run_and_a_killed_run_its_workers(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": str(os.getpid())}])
    parent, child = multiprocessing.Pipe()

    def stuck(text: str) -> list[str]:
        child.send(os.getpid())
        time.sleep(60)
        return [text]

    def run() -> None:
        tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=1, split_sentences=stuck)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.kill(parent.recv(), signal.SIGKILL)
    process.join(30)
    assert process.exitcode == 1  # BrokenProcessPool, and no run that waits for ever
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    worker = parent.recv()
    process.kill()
    process.join()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}/status").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the worker outlived the run"
        time.sleep(0.05)


def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    source, limit = tmp_path / "a.jsonl", 48 << 20
    line = json.dumps({"text": "some words " * 500}) + "\n"
    with source.open("w") as file:
        file.writelines(line for _ in range(3 * limit // len(line)))

    def peak() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokenize_to_indexed(source, tmp_path / "a", BYTES, num_workers=0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        (tmp_path / "grown").write_text(str(grown))

    process = multiprocessing.get_context("fork").Process(target=peak)
    process.start()
    process.join()
    assert int((tmp_path / "grown").read_text()) < limit < source.stat().st_size / 2
    assert check_indexed(tmp_path / "a_text_document").sequences == 3 * limit // len(line)


def test_damaged_inputs_are_named(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": os.urandom(64).hex()} for _ in range(1000)])
    with pyarrow.output_stream(str(tmp_path / "whole.zst"), compression="zstd") as file:
        file.write(source.read_bytes())
    cut = {
        "cut.jsonl.gz": gzip.compress(source.read_bytes()),
        "cut.jsonl.zst": (tmp_path / "whole.zst").read_bytes(),
    }
    for name, content in cut.items():
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match=rf"{name} cannot be read to its end"):
            tokenize_to_indexed(tmp_path / name, tmp_path / "out", BYTES, num_workers=0, resume=False)
    (tmp_path / "empty.jsonl").touch()
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("empty.jsonl", {}, "no document with a token for text: the inputs hold 0 documents"),
        ("absent.jsonl", {}, "absent.jsonl is not a file"),
        ("a.parquet", {}, "a.parquet has no column text, only body"),
        ("a.jsonl", {"keys": []}, "no inputs, or no keys"),
        ("a.jsonl", {"keys": ["text", "text"]}, "are given once each"),
        ("a.jsonl", {"on_error": "warn"}, "'raise' or 'skip'"),
    ]
    for name, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            tokenize_to_indexed(tmp_path / name, tmp_path / "out", BYTES, num_workers=0, resume=False, **options)


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path):
    class Narrow:
        vocab_size, eod = 100, 0

        def tokenize(self, text: str) -> list[int]:
            return list(text.encode())

    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "A"}, {"text": "z"}])
    with pytest.raises(ValueError, match="ids from 122 to 122, but its vocab_size is 100"):
        tokenize_to_indexed(source, tmp_path / "a", Narrow(), num_workers=2, on_error="skip")
    Narrow.eod = 100
    with pytest.raises(ValueError, match="the tokenizer's end of document is 100"):
        tokenize_to_indexed(source, tmp_path / "a", Narrow())


def spoil_version(prefix: Path) -> None:
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    index[9] = 2
    prefix.with_suffix(".idx").write_bytes(index)


def cut(suffix: str, count: int) -> Callable[[Path], None]:
    return lambda prefix: os.truncate(prefix.with_suffix(suffix), prefix.with_suffix(suffix).stat().st_size - count)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda prefix: prefix.with_suffix(".idx").unlink(), "text.idx does not exist"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), "text.bin does not exist"),
        (spoil_version, r"text.idx is of version 2, type 8: only version 1 is read"),
        (cut(".bin", 1), r"text.bin has 7 bytes, and by text.idx 8: it is cut short"),
        (cut(".idx", 1), r"text.idx has 61 bytes, and by its header 62: it is cut short"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b"text"), "text.idx is no index"),
    ],
)
def test_damaged_indexed_files_are_named(tmp_path: Path, spoil: Callable[[Path], None], message: str):
    minloop.write_indexed(["one"], tmp_path / "text", BYTES)
    assert (check_indexed(tmp_path / "text").sequences, check_indexed(tmp_path / "text").documents) == (1, 1)
    spoil(tmp_path / "text")
    with pytest.raises(ValueError, match=message):
        check_indexed(tmp_path / "text")
