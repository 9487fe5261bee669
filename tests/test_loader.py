"""What surrounds the loader: streams, prefetching, growing batches, evaluation beside training; tokenizers."""

import itertools
import json
import os
import signal
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnMaskType
from ranks import run_ranks
from small import SEQUENCE_LENGTH, VOCAB_SIZE, WIDE, Text, rounding, shared_state, small_state, text_loader, train
from test_data import Numbers, groups, samples
from torch.utils.data import Dataset

import minloop
from minloop.data import (
    CheckedBatch,
    build_loader,
    build_stream_loader,
    build_tokenizer,
    describe_dataset,
    mask_prompt,
    pack_samples,
    padded_vocab_size,
    prefetch_to_device,
    ramped_batch_size,
    write_indexed,
)
from minloop.data.tokenizers import encode

TOKENIZER = Path(__file__).parent / "megatron_lm_indexed"


class Stream:
    """The samples of `Numbers`, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Numbers(self.length)[index] for index in range(self.length))


class SkippingStream(Stream):
    skipped = 0

    def skip(self, count: int) -> Iterator[dict[str, torch.Tensor]]:
        self.skipped += count
        return (Numbers(self.length)[index] for index in range(count, self.length))


@pytest.mark.parametrize("stream", [Stream(26), SkippingStream(26)])
def test_stream_has_the_order_of_the_loader_and_resumes(stream: Stream):
    read: list[int] = []
    state = {"consumed_samples": 0}
    for dp_size, micro_batch_size in [(1, 8), (2, 2), (4, 1), (1, 4)]:
        loaders = [
            build_stream_loader(stream, groups(r, dp_size), micro_batch_size=micro_batch_size) for r in range(dp_size)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for _ in range(8 // (micro_batch_size * dp_size)):
            read += [token for loader in loaders for token in samples(loader, 1)]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    # 32 would have been read, and 26 hold three batches of 8 and no rest of 4
    assert read == list(range(24))
    assert getattr(stream, "skipped", 24) >= 24


def test_stream_and_ramp_errors():
    with pytest.raises(ValueError, match=r"micro_batch_size \(0\) must be positive"):
        build_stream_loader(Stream(2), groups(), micro_batch_size=0)
    with pytest.raises(ValueError, match="a generator can be read once only"):
        build_stream_loader(iter(Stream(2)), groups(), micro_batch_size=1)
    with pytest.raises(ValueError, match=r"one of a Loader \(it has dataset_length, shuffle\)"):
        build_stream_loader(Stream(2), groups(), micro_batch_size=1).load_state_dict(
            build_loader(Numbers(4), groups(), micro_batch_size=2).state_dict()
        )
    with pytest.raises(ValueError, match=r"start \(16\), increment \(10\)"):
        ramped_batch_size(64, 0, start=16, increment=10, ramp_samples=100)
    with pytest.raises(ValueError, match=r"depth \(0\)"):
        prefetch_to_device(build_loader(Numbers(4), groups(), micro_batch_size=2), vocab_size=8, depth=0)


def test_global_batch_decides_where_it_ends():
    options: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 8, "wrap": False}
    loaders = [build_loader(Numbers(22), groups(rank, 2), **options) for rank in (0, 1)]
    assert sorted(samples(loaders[0]) + samples(loaders[1])) == list(range(16))
    with pytest.raises(ValueError, match=r"7 samples, fewer than one global_batch_size \(8\)"):
        build_loader(Numbers(7), groups(0, 2), **options)


def test_a_prefetched_pack_is_not_checked_again(monkeypatch: pytest.MonkeyPatch):
    """Its ids are on the device: reading them would wait for the copy."""
    placed: list[Any] = []

    def place(batch: Any, model: Any) -> Any:
        raise InterruptedError(placed.append(batch))

    monkeypatch.setattr("minloop.packed.place_batch", place)
    pack = {name: value[None] for name, value in pack_samples(Answers(), sequence_length=32)[0].items()}
    for batch in (CheckedBatch(pack), pack):
        with pytest.raises(InterruptedError):
            minloop.packed_forward_step(iter([batch]), torch.nn.Module())
    assert [type(batch) for batch in placed] == [CheckedBatch, dict]


def test_an_attention_mask_that_would_be_ignored_is_refused():
    chunk: Any = LanguageModule.__new__(LanguageModule)
    torch.nn.Module.__init__(chunk)
    batch = {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    for dtype, implementation in (
        (torch.bfloat16, "transformer_engine"),
        (torch.float16, "transformer_engine"),
        (torch.float32, "transformer_engine"),
        (torch.bfloat16, "local"),
    ):
        chunk.config = SimpleNamespace(params_dtype=dtype, transformer_impl=implementation)
        ignored = implementation != "local" and dtype != torch.float32
        message = "causal attention ignores .*create_attention_mask=False.* transformer_impl='local'"
        with pytest.raises(ValueError if ignored else RuntimeError, match=message if ignored else "vocab_size"):
            minloop.place_batch(batch, chunk)
    chunk.config = SimpleNamespace(params_dtype=torch.bfloat16, transformer_impl="transformer_engine")
    with pytest.raises(RuntimeError, match="vocab_size"):
        minloop.place_batch({"attention_mask": None}, chunk)  # pyright: ignore[reportArgumentType]  # as some have it
    chunk.attention = torch.nn.Identity()
    vars(chunk.attention)["attn_mask_type"] = AttnMaskType.padding
    with pytest.raises(RuntimeError, match="vocab_size"):
        minloop.place_batch(batch, chunk)


def with_and_without_a_mask() -> list[torch.Tensor]:
    state = small_state(**WIDE, bf16=True, cross_entropy_loss_fusion=False)
    batch = minloop.place_batch(next(text_loader(state)), state.chunks[0])
    own = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool, device="cuda").fill_diagonal_(False)
    inputs = batch["tokens"], batch["position_ids"]
    with torch.no_grad():
        losses = [state.chunks[0](*inputs, mask, labels=batch["labels"]) for mask in (None, own[None, None])]
    minloop.shutdown_distributed()
    return losses


@pytest.mark.gpu
def test_transformer_engine_ignores_a_mask():
    pytest.importorskip("transformer_engine", reason="its attention is meant")
    ((plain, masked),) = run_ranks(1, with_and_without_a_mask)
    assert torch.equal(plain, masked)


def test_batch_grows_in_equal_steps():
    sizes = {
        consumed: ramped_batch_size(64, consumed, start=16, increment=16, ramp_samples=1000) for consumed in range(1100)
    }
    changes = {consumed: size for consumed, size in sizes.items() if size != sizes.get(consumed - 1)}
    assert changes == {0: 16, 334: 32, 667: 48, 1000: 64}
    assert ramped_batch_size(64, 0, start=64, increment=16, ramp_samples=1000) == 64


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_prefetched_batches_keep_their_place(device: str, monkeypatch: pytest.MonkeyPatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def loader() -> Any:
        return build_loader(Numbers(21), groups(), micro_batch_size=3, shuffle=True, seed=2, num_workers=1)

    straight, ahead = loader(), prefetch_to_device(loader(), vocab_size=21)
    for _ in range(4):
        expected, batch = next(straight), next(ahead)
        assert all(torch.equal(value, batch[name].cpu()) for name, value in expected.items())
        assert batch["tokens"].device.type == device
        assert ahead.state_dict() == straight.state_dict()
        assert ahead.consumed_samples == straight.consumed_samples
    state = ahead.state_dict()
    expected = samples(straight, 3)
    assert samples(ahead, 3) == expected
    ahead.load_state_dict(state)
    assert samples(ahead, 3) == expected
    once = prefetch_to_device(build_loader(Numbers(6), groups(), micro_batch_size=2, wrap=False), vocab_size=6)
    assert samples(once) == list(range(6))
    with pytest.raises(ValueError, match="ids from 0 to 2, but vocab_size is 2"):
        next(prefetch_to_device(build_loader(Numbers(9), groups(), micro_batch_size=3), vocab_size=2))


class Dying(Numbers):
    """What a worker does that finds /dev/shm full in mid-copy."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


def test_a_worker_without_shared_memory_names_the_remedy():
    with pytest.raises(RuntimeError, match="DataLoader worker") as died:
        next(build_loader(Dying(4), groups(), micro_batch_size=2, num_workers=1))
    (note,) = died.value.__notes__
    assert all(remedy in note for remedy in ("--ipc=host", "--shm-size", "num_workers=0"))


def test_another_failure_of_a_worker_says_nothing_of_shared_memory():
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise RuntimeError("a sample without tokens")

    with pytest.raises(RuntimeError, match="a sample without tokens") as failed:
        next(build_loader(Broken(4), groups(), micro_batch_size=2, num_workers=1))
    assert not hasattr(failed.value, "__notes__")


def trained_beside(evaluation: bool, prefetch: bool) -> list[tuple[float, float]]:
    state = small_state(hidden_dropout=0.1, tensor_model_parallel_size=2)
    loader: Any = text_loader(state)
    if prefetch:
        loader = prefetch_to_device(loader, vocab_size=VOCAB_SIZE)
    history: list[tuple[float, float]] = []
    for _ in range(3):
        history += train(state, loader, 1)
        if evaluation:
            valid = build_loader(Text(64), state.groups, micro_batch_size=4, shuffle=True, num_workers=1)
            minloop.eval_step(state, valid, num_microbatches=2)
    minloop.shutdown_distributed()
    return history


def all_trained() -> list[list[tuple[float, float]]]:
    return [trained_beside(*options) for options in [(False, False), (True, False), (False, True)]]


def test_neither_evaluation_nor_prefetching_disturbs_training():
    for plain, evaluated, prefetched in run_ranks(2, all_trained):
        assert plain == evaluated == prefetched


def test_hugging_face_tokenizer(tmp_path: Path):
    text = "def größe(): return 'x'"
    tokenizer = build_tokenizer(TOKENIZER)
    assert (tokenizer.vocab_size, tokenizer.eod) == (288, 0)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert build_tokenizer(TOKENIZER / "tokenizer.json").tokenize(text) == tokenizer.tokenize(text)
    lone = tmp_path / "tokenizer.json"
    lone.write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    other = build_tokenizer(lone, eos_token="<|endoftext|>")
    assert (other.eod, other.tokenize(text)) == (0, tokenizer.tokenize(text))
    assert encode(tokenizer, text).tolist() == tokenizer.tokenize(text)


def test_sentencepiece_tokenizer(tmp_path: Path):
    lines = Path(json.__file__).read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), vocab_size=300, minloglevel=2
    )
    tokenizer = build_tokenizer(tmp_path / "sp.model")
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod == 2
    assert tokenizer.detokenize(tokenizer.tokenize("return value")) == "return value"


def test_tiktoken_tokenizer(tmp_path: Path):
    pieces = [bytes([byte]) for byte in range(256)] + [b"re", b"ret"]
    ranks = [
        {"rank": rank, "token_bytes": b64encode(piece).decode(), "token_str": piece.decode("latin-1")}
        for rank, piece in enumerate(pieces)
    ]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(ranks))
    tokenizer = build_tokenizer(path, num_special_tokens=10)
    assert tokenizer.vocab_size == 268
    assert tokenizer.tokenize("return") == [10 + 257] + [10 + ord(letter) for letter in "urn"]
    assert tokenizer.detokenize(tokenizer.tokenize("größer")) == "größer"
    assert build_tokenizer(path).vocab_size == 1258


def test_tokenizer_errors(tmp_path: Path):
    with pytest.raises(ValueError, match="absent does not exist"):
        build_tokenizer(tmp_path / "absent")
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ValueError, match=r"vocab.txt is of no known kind"):
        build_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "ranks.json").write_text('[{"rank": 1}]')
    with pytest.raises(ValueError, match=r"ranks.json does not load as a tiktoken tokenizer"):
        build_tokenizer(tmp_path / "ranks.json")
    assert build_tokenizer("byte-level").vocab_size == 256


def test_vocabulary_is_padded_for_the_ranks():
    tokenizer = build_tokenizer(TOKENIZER)
    config = minloop.build_config(num_layers=2, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=2)
    assert padded_vocab_size(tokenizer, config) == 512
    assert padded_vocab_size(tokenizer, config, make_vocab_size_divisible_by=1) == 288
    with pytest.raises(ValueError, match="it must be positive"):
        padded_vocab_size(tokenizer, config, make_vocab_size_divisible_by=0)


def test_description(tmp_path: Path):
    tokenizer = build_tokenizer("byte-level")
    write_indexed(["a" * length for length in (1, 2, 3, 3, 100)], tmp_path / "text", tokenizer)
    found = describe_dataset(tmp_path / "text", tokenizer, sequence=4, sample_tokens=5)
    assert (found.documents, found.sequences, found.tokens, found.longest) == (5, 5, 114, 101)
    assert found.histogram == [(2, 3, 2), (4, 7, 2), (64, 127, 1)]
    assert found.sample == "aaaaa"
    assert "5 documents, 5 sequences, 114 tokens (uint16), 22.8 a sequence, at most 101" in str(found)
    assert [line.count("█") for line in str(found).splitlines() if "█" in line] == [40, 40, 20]
    assert describe_dataset(tmp_path / "text").sample == "[97, 255]"
    with pytest.raises(ValueError, match=r"sequence \(5\) must be from 0 to 4"):
        describe_dataset(tmp_path / "text", sequence=5)


class Answers(Dataset[dict[str, torch.Tensor]]):
    """Questions and answers of different lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = Text()[index]["tokens"].tolist()
        return mask_prompt(window[: 3 + index % 4], window[10 : 15 + index % 5])


def test_packs_hold_every_sample_with_its_own_positions_and_loss():
    answers = Answers()
    packs = pack_samples(answers, sequence_length=32, multiple=4)
    found: list[list[int]] = []
    for pack in (packs[index] for index in range(len(packs))):
        bounds = pack["cu_seqlens"].unique().tolist()
        assert bounds[0] == 0
        assert bounds[-1] == 32
        assert all(bound % 4 == 0 for bound in bounds)
        for start, end in itertools.pairwise(bounds):
            assert pack["position_ids"][start:end].tolist() == list(range(end - start))
            counted = pack["loss_mask"][start:end] > 0
            if counted.any():
                found.append(pack["labels"][start:end][counted].tolist())
    assert found == [Text()[index]["tokens"].tolist()[10 : 15 + index % 5] for index in range(len(answers))]
    assert len(packs) < len(answers) / 2
    with pytest.raises(ValueError, match=r"sample 3 has 12 tokens, 12 with padding, more than sequence_length \(8\)"):
        pack_samples(answers, sequence_length=8, multiple=4, lengths=[4, 4, 8, 12] * 10)
    with pytest.raises(ValueError, match="sample 0 has no token"):
        pack_samples([{"tokens": []}], sequence_length=8)
    with pytest.raises(ValueError, match=r"lengths has 1 numbers, but there are \d+ samples"):
        pack_samples(answers, sequence_length=32, lengths=[4])
    with pytest.raises(ValueError, match=r"sequence_length \(30\) must be a multiple of multiple \(4\)"):
        pack_samples(answers, sequence_length=30, multiple=4)
    with pytest.raises(ValueError, match="an answer of 0"):
        mask_prompt([1], [])


def test_transformer_engine_is_told_where_padding_ends_if_ranks_divide_a_pack(monkeypatch: pytest.MonkeyPatch):
    """Its context parallelism wants it (attention/dot_product_attention/context_parallel.py)."""
    pack = pack_samples(Answers(), sequence_length=32)[0]
    monkeypatch.setattr("minloop.packed.place_batch", lambda batch, _: batch)
    found: list[bool] = []

    class Model(torch.nn.Module):
        pre_process = post_process = True

        def forward(self, *_: Any, packed_seq_params: Any, **__: Any) -> None:
            both = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_kv_padded
            found.extend(padded is packed_seq_params.cu_seqlens_q for padded in both)

    for size in (1, 2):
        model: Any = Model()
        model.config = SimpleNamespace(context_parallel_size=size)
        minloop.packed_forward_step(iter([{name: value[None] for name, value in pack.items()}]), model)
    assert found == [False, False, True, True]


def packed_losses(directory: str, layout: dict[str, int], first: bool) -> list[tuple[float, float]]:
    local: dict[str, Any] = {"transformer_impl": "local"}  # Transformer Engine packs in half precision only
    state = shared_state(directory, first, gpt={"position_embedding_type": "rope"}, **local, **layout)
    loader = build_loader(pack_samples(Answers(), sequence_length=32, multiple=8), state.groups, micro_batch_size=1)
    count = minloop.num_microbatches(4, 1, state.groups)
    step = minloop.packed_forward_step
    steps = [minloop.train_step(state, loader, num_microbatches=count, forward_step=step) for _ in range(3)]
    minloop.shutdown_distributed()
    return [(metrics.loss.item(), metrics.num_tokens.item()) for metrics in steps]


def unpacked_loss(directory: str, num_tokens: float) -> float:
    """Of the first samples that have `num_tokens` with loss, each in a row of its own."""
    state = shared_state(directory, False, gpt={"position_embedding_type": "rope"}, transformer_impl="local")
    rows: list[minloop.Batch] = []
    for row in pack_samples(Answers(), sequence_length=16, multiple=16):
        rows.append({name: value[None] for name, value in row.items() if name != "cu_seqlens"})
        num_tokens -= row["loss_mask"].sum().item()
        if not num_tokens:
            break
    loss = minloop.eval_step(state, iter(rows), num_microbatches=len(rows)).loss.item()
    minloop.shutdown_distributed()
    return loss


def test_packed_samples_train_the_same_alone_and_in_every_layout(tmp_path: Path):
    (expected,) = run_ranks(1, packed_losses, str(tmp_path), {}, True)
    loss, num_tokens = expected[0]
    assert run_ranks(1, unpacked_loss, str(tmp_path), num_tokens) == [pytest.approx(loss, rel=rounding(1e-6))]
    for layout in (
        {"context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
    ):
        for losses in run_ranks(2, packed_losses, str(tmp_path), layout, False):
            assert losses == [pytest.approx(step, rel=1e-5) for step in expected], layout
