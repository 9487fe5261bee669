"""The training loop of the peers that bring only a model: fused AdamW, FSDP2 on several GPUs, autocast on one.

Parameters, gradients and Adam's moments are float32, products bfloat16. Attention is cuDNN's alone: PyTorch's own
choice can be its slower flash backend, which would make these peers straw men.
"""

import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import weights
from benchmarks.shapes import LEARNING_RATE, Run
from benchmarks.tokens import microbatches


def start(run: Run) -> torch.device:
    """Join the other ranks, if any, and choose the GPU and the attention."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available():
        if run.gpus > 1:
            dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    if run.gpus > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    return torch.device("cuda", rank)


def prepare(run: Run, model: nn.Module, layers: nn.ModuleList) -> None:
    """Compile, shard and fill a model, in place.

    Each layer is compiled by itself: one compilation serves all, and gradients are added up layer by layer. A small
    model is bound by launches and is compiled whole, by its caller (`compiles_whole`).
    """
    if not compiles_whole(run) and run.options.get("compile") != "off":
        for layer in layers:
            layer.compile()
    if run.gpus > 1:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    weights.fill(model.named_parameters(), weights.llama(run.shape))


def compiles_whole(run: Run) -> bool:
    return run.options.get("compile", "model" if run.shape.hidden_size <= 1024 else "layers") in ("model", "graphs")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss in float32. logits: [b, s, vocab_size]; labels: [b, s]."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def train(run: Run, device: torch.device, model: nn.Module, versions: dict[str, str]) -> None:
    """Train for run.steps steps and print a Result as JSON. `model(tokens [b, s])` gives logits [b, s, vocab_size]."""
    loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    if run.options.get("compile") != "off":
        loss_of = torch.compile(cross_entropy)
        if compiles_whole(run):
            mode = "reduce-overhead" if run.options.get("compile") == "graphs" else None
            model = torch.compile(model, mode=mode)  # type: ignore[assignment]  # an OptimizedModule is called as the model is
    rank = dist.get_rank() if run.gpus > 1 else 0
    pinned = device.type == "cuda"
    steps = [microbatches(run.shape, step, rank, run.gpus) for step in range(run.steps)]
    steps = [[text.pin_memory() if pinned else text for text in texts] for texts in steps]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    step_ms: list[float] = []
    losses: list[float] = []
    total, begin = torch.zeros((), device=device), synchronized_time(device)
    for step, texts in enumerate(steps, start=1):
        for text in texts:
            torch.compiler.cudagraph_mark_step_begin()
            text = text.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=run.gpus == 1):
                loss = loss_of(model(text[:, :-1]), text[:, 1:]) / len(texts)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % run.window == 0:
            if run.gpus > 1:
                dist.all_reduce(total, dist.ReduceOp.AVG)
            losses.append(total.item() / run.window)
            end = synchronized_time(device)
            step_ms.append((end - begin) * 1000 / run.window)
            total.zero_()
            begin = end
    peak = torch.cuda.max_memory_allocated() / 2**30 if pinned else 0.0
    if rank == 0:
        print(
            json.dumps({"step_ms": step_ms, "losses": losses, "peak_memory_gib": peak, "versions": versions}),
            flush=True,
        )
    if run.gpus > 1:
        dist.destroy_process_group()


def synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
