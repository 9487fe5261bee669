"""Two models on the machines they were made for, Megatron-LM's examples of them:  python examples/deployments.py

    python examples/deployments.py llama3-8b-h100                            # a dry run, on any machine
    torchrun --nproc-per-node 8 examples/deployments.py llama3-8b-h100       # trains on mock data, on 8 H100
    srun --ntasks 128 python examples/deployments.py gpt3-175b-a100          # or torchrun on 16 machines of 8 A100

The dry run says how ranks and batch are divided, what a rank of each pipeline stage needs in memory and what a token
costs. Data, checkpoints and a schedule are left out: examples/pretrain_text.py and examples/long_run.py have them.
"""

import os
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import minloop
from minloop.init_checks import check_world_size

CASES: dict[str, dict] = {
    "llama3-8b-h100": {
        "sizes": {"world_size": 8, "global_batch_size": 128, "micro_batch_size": 1, "sequence_length": 8192,
                  "vocab_size": 128_256},
        "model": {"position_embedding_type": "rope", "rotary_base": 500_000},
        "config": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
                   "num_query_groups": 8, "gated_linear_unit": True, "activation_func": F.silu,
                   "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "add_bias_linear": False,
                   "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": True,
                   # An H100 has 80 GB, 74.5 GiB, and by the estimate this takes 101.6 as it is. Gradients in bf16 save
                   # 15 of them, the recomputation of half of the layers 16 more, for a sixth more computation.
                   "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 16},
        "ddp": {"grad_reduce_in_fp32": False},
        "optimizer": {"lr": 1.5e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
        "on_gpu": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param": True},
    },
    "gpt3-175b-a100": {
        "sizes": {"world_size": 128, "global_batch_size": 1536, "micro_batch_size": 1, "sequence_length": 2048,
                  "vocab_size": 51_200},  # GPT-2's 50,257, padded to a multiple of 128 × TP
        "model": {},
        "config": {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "init_method_std": 0.006,
                   "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": True, "tensor_model_parallel_size": 8,
                   "pipeline_model_parallel_size": 16, "sequence_parallel": True},
        "ddp": {},
        "optimizer": {"lr": 6e-5, "weight_decay": 0.1, "adam_beta2": 0.95},
        "on_gpu": {},  # an A100 has no FP8
    },
}  # fmt: skip


def plan(name, changes):
    """The sizes of a case and its three configs; `changes` replace sizes or fields of the config by name."""
    case = CASES[name]
    sizes = case["sizes"] | {key: value for key, value in changes.items() if key in case["sizes"]}
    fields = case["config"] | (case["on_gpu"] if torch.cuda.is_available() else {})
    fields |= {key: value for key, value in changes.items() if key not in case["sizes"]}
    config = minloop.build_config(**fields)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True, **case["ddp"])
    return sizes, config, ddp_config, minloop.build_optimizer_config(config, ddp_config, **case["optimizer"])


def describe(name, sizes, config, ddp_config, optimizer_config):
    """Print how ranks and batch are divided and what that costs; nothing is built."""
    tp, pp, cp = (getattr(config, f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
    check_world_size(config, sizes["world_size"])
    dp = sizes["world_size"] // (tp * pp * cp)
    groups = SimpleNamespace(dp=SimpleNamespace(size=lambda: dp))  # all that num_microbatches asks of groups
    count = minloop.num_microbatches(sizes["global_batch_size"], sizes["micro_batch_size"], groups)  # pyright: ignore[reportArgumentType]
    asked: dict = {key: value for key, value in sizes.items() if key != "global_batch_size"}
    asked |= {"num_microbatches": count}
    asked |= {key: value for key, value in CASES[name]["model"].items() if key == "position_embedding_type"}
    stages = [
        minloop.estimate_memory(config, ddp_config, optimizer_config, pipeline_rank=stage, **asked)
        for stage in range(pp)
    ]
    flops = minloop.flops_per_token(config, vocab_size=sizes["vocab_size"], sequence_length=sizes["sequence_length"])
    print(f"{name}: {sizes['world_size']} GPUs = TP {tp} × CP {cp} × DP {dp} × PP {pp}")
    batch = f"{count} microbatches of {sizes['micro_batch_size']} × DP {dp}"
    print(f"{sizes['global_batch_size']} samples a step = {batch}")
    print(f"{flops / 1e9:.2f} GFLOP a token")
    for stage, memory in enumerate(stages):
        print(f"stage {stage}: {memory}")
    if left_out := [] if torch.cuda.is_available() else CASES[name]["on_gpu"]:
        print(f"all of this in bf16: there is no GPU here, for which {', '.join(left_out)} are set")
    return {"data_parallel_size": dp, "num_microbatches": count, "flops_per_token": flops, "stages": stages}


def train(name, train_iters, sizes, config, ddp_config, optimizer_config):
    """Train on mock data; return the losses."""
    groups = minloop.init_distributed(config, seed=1234)
    if (found := torch.distributed.get_world_size()) != sizes["world_size"]:
        raise ValueError(
            f"{name} is for {sizes['world_size']} ranks, and {found} were started: start as many, or give "
            f"main(world_size={found}, ...)"
        )
    vocab_size, sequence_length = sizes["vocab_size"], sizes["sequence_length"]
    chunks = minloop.build_gpt_model(
        config, groups, vocab_size=vocab_size, max_sequence_length=sequence_length, **CASES[name]["model"]
    )
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    state = minloop.TrainState(chunks, optimizer, None, config, groups)
    data_config = minloop.build_dataset_config(sequence_length=sequence_length, vocab_size=vocab_size)
    loader = minloop.build_mock_loader(data_config, groups, micro_batch_size=sizes["micro_batch_size"])
    count = minloop.num_microbatches(sizes["global_batch_size"], sizes["micro_batch_size"], groups)
    flops = minloop.flops_per_token(config, vocab_size=vocab_size, sequence_length=sequence_length)
    timer = minloop.StepTimer(state, sequence_length=sequence_length, flops_per_token=flops)
    losses = []
    with minloop.manual_gc():
        while state.iteration < train_iters:
            metrics = minloop.train_step(state, loader, num_microbatches=count)
            losses.append(metrics.loss.item())
            record = minloop.step_record(state, metrics) | timer.lap()
            if minloop.is_first_rank(groups):
                print(minloop.record_line(record, train_iters=train_iters), flush=True)
    minloop.shutdown_distributed()
    return losses


def main(name="llama3-8b-h100", train_iters=10, dry_run=None, **changes):
    """Describe a case or, as one of several ranks, train it; `changes` are sizes or fields of its config."""
    if name not in CASES:
        raise ValueError(f"there is no case {name!r}: choose one of {', '.join(CASES)}")
    if dry_run is None:
        dry_run = not {"RANK", "SLURM_PROCID"} & os.environ.keys()
    configs = plan(name, changes)
    return describe(name, *configs) if dry_run else train(name, train_iters, *configs)


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else main()
