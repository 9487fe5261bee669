"""Small models and real text for the tests: two to four layers, hidden size 32, bytes of Python source as tokens."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

import minloop

VOCAB_SIZE, SEQUENCE_LENGTH, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 256, 32, 8, 2

WIDE: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8}
"""For GPUs: Transformer Engine's kernels and FP8 want multiples of 16, and fused attention heads of 16."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rounding(tolerance: float) -> float:
    """A tolerance of float32: on GPUs ten times that of CPUs, as their kernels divide sums by the sizes of tensors."""
    return 10 * tolerance if DEVICE == "cuda" else tolerance


class Text(Dataset[dict[str, torch.Tensor]]):
    """Windows of a standard library module's source, byte by byte; every sample counts another number of tokens."""

    def __init__(self, length: int = 512) -> None:
        self.bytes = torch.tensor(list(inspect.getsource(argparse).encode()), dtype=torch.int64)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.bytes[index * 61 % 40_000 :][: SEQUENCE_LENGTH + 1]
        loss_mask = torch.ones(SEQUENCE_LENGTH)
        loss_mask[: index % 7] = 0.0
        return {
            "tokens": window[:-1].contiguous(),
            "labels": window[1:].contiguous(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(SEQUENCE_LENGTH),
        }


def small_config(
    config_class: type[minloop.TransformerConfig] = minloop.TransformerConfig, **fields: Any
) -> minloop.TransformerConfig:
    defaults: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if fields.get("context_parallel_size", 1) > 1 and not (fields.get("bf16") or fields.get("fp16")):
        defaults["transformer_impl"] = "local"  # Transformer Engine divides sequences in half precision only
    return minloop.build_config(config_class, **(defaults | fields))


def small_state(
    *,
    seed: int = 1,
    lr: float = 5e-3,
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    gpt: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    config: minloop.TransformerConfig | None = None,
    init: dict[str, Any] | None = None,
    build: Callable[..., Any] = minloop.build_gpt_model,
    **fields: Any,
) -> minloop.TrainState:
    """Initialise the groups and build a training state.

    `fields` go to the `TransformerConfig`, `ddp`, `optimizer` and `scheduler` to their configs, `init` to
    `init_distributed`, and `gpt` to `build`, which makes the model.
    """
    if ddp and ddp.keys() & {"use_megatron_fsdp", "reshard_after_forward"}:
        fields = {"gradient_accumulation_fusion": False} | fields  # on GPUs it is on by default, and mostly refused
    config = config or small_config(**fields)
    ddp_config = minloop.build_ddp_config(config, **(ddp or {}))
    instances = ddp_config.num_distributed_optimizer_instances
    groups = minloop.init_distributed(config, seed=seed, num_distributed_optimizer_instances=instances, **(init or {}))
    chunks = build(config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=SEQUENCE_LENGTH, **(gpt or {}))
    fully_sharded = ddp_config.use_megatron_fsdp or hasattr(ddp_config, "reshard_after_forward")
    chunks: Any = (minloop.wrap_fsdp if fully_sharded else minloop.wrap_ddp)(chunks, ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=lr, **(optimizer or {}))
    built = minloop.build_optimizer(chunks, optimizer_config, groups)
    schedule = None
    if scheduler is not None:
        schedule = minloop.build_scheduler(built, global_batch_size=GLOBAL_BATCH_SIZE, **scheduler)
    return minloop.TrainState(chunks, built, schedule, config, groups)


def shared_state(directory: str, first: bool, **options: Any) -> minloop.TrainState:
    """A state with the weights in `directory`, which the first one writes; `options` are those of `small_state`."""
    state = small_state(seed=1 if first else 99, **options)
    (minloop.save_checkpoint if first else minloop.load_checkpoint)(directory, state)
    return state


def text_loader(state: minloop.TrainState, micro_batch_size: int = MICRO_BATCH_SIZE) -> minloop.Loader:
    return minloop.build_loader(Text(), state.groups, micro_batch_size=micro_batch_size)


def train(
    state: minloop.TrainState,
    loader: minloop.Loader,
    steps: int,
    micro_batch_size: int = MICRO_BATCH_SIZE,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
) -> list[tuple[float, float]]:
    """Train; returns (loss, gradient norm) of each step."""
    count = minloop.num_microbatches(global_batch_size, micro_batch_size, state.groups)
    metrics = [minloop.train_step(state, loader, num_microbatches=count) for _ in range(steps)]
    return [(step.loss.item(), 0.0 if step.grad_norm is None else step.grad_norm.item()) for step in metrics]


def failure_of(action: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The error that a call ends in, with its type, or "no error"."""
    try:
        action(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
