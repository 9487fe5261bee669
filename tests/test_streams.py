"""Which tokens each rank reads: by data, tensor, pipeline and context parallel index, over an epoch, after a resume."""

import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small import small_config
from test_data import Numbers, groups, library_sources, samples
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

import minloop
from minloop.data import build_byte_tokenizer, build_dataset_config, build_gpt_datasets, build_loader, write_indexed
from minloop.data.batch import slice_batch_for_context_parallel
from minloop.data.transport import BY_VALUE_BYTES, SentBatch, collate_to_send, received

TOKENIZER = Path(__file__).parent / "megatron_lm_indexed"
SEQUENCE_LENGTH, MICRO_BATCH_SIZE = 64, 2
RECIPES = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "data.md").read_text(), flags=re.DOTALL
)


def text_dataset(prefix: str, num_samples: int) -> Any:
    config = build_dataset_config(
        sequence_length=SEQUENCE_LENGTH,
        tokenizer=build_byte_tokenizer(),
        blend=([prefix], None),
        split="1,0,0",
    )
    dataset: Any = build_gpt_datasets(config, (num_samples, 0, 0))[0]
    return Subset(dataset, range(num_samples))


def digest(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def epoch_on_this_rank(prefix: str, num_samples: int, layout: dict[str, Any]) -> dict[str, Any]:
    """One epoch: where this rank is, the digests of its samples, and what context parallelism leaves of them."""
    groups = minloop.init_distributed(small_config(**layout), seed=1)
    dataset = text_dataset(prefix, num_samples)
    loader = build_loader(dataset, groups, micro_batch_size=MICRO_BATCH_SIZE, shuffle=True, wrap=False)
    whole, parts = [], []
    for batch in loader:
        whole += [digest(tokens) for tokens in batch["tokens"]]
        parts += list(slice_batch_for_context_parallel(batch, groups)["tokens"])
    place = {name: getattr(groups, name).rank() for name in ("dp", "tp", "pp", "cp")}
    minloop.shutdown_distributed()
    return {**place, "whole": whole, "parts": torch.stack(parts)}


@pytest.mark.parametrize("split", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_ranks_share_out_one_epoch(split: str, tmp_path: Path):
    prefix, num_samples = str(tmp_path / "text"), 48
    write_indexed(library_sources(), prefix, build_byte_tokenizer())
    ranks = run_ranks(8, epoch_on_this_rank, prefix, num_samples, {split: 2, "context_parallel_size": 2})
    streams = {tuple(rank[name] for name in ("dp", "tp", "pp", "cp")): rank for rank in ranks}
    assert len(streams) == 8
    first, second = (next(rank for rank in ranks if rank["dp"] == index) for index in (0, 1))
    for rank in ranks:
        assert rank["whole"] == (second if rank["dp"] else first)["whole"]
    assert not set(first["whole"]) & set(second["whole"])
    expected = [digest(sample["tokens"]) for sample in text_dataset(prefix, num_samples)]
    assert len(set(expected)) == num_samples
    assert sorted(first["whole"] + second["whole"]) == sorted(expected)
    for (dp, tp, pp, cp), rank in streams.items():
        if cp == 0:
            other = streams[dp, tp, pp, 1]["parts"]
            half = SEQUENCE_LENGTH // 4
            rebuilt = torch.cat([rank["parts"][:, :half], other, rank["parts"][:, half:]], dim=1)
            assert [digest(tokens) for tokens in rebuilt] == rank["whole"]


@pytest.mark.parametrize("change_at", range(7))
def test_straight_equals_resumed_at_any_step(change_at: int):
    """Data parallel 1, then 2, then 4 for a step each, then 1 again: over an end of the epoch, whatever the step."""

    def loaders(dp_size: int, state: dict[str, int] | None) -> list[Any]:
        made = [
            build_loader(Numbers(21), groups(rank, dp_size), micro_batch_size=4 // dp_size, shuffle=True, seed=3)
            for rank in range(dp_size)
        ]
        for loader in made:
            if state is not None:
                loader.load_state_dict(state)
        return made

    straight = samples(loaders(1, None)[0], 10)
    read, state = [], None
    for dp_size, steps in [(1, change_at), (2, 1), (4, 1), (1, 8 - change_at)]:
        ranks = loaders(dp_size, state)
        for _ in range(steps):
            read += [token for loader in ranks for token in samples(loader, 1)]
        (state,) = {tuple(loader.state_dict().items()): loader.state_dict() for loader in ranks}.values()
    assert read == straight


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Several at a time, as Hugging Face's `datasets` are read by a DataLoader."""

    def __init__(self) -> None:
        self.numbers, self.asked = Numbers(12), [[0]] * 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise AssertionError("row by row")

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        self.asked.append(indices)
        return [self.numbers[index] for index in indices]


def test_rows_are_read_a_batch_at_a_time():
    rows = Rows()
    assert samples(build_loader(rows, groups(1, 2), micro_batch_size=3), 2) == [3, 4, 5, 9, 10, 11]
    assert rows.asked == [[3, 4, 5], [9, 10, 11]]


def test_a_workers_batch_arrives_as_it_was():
    samples = [
        {"tokens": torch.arange(6), "image": torch.rand(2, 3).bfloat16(), "mask": torch.ones(3).bool(), "id": index}
        for index in range(2)
    ]
    expected = default_collate(samples)
    loader = DataLoader(Numbers(2), batch_size=2, num_workers=1, collate_fn=lambda _: collate_to_send(samples))
    sent: Any = next(iter(loader))
    assert isinstance(sent, SentBatch)
    batch = received(sent)
    assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }
    assert all(torch.equal(value, batch[name]) for name, value in expected.items())
    for other in ([{"tokens": torch.zeros(BY_VALUE_BYTES)}], [{"name": "text"}], [torch.arange(3)]):
        assert not isinstance(collate_to_send(other), SentBatch)


def losses_of(batches: Iterator[Any], groups: Any, config: Any) -> list[float]:
    chunks = minloop.build_gpt_model(config, groups, vocab_size=512, max_sequence_length=1024)
    ddp_config = minloop.build_ddp_config(config)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=1e-3)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    state = minloop.TrainState(chunks, optimizer, None, config, groups)
    return [minloop.train_step(state, batches, num_microbatches=1).loss.item() for _ in range(4)]


def run_recipe(recipe: str, names: dict[str, Any]) -> None:
    """Run the block of docs/data.md that contains `recipe`."""
    (block,) = (block for block in RECIPES if recipe in block)
    exec(block, names)


def trained_on_recipe(package: str, recipe: str) -> list[float]:
    """Run a recipe on this rank, and train on what it makes."""
    config = small_config()
    names: dict[str, Any] = {
        "groups": minloop.init_distributed(config, seed=1),
        "tokenizer": minloop.build_tokenizer(TOKENIZER),
        "sequence_length": SEQUENCE_LENGTH,
        "train_iters": 10,
        "global_batch_size": 8,
        "minloop": minloop,
        "torch": torch,
        package: importlib.import_module({"energon": "megatron.energon"}.get(package, package)),
    }
    exec(next(block for block in RECIPES if "def to_sample" in block).partition("\n\n\n")[0], names)
    run_recipe(recipe, names)
    losses = losses_of(names.get("batches") or names["loader"], names["groups"], config)
    minloop.shutdown_distributed()
    return losses


@pytest.mark.parametrize(
    ("package", "recipe"),
    [
        ("minloop", "build_gpt_datasets"),
        ("datasets", "build_loader(rows"),
        ("datasets", "streaming=True"),
        ("energon", "class Encoder"),
    ],
)
def test_recipes_train(package: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of other packages where these are installed; nothing else needs them."""
    module = pytest.importorskip({"energon": "megatron.energon.flavors.jsonl.jsonl_prepare"}.get(package, package))
    lines = [json.dumps({"text": text[:500]}) for text in library_sources() * 8]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOKENIZER, "path/to")
    Path("text.jsonl").write_text("\n".join(lines) + "\n")
    if package == "energon":
        module.JsonlPreparator.prepare_dataset(Path("text.jsonl"))
    run_recipe("tokenize_to_indexed", {"minloop": minloop})
    for losses in run_ranks(2, trained_on_recipe, package, recipe):
        assert losses[-1] < losses[0] < 7
