"""A run that survives: stopped, killed or hanging, it goes on from its newest checkpoint, and ends with the same bits.

    torchrun --nproc-per-node 2 --max-restarts 100 examples/long_run.py

Real text, the Python standard library's sources. Checkpoints are written in the background, held-out text is evaluated
now and then, and every step is logged to log.jsonl, and to TensorBoard if it is installed. Try `kill -9` on a rank, or
on all; Ctrl-C, SIGTERM or SIGUSR1 save and end, and the same command goes on. Two minutes on two CPU cores.
"""

import sysconfig
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import minloop

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 128, 4, 16


def build_state(config, groups, train_iters):
    chunks = minloop.build_gpt_model(
        config, groups, vocab_size=256, max_sequence_length=SEQUENCE_LENGTH, position_embedding_type="rope"
    )
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=3e-3, weight_decay=0.1)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    scheduler = minloop.build_scheduler(
        optimizer, global_batch_size=GLOBAL_BATCH_SIZE, train_iters=train_iters, lr_warmup_iters=train_iters // 10
    )
    return minloop.TrainState(chunks, optimizer, scheduler, config, groups)


def build_text(directory, num_files):
    """Write the sources as .bin and .idx on one rank, once; return the training and validation datasets."""
    prefix, tokenizer = directory / "text", minloop.build_byte_tokenizer()
    if dist.get_rank() == 0 and not prefix.with_suffix(".idx").exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
        minloop.write_indexed((file.read_text("utf-8", errors="replace") for file in files), prefix, tokenizer)
    dist.barrier()
    config = minloop.build_dataset_config(
        sequence_length=SEQUENCE_LENGTH, tokenizer=tokenizer, blend=([str(prefix)], None), split="95,5,0"
    )
    train, valid, _ = minloop.build_gpt_datasets(config, (None, None, None), vocab_size=256)
    assert train is not None  # only a split of part 0 is
    assert valid is not None
    return train, valid


def build_sinks(directory, state, train_iters):
    """Where records go; made on the first rank alone."""
    if not minloop.is_first_rank(state.groups):
        return []
    sinks = [
        minloop.console_sink(train_iters=train_iters),
        minloop.jsonl_sink(directory / "log.jsonl", iteration=state.iteration),
    ]
    return sinks + ([minloop.tensorboard_sink(directory / "tensorboard")] if find_spec("tensorboard") else [])


@record  # torchrun's report of a failure then has its traceback
def main(
    train_iters=300,
    directory="checkpoints/long_run",
    save_interval=20,
    eval_interval=50,
    num_files=200,
    timeout_in_seconds=600,
    exit_duration_in_mins=None,
    **layout,
):
    """Train up to `train_iters`; return the iteration at which it ended."""
    config = minloop.build_config(
        num_layers=2, hidden_size=128, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False, **layout
    )
    groups = minloop.init_distributed(config, seed=1234, timeout=timedelta(seconds=timeout_in_seconds))
    directory = minloop.shared_directory(directory)  # refused now if it is another one elsewhere, or another run's
    state = build_state(config, groups, train_iters)
    train, valid = build_text(directory, num_files)
    loader = minloop.build_loader(train, groups, micro_batch_size=MICRO_BATCH_SIZE)
    held_out = {"text": minloop.build_loader(valid, groups, micro_batch_size=MICRO_BATCH_SIZE)}
    guard = minloop.FaultGuard("skip", loss_spike=3.0, rerun=True)
    kept = {"train": loader, "guard": guard}
    minloop.load_checkpoint(directory, state, kept, missing_ok=True)
    sinks = build_sinks(directory, state, train_iters)
    count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, groups)

    def log(values):
        for sink in sinks:
            sink(values)

    reason = None
    with minloop.stop_signals() as stop:
        while state.iteration < train_iters:
            start = time.perf_counter()
            metrics = minloop.train_step(state, loader, num_microbatches=count, guard=guard)
            log(minloop.step_record(state, metrics) | {"iteration-time": time.perf_counter() - start})
            if state.iteration % eval_interval == 0:
                log(minloop.evaluation_record(state, minloop.evaluate(state, held_out, num_microbatches=count)))
            reason = stop.exit_reason(state, exit_duration_in_mins=exit_duration_in_mins)
            if reason or state.iteration % save_interval == 0 or state.iteration == train_iters:
                minloop.start_save(directory, state, kept, keep_newest=3)
            if reason:
                break
        if reason and minloop.is_first_rank(groups):
            print(f"{reason}: ended after iteration {state.iteration}")
        minloop.shutdown_distributed()  # once the last save is done; outside, a second SIGTERM would kill it
    return state.iteration


if __name__ == "__main__":
    main()
