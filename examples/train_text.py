"""Train a byte-level GPT on real text, the Python standard library's sources, and let it write some of its own.

    torchrun --nproc-per-node 2 examples/train_text.py

Prints the bits per byte of held-out files before and after, and a sample. About three minutes on two CPU cores.
"""

import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist

import minloop

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 128, 8, 16
PROMPT = "def main("


def build_state(train_iters, **layout):
    config = minloop.build_config(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **layout,
    )
    groups = minloop.init_distributed(config, seed=1234)
    chunks = minloop.build_gpt_model(
        config, groups, vocab_size=256, max_sequence_length=SEQUENCE_LENGTH, position_embedding_type="rope"
    )
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=3e-3, weight_decay=0.1)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    scheduler = minloop.build_scheduler(
        optimizer,
        global_batch_size=GLOBAL_BATCH_SIZE,
        train_iters=train_iters,
        lr_warmup_iters=min(20, train_iters - 1),
    )
    return minloop.TrainState(chunks, optimizer, scheduler, config, groups)


def build_text(num_files, directory="checkpoints/text"):
    """Write the sources as .bin and .idx on one rank, once; return the training and validation datasets."""
    prefix = Path(directory) / f"stdlib-{num_files}" / "text"
    tokenizer = minloop.build_byte_tokenizer()
    if dist.get_rank() == 0 and not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
        minloop.write_indexed((file.read_text("utf-8", errors="replace") for file in files), prefix, tokenizer)
    dist.barrier()
    config = minloop.build_dataset_config(
        sequence_length=SEQUENCE_LENGTH, tokenizer=tokenizer, blend=([str(prefix)], None), split="95,5,0"
    )
    train, valid, _ = minloop.build_gpt_datasets(config, (None, None, None), vocab_size=256)
    return train, valid


def build_loader(state, dataset):
    return minloop.build_loader(dataset, state.groups, micro_batch_size=MICRO_BATCH_SIZE)


def bits_per_byte(state, dataset, batches):
    loader = build_loader(state, dataset)
    return minloop.eval_step(state, loader, num_microbatches=batches).loss.item() / math.log(2)


def write(state, length, temperature=0.7):
    """Continue PROMPT; every rank draws the same bytes, from the logits that the training layout gives all of them."""
    generator, text = torch.Generator().manual_seed(1), list(PROMPT.encode())
    while len(text) < length:
        window = text[-SEQUENCE_LENGTH:]
        tokens = torch.tensor([window + [0] * (SEQUENCE_LENGTH - len(window))])
        logits = minloop.forward_logits(state, tokens)[0, len(window) - 1].cpu()
        text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def main(train_iters=400, num_files=200, eval_batches=8, sample_length=200, **layout):
    state = build_state(train_iters, **(layout or {"tensor_model_parallel_size": 2}))
    train, valid = build_text(num_files)
    loader = build_loader(state, train)
    num_microbatches = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, state.groups)
    first_rank = minloop.is_first_rank(state.groups)

    before = bits_per_byte(state, valid, eval_batches)
    for iteration in range(train_iters):
        start = time.perf_counter()
        metrics = minloop.train_step(state, loader, num_microbatches=num_microbatches)
        if first_rank and (iteration + 1) % 20 == 0:
            print(minloop.log_line(state, metrics, train_iters=train_iters, elapsed=time.perf_counter() - start))
    after, sample = bits_per_byte(state, valid, eval_batches), write(state, sample_length)
    if first_rank:
        print(f"held-out bits per byte: {before:.3f} before, {after:.3f} after {train_iters} iterations")
        print(sample)
    minloop.shutdown_distributed()
    return before, after


if __name__ == "__main__":
    main()
