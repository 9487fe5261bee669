"""Ray Train owns the processes:  pip install 'ray[train]'; python examples/hosts/ray_host.py

`TorchTrainer` starts the workers and makes the default group; minloop finds it there. There is no public integration of
megatron-core with Ray Train to compare with; verl's workers, Ray actors too, keep about 3,200 lines around it.
"""

# the host is an extra of the project: minloop[hosts]
# pyright: reportMissingImports=false

import sys
from pathlib import Path

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

EXAMPLES = str(Path(__file__).resolve().parent.parent)


def train_loop(settings):
    import torch  # in the worker: the driver needs neither

    import minloop

    sys.path.insert(0, settings["examples"])
    import train

    state = train.build(256, 64, seed=1234, **settings["layout"])
    data_config = minloop.build_dataset_config(sequence_length=64, vocab_size=256)
    loader = minloop.build_mock_loader(data_config, state.groups, micro_batch_size=4, vocab_size=256)
    count = minloop.num_microbatches(16, 4, state.groups)
    losses = []
    for _ in range(settings["train_iters"]):
        losses.append(minloop.train_step(state, loader, num_microbatches=count).loss.item())
        ray.train.report({"loss": losses[-1], "iteration": state.iteration})
    minloop.shutdown_distributed()
    assert torch.distributed.is_initialized()  # Ray's
    return losses


def main(train_iters=10, num_workers=2, use_gpu=None, storage_path=None, **layout):
    if use_gpu is None:  # Ray hides no GPUs from workers that ask for none, and with GPUs minloop refuses gloo
        ray.init(ignore_reinit_error=True)
        use_gpu = ray.cluster_resources().get("GPU", 0) >= num_workers
    settings = {
        "train_iters": train_iters,
        "layout": layout or {"tensor_model_parallel_size": 2},
        "examples": EXAMPLES,
    }
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=storage_path),
    )
    return trainer.fit().return_value or []


if __name__ == "__main__":
    for number, loss in enumerate(main(), start=1):
        print(f"{number} {loss:.6f}")
