"""Megatron-LM's pretrain_gpt.py, tuned: the peer that runs the same kernels with `megatron.training` around them.

The script runs unchanged, as `__main__`, with the arguments of `arguments()`. Three things are given to it from
outside: the benchmark's tokens (its own data index shuffles), the benchmark's initial weights, and no `make` of the
dataset index (a wheel has no Makefile, and these tokens need no index).

    PYTHONPATH=$MEGATRON_LM:$PWD CUDA_DEVICE_MAX_CONNECTIONS=1 \\
        python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.peers.megatron_lm C steps=12

MEGATRON_LM is the folder of pretrain_gpt.py: a checkout (then its megatron.core is used), or that script with
gpt_builders.py and model_provider.py alone, of branch core_r0.19.0, beside megatron-core 0.19.2's wheel, which has
megatron.training in it.

Its command line does not offer mcore's fused_single_qkv_rope, and refuses Transformer Engine's cross entropy.
Weight gradients are fused with their accumulation if apex's fused_weight_gradient_mlp_cuda can be imported, which the
script needs for that. Shape A, bound by launches, runs as one CUDA graph. Switches (words `name=value`):
`wgrad_fusion=off`; `distributed_optimizer=1` on one GPU too; `grad_reduce_in_bf16=1`;
`cuda_graph_impl=full_iteration`, `transformer_engine`, `local` or `none`;
`fp8_recipe=tensorwise`, `delayed` or `blockwise`, and `fp8_param=True`; of experts `expert_model_parallel_size=2` and
`moe_router_force_load_balancing=True`.
"""

import json
import re
import runpy
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import Result, check_switches, checkout, torchrun
from benchmarks.shapes import LEARNING_RATE, Run, read_run

CHECKOUT = ("MEGATRON_LM", "pretrain_gpt.py", "a checkout of NVIDIA/Megatron-LM (core_r0.19.0)")

SWITCHES = (
    "wgrad_fusion",
    "distributed_optimizer",
    "grad_reduce_in_bf16",
    "cuda_graph_impl",
    "fp8_recipe",
    "fp8_param",
    "expert_model_parallel_size",
    "moe_router_force_load_balancing",
)


def arguments(run: Run) -> list[str]:
    """Return pretrain_gpt.py's arguments: its own Llama-3-8B example for H100s, with every fusion that it has."""
    shape, options = run.shape, run.options
    values: dict[str, Any] = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "num-query-groups": shape.num_query_groups,
        "kv-channels": shape.kv_channels,
        "seq-length": shape.sequence_length,
        "max-position-embeddings": shape.sequence_length,
        "position-embedding-type": "rope",
        "rotary-base": shape.rotary_base,
        "normalization": "RMSNorm",
        "norm-epsilon": shape.norm_epsilon,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab_size,
        "micro-batch-size": shape.micro_batch_size,
        "global-batch-size": shape.micro_batch_size * shape.num_microbatches(run.gpus) * run.gpus,
        "train-iters": run.steps,
        "log-interval": run.window,
        "eval-iters": 0,
        "eval-interval": 1_000_000,
        "lr": LEARNING_RATE,
        "lr-decay-style": "constant",
        "weight-decay": 0.0,
        "adam-beta1": 0.9,
        "adam-beta2": 0.95,
        "adam-eps": 1e-8,
        "clip-grad": 1.0,
        "transformer-impl": "transformer_engine",
        "attention-backend": "fused",
        "rerun-mode": "disabled",
    }
    flags = (
        "group-query-attention swiglu disable-bias-linear untie-embeddings-and-output-weights bf16 mock-data manual-gc "
    )
    flags += "cross-entropy-loss-fusion no-create-attention-mask-in-dataloader no-check-for-nan-in-loss-and-grad"
    if shape.qk_layernorm:
        flags += " qk-layernorm"
    if shape.num_moe_experts:
        values |= experts(run)
        flags += " moe-grouped-gemm moe-permute-fusion moe-router-fusion"
    if options.get("moe_router_force_load_balancing") == "True":
        flags += " moe-router-force-load-balancing"
    if options.get("fp8_param") == "True":
        flags += " fp8-param-gather"
    if run.gpus > 1 or options.get("distributed_optimizer") or options.get("fp8_param") == "True":
        flags += " use-distributed-optimizer overlap-grad-reduce overlap-param-gather"
    if not fuses_weight_gradients(run):
        flags += " no-gradient-accumulation-fusion"
    if options.get("grad_reduce_in_bf16"):
        flags += " grad-reduce-in-bf16"
    if recipe := options.get("fp8_recipe"):
        values |= {"fp8-format": "e4m3" if recipe == "blockwise" else "hybrid", "fp8-recipe": recipe}
    implementation = options.get("cuda_graph_impl", "full_iteration" if shape.name == "A" else "none")
    if implementation != "none":
        values |= {"cuda-graph-impl": implementation}
        flags += " te-rng-tracker"
    return [f"--{flag}" for flag in flags.split()] + [f"--{name}={value}" for name, value in values.items()]


def experts(run: Run) -> dict[str, Any]:
    """Return the arguments of Shape.expert_fields."""
    names = {"num_moe_experts": "num-experts"}
    values = {names.get(name, name.replace("_", "-")): value for name, value in run.shape.expert_fields().items()}
    return values | {"expert-model-parallel-size": run.options.get("expert_model_parallel_size", 1)}


def fuses_weight_gradients(run: Run) -> bool:
    return run.options.get("wgrad_fusion") != "off" and find_spec("fused_weight_gradient_mlp_cuda") is not None


def command(run: Run) -> tuple[list[str], dict[str, str | None]]:
    """Return the command of one run and what its environment needs beside the caller's."""
    check_switches(run, *SWITCHES)
    environment: dict[str, str | None] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(checkout(*CHECKOUT))}
    if run.gpus > 1:  # norms leave multiprocessors to the communication that overlaps with them
        environment |= {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16", "NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}
    return torchrun(run, "benchmarks.peers.megatron_lm"), environment


def parse(log: str, run: Run) -> Result:
    """Read step times and losses from the log. Megatron-LM does not reset its means after the line of iteration 1."""
    pattern = r"iteration +(\d+)/ *\d+ \|.*?per iteration \(ms\): ([\d.]+) \|.*? lm loss: ([\d.E+-]+) \|"
    found = [(int(i), float(ms), float(loss)) for i, ms, loss in re.findall(pattern, log)]
    if not found:
        raise RuntimeError(f"Megatron-LM's log has no line of an iteration; it ends with: {log[-1000:]}")
    lines = [line for line in found if line[0] % run.window == 0]
    if run.window == 1 and len(lines) > 1:
        (_, ms, loss), (i, both_ms, both_loss) = lines[0], lines[1]
        lines[1] = (i, 2 * both_ms - ms, 2 * both_loss - loss)
    return Result.read(log, step_ms=[ms for _, ms, _ in lines], losses=[loss for *_, loss in lines])


class TokensAlone:
    """In the place of megatron.core's BlendedMegatronDatasetBuilder: the benchmark's tokens for training, in order."""

    def __init__(self, _: Any, sizes: tuple[int, ...], *__: Any):
        from benchmarks.tokens import TokenDataset

        self.train = TokenDataset(read_run(WORDS).shape, sizes[0])

    def build(self) -> tuple[Any, None, None]:
        return self.train, None, None


WORDS = sys.argv[1:]


def main() -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.datasets import blended_megatron_dataset_builder, utils
    from megatron.training import training

    from benchmarks import weights

    run = read_run(WORDS)
    get_optimizer = training.get_megatron_optimizer

    def get_optimizer_of_filled(config: Any, chunks: list[Any], **options: Any) -> Any:
        rank = parallel_state.get_expert_model_parallel_rank()
        first_expert = rank * run.shape.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        for chunk in chunks:  # before the fp32 masters are made
            weights.fill(chunk.named_parameters(), weights.megatron_core(run.shape, first_expert))
        return get_optimizer(config, chunks, **options)

    training.get_megatron_optimizer = get_optimizer_of_filled
    blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder = TokensAlone
    utils.compile_helpers = lambda: None
    script = next(path for path in (Path(p) / "pretrain_gpt.py" for p in sys.path) if path.exists())
    sys.argv = [str(script), *arguments(run)]
    runpy.run_path(str(script), run_name="__main__")
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # the rank that logs
        versions = {name: metadata.version(name) for name in ("torch", "megatron-core", "transformer-engine")}
        versions["apex's fused weight gradients"] = "yes" if fuses_weight_gradients(run) else "no"
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"peak_memory_gib": peak, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
