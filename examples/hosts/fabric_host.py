"""Lightning Fabric owns the processes, the loop and the loggers:  python examples/hosts/fabric_host.py

    pip install lightning-fabric

Fabric launches, makes the default group and logs; the step is minloop's. NeMo 2's strategy for the same keeps about
4,600 lines around megatron-core.
"""

# the host is an extra of the project: minloop[hosts]
# pyright: reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers.csv_logs import CSVLogger

import minloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train


def run(fabric, train_iters, layout):
    state = train.build(256, 64, seed=1234, **layout)  # finds Fabric's default group
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=256)
    loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4, vocab_size=256)
    count = minloop.num_microbatches(16, 4, state.groups)
    losses = []
    for _ in range(train_iters):
        metrics = minloop.train_step(state, loader, num_microbatches=count)
        losses.append(metrics.loss.item())
        fabric.log_dict({"loss": losses[-1], "grad_norm": float(metrics.grad_norm or 0)}, step=state.iteration)
    minloop.shutdown_distributed()
    assert torch.distributed.is_initialized()  # Fabric's
    return losses


def main(train_iters=10, devices=2, directory="checkpoints/fabric", **layout):
    gpu = torch.cuda.is_available()
    fabric = Fabric(
        accelerator="cuda" if gpu else "cpu",
        devices=devices,
        strategy="ddp_spawn",  # "ddp" would start this program again, whatever it is that called `main`
        loggers=CSVLogger(directory, flush_logs_every_n_steps=1),
    )
    launch: Any = fabric.launch  # whose annotation takes functions of one argument alone
    return launch(run, train_iters, layout or {"tensor_model_parallel_size": 2})


if __name__ == "__main__":
    for number, loss in enumerate(main(), start=1):
        print(f"{number} {loss:.6f}")
