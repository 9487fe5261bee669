"""Pretrain a small GPT on real text, from files to tokens: the Python standard library's sources, about 30 MB.

    torchrun --nproc-per-node 2 examples/pretrain_text.py

A tokenizer is trained, the files become .bin and .idx, two data parallel ranks train with evaluation. Prints the bits
per byte of held-out files, by which tokenizers can be compared, and text that the model writes. On two CPU cores they
fall below 2 in about two minutes, and the whole run takes about five.
"""

import json
import math
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import minloop

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE, EVAL_SAMPLES = 128, 8, 16, 512
PROMPT = "def main("


def source_files(num_files):
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(1).shuffle(files)  # mcore splits documents in order: the last ones are held out
    return files[:num_files]


def train_tokenizer(files, directory, vocab_size):
    """A byte-level BPE in `directory`, as Hugging Face keeps it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((file.read_text("utf-8", errors="replace") for file in files), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def prepare(directory, num_files, vocab_size):
    """On one rank, once: the tokenizer and the tokens. Returns the tokenizer and the prefix of the tokens."""
    prefix = directory / "tokens_text_document"
    if dist.get_rank() == 0 and not prefix.with_suffix(".idx").exists():
        files = source_files(num_files)
        train_tokenizer(files[:200], directory, vocab_size)
        tokenizer = minloop.build_tokenizer(directory)
        # A few of the sources are in other encodings than UTF-8, on purpose.
        minloop.tokenize_to_indexed(files, directory / "tokens", tokenizer, on_error="skip")
        print(minloop.describe_dataset(prefix, tokenizer))
    dist.barrier()
    return minloop.build_tokenizer(directory), prefix


def build_state(tokenizer, train_iters, config, groups):
    chunks = minloop.build_gpt_model(
        config,
        groups,
        vocab_size=minloop.padded_vocab_size(tokenizer, config),
        max_sequence_length=SEQUENCE_LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=3e-3, min_lr=3e-4, weight_decay=0.1)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    warmup = min(20, train_iters - 1)
    scheduler = minloop.build_scheduler(
        optimizer, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=train_iters, lr_warmup_iters=warmup
    )
    return minloop.TrainState(chunks, optimizer, scheduler, config, groups)


def bits_per_byte(state, valid, tokenizer, num_microbatches):
    """Of the first samples of `valid`: what its tokens cost, over the bytes that they are."""
    loader = minloop.build_loader(valid, state.groups, micro_batch_size=MICRO_BATCH_SIZE)
    metrics = minloop.eval_step(state, loader, num_microbatches=num_microbatches)
    labels = [valid[index]["labels"].tolist() for index in range(metrics.num_samples)]
    num_bytes = sum(len(tokenizer.detokenize(ids).encode()) for ids in labels)
    return metrics.loss.item() * metrics.num_tokens.item() / math.log(2) / num_bytes


def write(state, tokenizer, num_tokens, temperature=0.7):
    """Continue PROMPT; every rank draws the same tokens, from the logits that the training layout gives all of them."""
    generator, text = torch.Generator().manual_seed(1), tokenizer.tokenize(PROMPT)
    while len(text) < num_tokens:
        window = text[-SEQUENCE_LENGTH:]
        tokens = torch.tensor([window + [0] * (SEQUENCE_LENGTH - len(window))])
        logits = minloop.forward_logits(state, tokens)[0, len(window) - 1, : tokenizer.vocab_size].cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
    return tokenizer.detokenize(text)


def main(train_iters=1000, num_files=None, vocab_size=4096, directory="checkpoints/pretrain_text", **layout):
    config = minloop.build_config(
        num_layers=4, hidden_size=128, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, **layout,
    )  # fmt: skip
    groups = minloop.init_distributed(config, seed=1234)
    tokenizer, prefix = prepare(Path(directory) / f"{num_files}-{vocab_size}", num_files, vocab_size)
    state = build_state(tokenizer, train_iters, config, groups)
    data_config = minloop.build_dataset_config(
        sequence_length=SEQUENCE_LENGTH, tokenizer=tokenizer, blend=([str(prefix)], None), split="98,2,0"
    )
    train, valid, _ = minloop.build_gpt_datasets(data_config, (train_iters * GLOBAL_BATCH_SIZE, None, 0))
    assert train is not None  # only a split of part 0 is
    assert valid is not None
    loader = minloop.build_loader(
        train, groups, micro_batch_size=MICRO_BATCH_SIZE, global_batch_size=GLOBAL_BATCH_SIZE, num_workers=1
    )
    data = minloop.prefetch_to_device(loader, vocab_size=minloop.padded_vocab_size(tokenizer, config))
    num_microbatches = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, groups)
    eval_batches = min(EVAL_SAMPLES, len(valid)) // (MICRO_BATCH_SIZE * groups.dp.size())
    first_rank = minloop.is_first_rank(groups)

    history = [bits_per_byte(state, valid, tokenizer, eval_batches)]
    if first_rank:
        print(f"held-out bits per byte before training: {history[0]:.3f}", flush=True)
    while state.iteration < train_iters:
        start = time.perf_counter()
        metrics = minloop.train_step(state, data, num_microbatches=num_microbatches)
        if first_rank and state.iteration % 20 == 0:
            print(minloop.log_line(state, metrics, train_iters=train_iters, elapsed=time.perf_counter() - start))
        if state.iteration % 200 == 0 or state.iteration == train_iters:
            history.append(bits_per_byte(state, valid, tokenizer, eval_batches))
            if first_rank:
                print(f"held-out bits per byte after {state.iteration} iterations: {history[-1]:.3f}", flush=True)
    sample = write(state, tokenizer, num_tokens=60)
    if first_rank:
        print(sample)
    minloop.shutdown_distributed()
    return history


if __name__ == "__main__":
    main()
