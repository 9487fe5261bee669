"""Indexed text in object storage, here a stub's: read as from a disk, and refused where mcore would fail in silence."""

import io
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets import indexed_dataset, object_storage_utils

from minloop.data import build_byte_tokenizer, build_dataset_config, build_gpt_datasets, write_indexed


class Client:
    """What mcore asks of boto3's, of one bucket that is a directory."""

    def __init__(self, bucket: Path) -> None:
        self.bucket = bucket

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None:
        shutil.copy(self.bucket / Key, Filename)

    def head_object(self, Bucket: str, Key: str) -> dict[str, int]:
        return {"ContentLength": (self.bucket / Key).stat().st_size}

    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, io.BytesIO]:
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        return {"Body": io.BytesIO((self.bucket / Key).read_bytes()[first : last + 1])}

    def close(self) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket with the files "text", and an empty working directory beside it."""
    (path := tmp_path / "bucket").mkdir()
    write_indexed([f"document {number}, of some length" for number in range(40)], path / "text", build_byte_tokenizer())
    boto3 = types.SimpleNamespace(client=lambda _: Client(path))
    for module in (object_storage_utils, indexed_dataset):
        monkeypatch.setattr(module, "boto3", boto3, raising=False)
    (empty := tmp_path / "here").mkdir()
    monkeypatch.chdir(empty)
    return path


def samples(**fields: Any) -> list[list[int]]:
    config = build_dataset_config(sequence_length=16, tokenizer=build_byte_tokenizer(), split="90,10,0", **fields)
    train, valid, _ = build_gpt_datasets(config, (40, 4, 0))
    datasets: Any = (train, valid)
    return [dataset[index]["tokens"].tolist() for dataset in datasets for index in range(len(dataset))]


def test_object_storage_is_read_as_a_disk_is(bucket: Path, tmp_path: Path) -> None:
    there: dict[str, Any] = {"blend": (["s3://bucket/text"], None), "path_to_cache": str(tmp_path / "a")}
    there |= {"object_storage_cache_path": str(tmp_path / "b"), "mmap_bin_files": False}
    here = {"blend": ([str(bucket / "text")], None), "path_to_cache": str(tmp_path / "c")}
    assert len(samples(**there)) > 40
    assert samples(**there) == samples(**here)
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("name", ["object_storage_cache_path", "path_to_cache", "mmap_bin_files"])
def test_what_object_storage_lacks_is_named(bucket: Path, tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = {"path_to_cache": str(tmp_path / "a"), "object_storage_cache_path": str(tmp_path / "b")}
    fields |= {"mmap_bin_files": False}
    del fields[name]
    usual = True if name == "mmap_bin_files" else None
    with pytest.raises(
        ValueError, match=f"s3://bucket/text is in object storage, with .*{name}={usual}.*: set the first"
    ):
        samples(blend=(["s3://bucket/text"], None), **fields)
    assert not [*Path().iterdir()]
