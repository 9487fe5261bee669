"""torchtitan's Llama 3 and trainer: compiled layers and loss, fused AdamW, FSDP2 on several GPUs, no recomputation.

Its `Trainer` runs unchanged, with a TrainSpec whose data loader and initial weights are the benchmark's, and whose RoPE
is not rescaled for longer contexts. Its own attention puts cuDNN first.

    PYTHONPATH=$TORCHTITAN:$PWD \\
        python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.peers.torchtitan C steps=12

TORCHTITAN is a folder with torchtitan 0.2.2 (the release of torch 2.11's time) and what it needs: torchdata, datasets,
tyro. With a window of several steps its loss is that of the window's last step, and step 1 is not in the first window's
time. Switch: `compile=off`.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from benchmarks.peers.processes import OVERLAP_FREELY, Result, check_switches, checkout, torchrun
from benchmarks.shapes import LEARNING_RATE, Run, Shape, read_run

CHECKOUT = (
    "TORCHTITAN",
    "torchtitan/train.py",
    "where torchtitan 0.2.2 is installed, with torchdata, datasets and tyro",
)


def arguments(run: Run) -> list[str]:
    """Return the arguments of torchtitan's trainer."""
    values: dict[str, Any] = {
        "model.name": "benchmark",
        "model.flavor": "benchmark",
        "training.local_batch_size": run.shape.micro_batch_size,
        "training.global_batch_size": run.shape.micro_batch_size * run.shape.num_microbatches(run.gpus) * run.gpus,
        "training.seq_len": run.shape.sequence_length,
        "training.max_norm": 1.0,
        "training.steps": run.steps,
        "metrics.log_freq": run.window,
        "optimizer.name": "AdamW",
        "optimizer.lr": LEARNING_RATE,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 1.0,
        "activation_checkpoint.mode": "none",
        "parallelism.data_parallel_shard_degree": -1,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    flags = ["--metrics.disable_color_printing"]
    if run.options.get("compile") != "off":
        flags.append("--compile.enable")
    return words + flags


def command(run: Run) -> tuple[list[str], dict[str, str | None]]:
    check_switches(run, "compile")
    return torchrun(run, "benchmarks.peers.torchtitan"), OVERLAP_FREELY | {"PYTHONPATH": str(checkout(*CHECKOUT))}


def parse(log: str, run: Run) -> Result:
    """Read losses and tokens per second of one GPU from the log's lines `step:  1  loss: ...  tps: ...`."""
    pattern = r"step: +(\d+) +loss: +([\d.]+) .*? tps: ([\d,]+)"
    found = {int(step): (float(tps.replace(",", "")), float(loss)) for step, loss, tps in re.findall(pattern, log)}
    tokens = run.shape.tokens_per_step / run.gpus  # every rank writes each step's line: one of them is enough
    lines = [(tokens / tps * 1000, loss) for step, (tps, loss) in found.items() if step % run.window == 0]
    return Result.read(log, step_ms=[ms for ms, _ in lines], losses=[loss for _, loss in lines])


def model_arguments(shape: Shape) -> dict[str, Any]:
    """Return the fields of TransformerModelArgs, which rounds 8/3 of the hidden size up to a multiple."""
    return {
        "dim": shape.hidden_size,
        "n_layers": shape.num_layers,
        "n_heads": shape.num_attention_heads,
        "n_kv_heads": shape.num_query_groups,
        "vocab_size": shape.vocab_size,
        "multiple_of": shape.ffn_hidden_size,
        "ffn_dim_multiplier": 0.9 * shape.ffn_hidden_size / (8 * shape.hidden_size / 3),
        "norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rotary_base,
    }


def main() -> None:
    run = read_run(sys.argv[1:])
    sys.argv[1:] = arguments(run)  # before the import, which takes them as a default

    import torch
    from torch.utils.data import IterableDataset
    from torchtitan import train
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.protocols.train_spec import register_train_spec

    from benchmarks import tokens, weights

    shape = run.shape

    class Samples(IterableDataset[Any]):
        def __init__(self, rank: int):
            self.rank = rank

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            for step in range(run.steps):
                for text in tokens.microbatches(shape, step, self.rank, run.gpus):
                    yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def build_loader(dp_world_size: int, dp_rank: int, **_: Any) -> ParallelAwareDataloader:
        return ParallelAwareDataloader(Samples(dp_rank), dp_rank, dp_world_size, batch_size=None)

    class Transformer(llama3.Transformer):
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device)
            weights.fill(self.named_parameters(), weights.torchtitan(shape))

    model = llama3.TransformerModelArgs(**model_arguments(shape), rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0))
    spec = llama3.get_train_spec()
    spec.model_cls, spec.model_args = Transformer, {"benchmark": model}
    spec.build_dataloader_fn, spec.build_tokenizer_fn, spec.state_dict_adapter = build_loader, None, None
    register_train_spec("benchmark", spec)
    metrics.DeviceMemoryMonitor.reset_peak_stats = lambda _: None  # the peak of the whole run is wanted
    train.main(train.Trainer)
    if torch.cuda.is_available() and torch.cuda.current_device() == 0:
        versions = {"torch": torch.__version__, "torchtitan": metadata.version("torchtitan")}
        print(
            json.dumps({"peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30, "versions": versions}), flush=True
        )


if __name__ == "__main__":
    main()
