"""Data: order, position, context parallel slices, datasets and their files."""

import itertools
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from ranks import run_ranks
from torch.utils.data import Dataset

from minloop.data import (
    build_byte_tokenizer,
    build_dataset_config,
    build_gpt_datasets,
    build_loader,
    build_mock_dataset,
    build_mock_loader,
    check_token_ids,
    num_microbatches,
    slice_batch_for_context_parallel,
    to_device,
    write_indexed,
)


class Group:
    """What the data part asks of a process group."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def groups(dp_rank: int = 0, dp_size: int = 1, **others: Any) -> Any:
    return types.SimpleNamespace(**{"dp": Group(dp_rank, dp_size), "cp": Group(), **others})


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sample i is four times the token i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((4,), index)
        return {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(4), "loss_mask": torch.ones(4)}


def samples(loader: Any, batches: int | None = None) -> list[int]:
    return [token for batch in itertools.islice(loader, batches) for token in batch["tokens"][:, 0].tolist()]


def test_batch_shapes_and_types():
    config = build_dataset_config(sequence_length=16, vocab_size=32)
    batch = next(build_mock_loader(config, groups(), micro_batch_size=3))
    integers = ("tokens", "labels", "position_ids")
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        **dict.fromkeys(integers, (torch.int64, (3, 16))),
        "loss_mask": (torch.float32, (3, 16)),
    }
    copy = to_device(batch, torch.device("cpu"))
    assert all(copy[name] is value for name, value in batch.items())


@pytest.mark.parametrize("shuffle", [False, True])
def test_global_batch_depends_on_neither_data_parallel_nor_micro_batch_size(shuffle: bool):
    def global_batches(micro_batch_size: int, dp_size: int) -> list[list[int]]:
        count = num_microbatches(8, micro_batch_size, groups(0, dp_size))
        loaders = [
            build_loader(Numbers(30), groups(rank, dp_size), micro_batch_size=micro_batch_size, shuffle=shuffle, seed=5)
            for rank in range(dp_size)
        ]
        return [sorted(token for loader in loaders for token in samples(loader, count)) for _ in range(6)]

    expected = global_batches(8, 1)
    assert len(set(expected[0])) == 8  # so no two ranks shared a sample
    for layout in [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 2)]:
        assert global_batches(*layout) == expected, layout


def test_megatron_order():
    loaders = [build_loader(Numbers(100), groups(rank, 2), micro_batch_size=3, consumed_samples=12) for rank in (0, 1)]
    assert [samples(loader, 2) for loader in loaders] == [[12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23]]
    assert [loader.consumed_samples for loader in loaders] == [24, 24]


def test_ranks_of_one_data_parallel_index_read_the_same():
    layouts = itertools.product((0, 1), repeat=3)
    streams = [
        samples(
            build_loader(
                Numbers(20),
                groups(1, 2, tp=Group(tp, 2), pp=Group(pp, 2), cp=Group(cp, 2)),
                micro_batch_size=2,
                shuffle=True,
            ),
            8,
        )
        for tp, pp, cp in layouts
    ]
    assert all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resume_equals_straight_across_layouts(num_workers: int):
    def loader(rank: int, dp_size: int, micro_batch_size: int) -> Any:
        dataset, layout = Numbers(21), groups(rank, dp_size)
        options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
        return build_loader(dataset, layout, shuffle=True, seed=3, **options)

    straight = samples(loader(0, 1, 8), 4)
    read: list[int] = []
    state = loader(0, 1, 8).state_dict()
    for dp_size, micro_batch_size in [(1, 8), (2, 2), (4, 1), (1, 4)]:
        loaders = [loader(rank, dp_size, micro_batch_size) for rank in range(dp_size)]
        for each in loaders:
            next(each)  # a loader that has started is set back too
            each.load_state_dict(state)
        for _ in range(8 // (micro_batch_size * dp_size)):
            read += [token for each in loaders for token in samples(each, 1)]
        states = [each.state_dict() for each in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert read == straight
    assert state == {"consumed_samples": 32, "dataset_length": 21, "shuffle": 1, "seed": 3}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_leaves_the_default_generators_alone(num_workers: int):
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    samples(build_loader(Numbers(8), groups(), micro_batch_size=2, shuffle=True, num_workers=num_workers), 6)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpy.random.get_state()[1].tolist() == before[1]


def test_wrap_reads_every_sample_once_an_epoch():
    shuffled = samples(build_loader(Numbers(10), groups(), micro_batch_size=3, shuffle=True, seed=1), 10)
    epochs = [shuffled[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert shuffled != samples(build_loader(Numbers(10), groups(), micro_batch_size=3, shuffle=True, seed=2), 10)
    assert samples(build_loader(Numbers(10), groups(), micro_batch_size=3), 10) == list(range(10)) * 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_wrap_it_stops_at_the_last_full_batch_of_all_ranks(num_workers: int):
    options: dict[str, Any] = {"micro_batch_size": 3, "wrap": False, "num_workers": num_workers}
    loaders = [build_loader(Numbers(17), groups(rank, 2), **options) for rank in (0, 1)]
    assert [samples(loader) for loader in loaders] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert loaders[0].consumed_samples == 12
    assert next(loaders[0], None) is None


def test_loader_errors():
    with pytest.raises(ValueError, match=r"micro_batch_size \(0\) must be positive"):
        build_loader(Numbers(8), groups(), micro_batch_size=0)
    with pytest.raises(ValueError, match=r"has 7 samples, fewer .* \(2\) × data parallel size \(4\) = 8"):
        build_loader(Numbers(7), groups(0, 4), micro_batch_size=2)
    with pytest.raises(ValueError, match=r"consumed_samples \(-1\)"):
        build_loader(Numbers(8), groups(), micro_batch_size=2, consumed_samples=-1)
    state = build_loader(Numbers(8), groups(), micro_batch_size=2, shuffle=True, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"dataset_length: 8 saved, 9 here; seed: 1 saved, 2 here"):
        build_loader(Numbers(9), groups(), micro_batch_size=2, shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"shuffle: 1 saved, 0 here"):
        build_loader(Numbers(8), groups(), micro_batch_size=2).load_state_dict(state)


def test_num_microbatches():
    assert num_microbatches(24, 2, groups(0, 3)) == 4
    for global_batch_size, micro_batch_size in [(20, 2), (0, 2), (6, 0)]:
        named = rf"\({global_batch_size}\) .* \({micro_batch_size}\) .* data parallel size \(3\)"
        with pytest.raises(ValueError, match=named):
            num_microbatches(global_batch_size, micro_batch_size, groups(0, 3))


def test_token_ids_are_checked():
    batch = next(iter(build_loader(Numbers(10), groups(), micro_batch_size=10)))
    check_token_ids(batch, 10)
    with pytest.raises(ValueError, match="ids from 0 to 9, but vocab_size is 9"):
        check_token_ids(batch, 9)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][3, 1], batch["loss_mask"][3, 1] = -100, 0.0
    check_token_ids(batch, 10)
    batch["loss_mask"][3, 1] = 1.0
    with pytest.raises(ValueError, match=r"ids from -100 to 9, .* set loss_mask to 0"):
        check_token_ids(batch, 10)


def sliced(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    cp_group, _ = torch.distributed.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return slice_batch_for_context_parallel(batch, groups(cp=cp_group))


def test_context_parallel_slices():
    tokens = torch.arange(16).view(2, 8)
    mask = torch.ones(2, 1, 8, 8).triu(1).bool()
    batch = {"tokens": tokens, "attention_mask": mask, "dataset_id": torch.tensor([0, 1])}
    parts = run_ranks(4, sliced, batch, init="gloo")
    for part, chosen in zip(parts, [[0, 1, 6, 7], [0, 1, 6, 7], [2, 3, 4, 5], [2, 3, 4, 5]], strict=True):
        assert torch.equal(part["tokens"], tokens[:, chosen])
        assert torch.equal(part["attention_mask"], mask[:, :, chosen])
        assert torch.equal(part["dataset_id"], batch["dataset_id"])
    whole = slice_batch_for_context_parallel(batch, groups())
    assert all(torch.equal(whole[name], value) for name, value in batch.items())


def test_context_parallel_errors():
    pair = groups(cp=Group(0, 2))
    with pytest.raises(ValueError, match=r"sequence length \(6\) must be a multiple of 2 × .* \(2\)"):
        slice_batch_for_context_parallel({"tokens": torch.zeros(1, 6)}, pair)
    with pytest.raises(ValueError, match=r"begin at \[0, 6, 8\]: .* padded to a multiple of 4, by pack_samples"):
        slice_batch_for_context_parallel({"tokens": torch.zeros(1, 8), "cu_seqlens": torch.tensor([[0, 6, 8]])}, pair)


def test_mock_data():
    config = build_dataset_config(sequence_length=64, vocab_size=50)
    loader = build_mock_loader(config, groups(), micro_batch_size=4, num_samples=8, vocab_size=50, wrap=False)
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        check_token_ids(batch, 50)
        assert batch["loss_mask"].all()
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        counts_upward = batch["labels"] == (batch["tokens"] + 1) % 50
        assert counts_upward.float().mean() > 0.9
    with pytest.raises(ValueError, match=r"vocab_size \(49\) is smaller than the tokenizer's \(50\)"):
        build_mock_loader(config, groups(), micro_batch_size=4, vocab_size=49)


def mock_data_on_rank_1(path_to_cache: str) -> int | None:
    config = build_dataset_config(sequence_length=8, vocab_size=32, path_to_cache=path_to_cache)
    return len(build_mock_dataset(config, 10)) if torch.distributed.get_rank() == 1 else None


def test_mock_data_needs_no_other_rank(tmp_path: Path):
    assert run_ranks(2, mock_data_on_rank_1, str(tmp_path), init="gloo") == [None, 10]


def test_dataset_config_errors():
    with pytest.raises(ValueError, match=r"one of vocab_size \(None\) and tokenizer \(None\)"):
        build_dataset_config(sequence_length=8)
    with pytest.raises(ValueError, match=r"reset_attention_mask=True .* create_attention_mask=False"):
        build_dataset_config(sequence_length=8, vocab_size=8, reset_attention_mask=True)


def test_missing_compiled_helper_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    with pytest.raises(RuntimeError, match="compiled dataset helper does not import"):
        build_mock_dataset(build_dataset_config(sequence_length=8, vocab_size=8))


def library_sources() -> list[str]:
    """Real text that is there wherever Python is."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]


def text_config(prefixes: list[str], **fields: Any) -> GPTDatasetConfig:
    chosen: dict[str, Any] = {"blend": (prefixes, None), "split": "1,0,0", "tokenizer": build_byte_tokenizer()}
    return build_dataset_config(sequence_length=32, **{**chosen, **fields})


def test_indexed_text_returns_byte_for_byte(tmp_path: Path):
    texts = library_sources()
    tokens = write_indexed([*texts, ""], tmp_path / "text", build_byte_tokenizer())
    indexed: Any = IndexedDataset(str(tmp_path / "text"))
    assert [bytes(document.tolist()) for document in indexed] == [text.encode() + b"\xff" for text in texts]
    assert tokens == sum(len(document) for document in indexed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin", "text.idx"]


def test_every_byte_of_text_has_loss(tmp_path: Path):
    text = "".join(map(chr, [1, *range(0xD800), *range(0xE000, 0x110000, 977)]))
    write_indexed([text], tmp_path / "text", build_byte_tokenizer())
    train: Any = build_gpt_datasets(text_config([str(tmp_path / "text")]), (None, 0, 0), vocab_size=256)[0]
    ordered: list[Any] = [None] * len(train)
    for sample, position in zip(train, train.shuffle_index, strict=False):
        ordered[position] = sample
    assert all(sample["loss_mask"].all() for sample in ordered)
    labels = torch.cat([sample["labels"] for sample in ordered]).tolist()
    assert bytes(labels) == (text.encode() + b"\xff")[1 : len(labels) + 1]
    assert len(set(labels) - {255}) == 256 - 13  # UTF-8 has no use for 13 byte values, of which 255 ends a document


@pytest.mark.parametrize("create_attention_mask", [False, True])
def test_padding_of_one_sample_masks_no_other(tmp_path: Path, create_attention_mask: bool):
    write_indexed(["a" * 80], tmp_path / "text", build_byte_tokenizer())
    prefix = str(tmp_path / "text")
    masks = {"create_attention_mask": create_attention_mask, "drop_last_partial_validation_sequence": False}
    config = text_config([prefix], split="0,1,0", **masks)
    valid: Any = build_gpt_datasets(config, (0, None, 0))[1]
    padded_first = numpy.argsort(valid.shuffle_index)[::-1]
    assert [int(valid[index]["loss_mask"].sum()) for index in padded_first] == [80 - 64, 32, 32]
    samples = list(valid)
    valid.masks_and_position_ids_are_cacheable = False  # mcore then builds every sample's anew
    for sample, anew in zip(samples, valid, strict=True):
        assert sample.keys() == anew.keys()
        assert all(torch.equal(value, anew[name]) for name, value in sample.items())


def test_blend_can_be_read(tmp_path: Path):
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        write_indexed([Path(prefix).name * 2000], prefix, build_byte_tokenizer())
    config = text_config(prefixes, blend=(prefixes, [3, 1]))
    train, valid, test = build_gpt_datasets(config, (40, 0, 0))
    assert train is not None
    assert valid is None
    assert test is None
    batch = next(build_loader(train, groups(), micro_batch_size=40))
    assert (batch["tokens"] == ord("a")).float().mean() == pytest.approx(0.75, abs=0.05)
    assert batch["dataset_id"].tolist() == (batch["tokens"][:, 0] == ord("b")).tolist()


def test_write_indexed_errors_leave_nothing(tmp_path: Path):
    class Narrow:
        vocab_size, eod = 100, 0

        def tokenize(self, text: str) -> list[int]:
            return list(text.encode())

    with pytest.raises(ValueError, match="ids from 122 to 122, but its vocab_size is 100"):
        write_indexed(["A", "z"], tmp_path / "text", Narrow())
    with pytest.raises(ValueError, match="no document with a token"):
        write_indexed([""], tmp_path / "text", build_byte_tokenizer())
    with pytest.raises(ValueError, match="each of its characters would be a document"):
        write_indexed("text", tmp_path / "text", build_byte_tokenizer())
    Narrow.eod = 100
    with pytest.raises(ValueError, match="the tokenizer's end of document is 100"):
        write_indexed(["A"], tmp_path / "text", Narrow())
    assert not list(tmp_path.iterdir())
    write_indexed(["old"], tmp_path / "text", build_byte_tokenizer())
    with pytest.raises(ValueError, match=r"text.idx exists: choose another output_prefix"):
        write_indexed(["new"], tmp_path / "text", build_byte_tokenizer())
    assert (tmp_path / "text.bin").read_bytes() == numpy.array(list(b"old\xff"), dtype=numpy.uint16).tobytes()
    (tmp_path / "text.idx").unlink()
    (tmp_path / "text" / "cache").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"text exists: choose another output_prefix"):
        write_indexed(["new"], tmp_path / "text", build_byte_tokenizer())


def test_gpt_dataset_errors(tmp_path: Path):
    write_indexed(["one", "two"], tmp_path / "text", build_byte_tokenizer())
    config = text_config([str(tmp_path / "text")], split="98,1,1")
    with pytest.raises(ValueError, match=r"leaves no document with a token for valid, as .*text has 2"):
        build_gpt_datasets(config, (4, 4, 4))
    with pytest.raises(ValueError, match=r"vocab_size \(255\) is smaller than the tokenizer's \(256\)"):
        build_gpt_datasets(config, (4, 4, 4), vocab_size=255)
    with pytest.raises(ValueError, match="use build_gpt_datasets"):
        build_mock_dataset(config)
    with pytest.raises(ValueError, match="use build_mock_dataset"):
        build_gpt_datasets(build_dataset_config(sequence_length=8, vocab_size=8), (4, 4, 4))


@pytest.mark.parametrize("mmap_bin_files", [True, False])
def test_documents_without_tokens_are_passed_over(tmp_path: Path, mmap_bin_files: bool):
    def config(name: str, lengths: list[int], split: str = "1,0,0") -> GPTDatasetConfig:
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), DType.optimal_dtype(256))
        for length in lengths:
            builder.add_document(torch.full((length,), length), [length])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return text_config([str(tmp_path / name)], mmap_bin_files=mmap_bin_files, split=split)

    train: Any = build_gpt_datasets(config("text", [0, 40, 0, 0, 60, 0]), (None, 0, 0))[0]
    assert sorted({token for sample in train for token in sample["tokens"].tolist()}) == [40, 60]
    assert len(train) == 3
    with pytest.raises(ValueError, match=r"none holds no sequence: there is nothing to train on"):
        build_gpt_datasets(config("none", []), (None, 0, 0))
    with pytest.raises(ValueError, match=r"empty holds no token, and 2 sequences: there is nothing to train on"):
        build_gpt_datasets(config("empty", [0, 0]), (None, 0, 0))
    with pytest.raises(ValueError, match=r"leaves no document with a token for train, as .*half has 2"):
        build_gpt_datasets(config("half", [0, 40], split="1,1,0"), (8, None, 0))


def test_blend_errors(tmp_path: Path):
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        write_indexed([f"document {index}" for index in range(20)], prefix, build_byte_tokenizer())
    missing = [prefixes[0], str(tmp_path / "c")]
    wrong: list[tuple[dict[str, Any], tuple[int | None, int, int], str]] = [
        ({"blend": (prefixes, [1.0, -1.0])}, (4, 0, 0), r"must be positive: \[1.0, -1.0\]"),
        ({"blend": (prefixes, [0.0, 1.0])}, (4, 0, 0), "must be positive"),
        ({"blend": (prefixes, [1.0, math.nan])}, (4, 0, 0), "must be positive"),
        ({"blend": (prefixes, [3.0, 1.0])}, (None, 0, 0), "num_samples for train is None, but its blend has weights"),
        ({"blend": (missing, [1.0, 1.0])}, (4, 0, 0), "c.idx does not exist"),
        ({"blend_per_split": [None, (missing, None), None], "blend": None, "split": None}, (4, 4, 4), "c.idx does not"),
    ]
    for fields, sizes, message in wrong:
        with pytest.raises(ValueError, match=message):
            build_gpt_datasets(text_config(prefixes, **fields), sizes)
    with pytest.raises(ValueError, match="must be equal in number"):
        text_config(prefixes, blend=(prefixes, [1.0]))
    with pytest.raises(ValueError, match=r"blend \('.*a', None\) is not \(\[prefix, ...\], None\)"):
        text_config(prefixes, blend=(prefixes[0], None))
    with pytest.raises(ValueError, match="split must be provided"):
        text_config(prefixes, split=None)


@pytest.mark.parametrize("mmap_bin_files", [True, False])
def test_blends_per_split(tmp_path: Path, mmap_bin_files: bool):
    prefixes = [str(tmp_path / name) for name in "abc"]
    for prefix in prefixes:
        write_indexed([Path(prefix).name * 500] * 4, prefix, build_byte_tokenizer())
    blends = [(prefixes[:2], [1, 3]), (prefixes[2:], None), None]
    fields = {"blend": None, "split": None, "blend_per_split": blends, "mid_level_dataset_surplus": 0.5}
    config = text_config([], **fields, mmap_bin_files=mmap_bin_files, reset_position_ids=True, eod_mask_loss=True)
    built: Any = build_gpt_datasets(config, (40, 8, 0))
    train, valid, test = built
    assert train is not None
    assert valid is not None
    assert test is None
    batch = next(build_loader(train, groups(), micro_batch_size=40))
    assert (batch["tokens"] == ord("b")).float().mean() == pytest.approx(0.75, abs=0.05)
    assert set(valid[0]["tokens"].tolist()) <= {ord("c"), 255}
    ends = batch["tokens"] == 255
    assert ends.any()
    assert not batch["loss_mask"][ends].any()
    assert not batch["position_ids"][:, 1:][ends[:, :-1]].any()


def read_text(prefix: str, path_to_cache: str | None) -> list[int]:
    train: Any = build_gpt_datasets(text_config([prefix], path_to_cache=path_to_cache), (200, 0, 0))[0]
    return [token for sample in train for token in sample["tokens"].tolist()]


@pytest.mark.parametrize("cache", ["cache", None])
def test_ranks_build_one_index(tmp_path: Path, cache: str | None):
    prefix, path_to_cache = str(tmp_path / "text"), cache and str(tmp_path / cache)
    write_indexed(library_sources(), prefix, build_byte_tokenizer())
    first, second = run_ranks(2, read_text, prefix, path_to_cache, init="gloo")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert first == second == read_text(prefix, path_to_cache)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert len(written) == 3


def read_text_of_node(prefix: str, caches: str) -> list[int]:
    """Two nodes of one rank each, with a cache of its own."""
    os.environ["LOCAL_RANK"] = "0"
    cache = f"{caches}/{torch.distributed.get_rank()}"
    train: Any = build_gpt_datasets(text_config([prefix], path_to_cache=cache), (200, 0, 0), cache_per_node=True)[0]
    assert torch.distributed.get_rank() == int(cache[-1])
    return [token for sample in train for token in sample["tokens"].tolist()]


def test_first_rank_of_every_node_builds_its_index(tmp_path: Path):
    prefix = str(tmp_path / "text")
    write_indexed(library_sources(), prefix, build_byte_tokenizer())
    first, second = run_ranks(2, read_text_of_node, prefix, str(tmp_path / "caches"), init="gloo")
    assert first == second
    assert [len(list((tmp_path / "caches" / node).glob("*.npy"))) for node in "01"] == [3, 3]
