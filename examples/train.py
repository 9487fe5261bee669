"""Train a small GPT on mock data, save it, load it back:  torchrun --nproc-per-node 2 examples/train.py"""

import time

import torch

import minloop


def build(vocab_size, sequence_length, seed, **layout):
    config = minloop.build_config(
        num_layers=2, hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **layout
    )
    groups = minloop.init_distributed(config, seed=seed)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=vocab_size, max_sequence_length=sequence_length)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def main(train_iters=10, directory="checkpoints/train", vocab_size=256, sequence_length=64, **layout):
    layout = layout or {"tensor_model_parallel_size": 2}
    state = build(vocab_size, sequence_length, seed=1234, **layout)
    data_config = minloop.build_dataset_config(sequence_length=sequence_length, vocab_size=vocab_size)
    loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4, vocab_size=vocab_size)
    num_microbatches = minloop.num_microbatches(16, 4, state.groups)

    for _ in range(train_iters):
        start = time.perf_counter()
        metrics = minloop.train_step(state, loader, num_microbatches=num_microbatches)
        if minloop.is_first_rank(state.groups):
            print(minloop.log_line(state, metrics, train_iters=train_iters, elapsed=time.perf_counter() - start))

    saved = minloop.save_checkpoint(directory, state, loader)
    fresh = build(vocab_size, sequence_length, seed=4321, **layout)
    minloop.load_checkpoint(saved, fresh, loader)
    with minloop.gathered_parameters(state.chunks):
        ours, theirs = ([p for chunk in s.chunks for p in chunk.parameters()] for s in (state, fresh))
        equal = torch.tensor(int(all(map(torch.equal, ours, theirs))), device=torch.cuda.current_device())
    torch.distributed.all_reduce(equal, op=torch.distributed.ReduceOp.MIN)
    if minloop.is_first_rank(state.groups):
        print(f"saved {saved}; loaded into a model of another seed: weights {'equal' if equal else 'DIFFER'}")
    minloop.shutdown_distributed()


if __name__ == "__main__":
    main()
