"""What tests of hosts share: a training state on groups that a host chose, batches of different lengths, options."""

from typing import Any

import torch
from small import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Text

import minloop

ZERO1 = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


def state_on(groups: minloop.ProcessGroupCollection, config: Any, ddp: dict[str, bool] | None = None) -> Any:
    """Build a training state as `small_state` does, on groups that are there."""
    minloop.seed_ranks(1, groups, config)
    ddp_config = minloop.build_ddp_config(config, **(ddp or {}))
    chunks = minloop.build_gpt_model(config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=SEQUENCE_LENGTH)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=5e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def batches_of(lengths: list[int]) -> list[minloop.Batch]:
    """The first microbatches of the text, each cut to a length."""
    samples = [Text()[index] for index in range(MICRO_BATCH_SIZE * len(lengths))]
    groups = zip(samples[::2], samples[1::2], lengths, strict=True)
    return [{name: torch.stack([a[name], b[name]])[:, :length] for name in a} for a, b, length in groups]
