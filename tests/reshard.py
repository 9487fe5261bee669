"""Checkpoints through layouts: random ones, loading and saving in them, and comparing what was saved."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from sameness_cases import ZERO1, Options, layout
from small import small_state, text_loader, train

import minloop

MOST_RANKS = 8


def random_layout(draw: random.Random, experts: bool = False) -> tuple[str, int, Options]:
    """A name, the number of ranks, and options of `small_state`, for four layers with four heads (and four experts)."""
    while True:
        tp, pp, cp, dp = (draw.choice(sizes) for sizes in ((1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4)))
        ep, etp = (draw.choice((1, 2, 4)), draw.choice((1, tp))) if experts else (1, tp)
        if tp * pp * cp * dp <= MOST_RANKS and (tp * cp * dp) % (ep * etp) == 0:
            break
    more: Options = {"sequence_parallel": True} if tp > 1 else {}
    if etp != tp:
        more["expert_tensor_parallel_size"] = etp
    vpp = draw.choice((None, 2)) if pp > 1 else None
    buckets = draw.choice((None, 3000))
    kind = draw.choice(("DDP", "ZeRO-1"))
    if kind == "ZeRO-1":
        more["ddp"] = ZERO1 | ({"bucket_size": buckets} if buckets else {})
    sizes = {"TP": tp, "PP": pp, "VPP": vpp or 1, "CP": cp, "DP": dp, "EP": ep}
    parts = [f"{letters}{size}" for letters, size in sizes.items() if size > 1] or ["DP1"]
    name = "×".join(parts) + (f", ETP{etp}" if etp != tp else "")
    ranks, options = layout(tp * pp * cp * dp, tp, pp, vpp, cp, ep, **more)
    return f"{name} {kind}{' in small buckets' if buckets and kind == 'ZeRO-1' else ''}", ranks, options


def train_and_save(directory: str, options: Options, steps: int = 3) -> None:
    state = small_state(**options)
    loader = text_loader(state)
    train(state, loader, steps)
    minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()


def load_and_save(source: str, target: str, options: Options) -> None:
    state = small_state(seed=77, **options)
    loader = text_loader(state)
    minloop.load_checkpoint(source, state, loader)
    minloop.save_checkpoint(target, state, loader)
    minloop.shutdown_distributed()


def differing_tensors(directories: Sequence[str], rounded_by_layout: bool = False) -> tuple[int, list[str]]:
    """How many tensors the first checkpoint holds, and which are absent from or not equal in any of the others.

    Master weights go by one name, under which fp32 weights themselves count where no copy of them is stored. Weights
    that are `rounded_by_layout` are to be equal in the last one, and elsewhere their master weights are.
    """
    minloop.init_distributed(minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1), seed=1)
    ours, *others = (with_master_weights(str(minloop.latest_checkpoint(path))) for path in directories)
    minloop.shutdown_distributed()
    differing: list[str] = []
    for path, theirs in zip(directories[1:], others, strict=True):
        exact = not rounded_by_layout or path == directories[-1]
        compared = [key for key in ours if exact or key.startswith(("optimizer.", "master."))]
        wrong = [key for key in compared if not torch.equal(ours[key], theirs.get(key, torch.empty(0)))]
        differing += [f"{Path(path).name}: {key}" for key in wrong + sorted(theirs.keys() - ours.keys())]
    return len(ours), differing


def with_master_weights(checkpoint: str) -> dict[str, torch.Tensor]:
    tensors = {key: x for key, x in dist_checkpointing.load_plain_tensors(checkpoint).items() if torch.is_tensor(x)}
    for key, tensor in list(tensors.items()):
        for stored in ("optimizer.state.param.", "optimizer.state.fp32_param."):
            if key.startswith(stored):
                tensors["master." + key.removeprefix(stored)] = tensors.pop(key)
        if not key.startswith("optimizer.") and tensor.dtype == torch.float32:
            tensors.setdefault("master." + key, tensor)
    return tensors
