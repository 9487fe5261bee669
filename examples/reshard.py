"""Save in one layout, go on in others:  torchrun --nproc-per-node 4 examples/reshard.py

Trains at TP2×DP2, saves, and loads weights and optimizer into TP1×DP4, TP4, TP2×PP2 and DP4 with a sharded optimizer.
The loss of the next step is the same in each.
"""

import minloop

LAYOUTS: dict[str, dict] = {
    "TP2×DP2": {"tensor_model_parallel_size": 2},
    "TP1×DP4": {},
    "TP4": {"tensor_model_parallel_size": 4},
    "TP2×PP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "DP4 ZeRO-1": {},
}


def build_state(name, seed, sequence_length, vocab_size):
    config = minloop.build_config(
        num_layers=4, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **LAYOUTS[name]
    )
    groups = minloop.init_distributed(config, seed=seed)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=vocab_size, max_sequence_length=sequence_length)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer="ZeRO-1" in name)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def main(train_iters=5, directory="checkpoints/reshard", sequence_length=64, vocab_size=256):
    losses = {}
    for seed, name in enumerate(LAYOUTS, start=1):
        state = build_state(name, seed, sequence_length, vocab_size)
        data_config = minloop.build_dataset_config(sequence_length=sequence_length, vocab_size=vocab_size)
        loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=2)
        num_microbatches = minloop.num_microbatches(16, 2, state.groups)
        if seed == 1:
            for _ in range(train_iters):
                minloop.train_step(state, loader, num_microbatches=num_microbatches)
            minloop.save_checkpoint(directory, state, loader)
        else:
            minloop.load_checkpoint(directory, state, loader)
        metrics = minloop.train_step(state, loader, num_microbatches=num_microbatches)
        losses[name] = metrics.loss.item()
        if minloop.is_first_rank(state.groups):
            print(f"{name:10} loss of iteration {state.iteration}: {losses[name]:.6f}")
        minloop.shutdown_distributed()
    return losses


if __name__ == "__main__":
    main()
