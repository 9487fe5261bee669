"""Does a GPU train what a CPU trains? One checkpoint, the same batches, fp32: twenty losses on each, compared.

On any machine, first (writes the initial checkpoint, the batches and the CPU's losses):

    CUDA_VISIBLE_DEVICES= python benchmarks/device_parity.py

On a machine with two GPUs, with that directory copied there (TF32 off, so that products are fp32's own):

    NVIDIA_TF32_OVERRIDE=0 CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 benchmarks/device_parity.py

The second run compares every layout that two ranks allow and adds to results/device_parity.json.
"""

import inspect
import json
import platform
import textwrap
from importlib import metadata
from pathlib import Path

import torch

import minloop

DIRECTORY = Path("checkpoints/device_parity")
RESULTS = Path(__file__).parent / "results" / "device_parity.json"
STEPS, SEQUENCE_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE = 20, 128, 2, 8

LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "DP2 ZeRO-1": {},
}


def build_state(layout, **fields):
    config = minloop.build_config(
        num_layers=4, hidden_size=128, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **fields
    )
    groups = minloop.init_distributed(config, seed=1234)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=SEQUENCE_LENGTH)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer="ZeRO-1" in layout)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=1e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def text_samples():
    """Samples of a standard library module's source: kept beside the checkpoint, since Python versions differ in it."""
    source = torch.tensor(list(inspect.getsource(textwrap).encode()))
    windows = [source[i * 37 % (len(source) - SEQUENCE_LENGTH - 1) :] for i in range(STEPS * GLOBAL_BATCH_SIZE)]
    return [
        {
            "tokens": window[:SEQUENCE_LENGTH],
            "labels": window[1 : SEQUENCE_LENGTH + 1],
            "position_ids": torch.arange(SEQUENCE_LENGTH),
            "loss_mask": torch.ones(SEQUENCE_LENGTH),
        }
        for window in windows
    ]


def train(layout, samples, **fields):
    """Load the initial checkpoint and train; return the losses, whether this rank reports, and whose layers it was."""
    state = build_state(layout, **fields)
    minloop.load_checkpoint(DIRECTORY / "iter_0000000", state)
    loader = minloop.build_loader(samples, state.groups, micro_batch_size=MICRO_BATCH_SIZE)
    count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, state.groups)
    losses = [minloop.train_step(state, loader, num_microbatches=count).loss.item() for _ in range(STEPS)]
    first_rank, implementation = minloop.is_first_rank(state.groups), state.config.transformer_impl
    minloop.shutdown_distributed()
    return losses, first_rank, implementation


def record_on_cpu():
    minloop.save_checkpoint(DIRECTORY, build_state(""))
    minloop.shutdown_distributed()
    samples = text_samples()
    losses, _, _ = train("", samples)
    torch.save({"samples": samples, "losses": losses}, DIRECTORY / "cpu.pt")
    print(f"CPU losses {losses[0]:.6f} … {losses[-1]:.6f}, written to {DIRECTORY}")


def compare_on_gpu():
    recorded = torch.load(DIRECTORY / "cpu.pt")
    rows = []
    for layout, sizes in LAYOUTS.items():
        losses, first_rank, implementation = train(layout, recorded["samples"], **sizes)
        worst = max(abs(a - b) / b for a, b in zip(losses, recorded["losses"], strict=True))
        rows.append({"layout": layout, "transformer_impl": implementation, "worst_relative_loss_difference": worst})
        if first_rank:
            print(f"{layout:12} {implementation:20} losses differ from the CPU's by at most {worst:.1e} relative")
    if first_rank:
        versions = {name: metadata.version(name) for name in ("torch", "megatron-core")}
        where = {"gpu": torch.cuda.get_device_name(), "gpus": 2, "python": platform.python_version(), **versions}
        RESULTS.parent.mkdir(exist_ok=True)
        earlier = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
        kept = [row for row in earlier if row["transformer_impl"] != rows[0]["transformer_impl"]]
        RESULTS.write_text(json.dumps({"machine": where, "steps": STEPS, "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    compare_on_gpu() if torch.cuda.is_available() else record_on_cpu()
