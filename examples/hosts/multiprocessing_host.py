"""A host that starts its own processes and makes its own default group:  python examples/hosts/multiprocessing_host.py

No launcher, no environment variables: the host meets its workers as it likes, minloop uses the group that it finds and
leaves it there. What such a host loses is its glue to megatron-core: model, DDP and optimizer set-up, schedule hooks,
gradient finalisation, seeds, which public hosts carry in 700 to 4,600 lines.
"""

import multiprocessing
import tempfile
from pathlib import Path

import torch

import minloop


def build(**layout):
    config = minloop.build_config(
        num_layers=2, hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **layout
    )
    groups = minloop.init_distributed(config, seed=1234)  # finds the host's default group
    chunks = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=64)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def work(rank, world_size, meeting_point, train_iters, layout, results):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend, init_method=f"file://{meeting_point}", rank=rank, world_size=world_size
    )
    state = build(**layout)
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=256)
    loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4, vocab_size=256)
    count = minloop.num_microbatches(16, 4, state.groups)
    losses = [minloop.train_step(state, loader, num_microbatches=count).loss.item() for _ in range(train_iters)]
    minloop.shutdown_distributed()
    assert torch.distributed.is_initialized()  # it is the host's
    torch.distributed.destroy_process_group()
    results.put((rank, losses))


def main(train_iters=10, world_size=2, **layout):
    if 0 < torch.cuda.device_count() < world_size:
        raise RuntimeError(f"{world_size} processes want a GPU each, and there is only {torch.cuda.device_count()}")
    layout = layout or {"tensor_model_parallel_size": 2}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, Path(folder) / "meeting_point", train_iters, layout, results)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(world_size)]
        for process in processes:
            process.start()
        losses = dict(results.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    return losses[0]


if __name__ == "__main__":
    for number, loss in enumerate(main(), start=1):
        print(f"{number} {loss:.6f}")
