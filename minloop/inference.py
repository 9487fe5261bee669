"""Looking at a model in training: its logits, on every rank, in the layout it trains in."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from minloop.hybrid_context_parallel import refuse_hybrid
from minloop.microbatches import Microbatches
from minloop.placement import model_attribute, place_batch
from minloop.schedule import forward_backward, least_count
from minloop.state import TrainState
from minloop.step import evaluating


@torch.no_grad()
def forward_logits(state: TrainState, tokens: torch.Tensor) -> torch.Tensor:
    """Return a GPT's logits for `tokens` on every rank of a model replica; weights and random streams stay as they are.

    Every forward pass covers the whole sequence: enough to look at samples while training, not an inference engine.

    Args:
        tokens: [b, s] int64, the same on all ranks of a replica.
    Returns:
        [b, s, vocab_size] float32.
    """
    refuse_hybrid(state.config, "forward_logits")
    batch = {
        "tokens": tokens,
        "labels": tokens,  # to be checked like a batch; no loss is computed
        "loss_mask": torch.zeros(tokens.shape),
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens),
    }
    with evaluating(state):
        count = least_count(state.config)
        reports = forward_backward(state, Microbatches([batch] * count, count), _logits_step, forward_only=True)
    groups = state.groups
    shape = (*tokens.shape, model_attribute(state.chunks[0], "vocab_size"))
    logits = torch.empty(shape, device=torch.cuda.current_device())
    if reports:
        part = gather_from_tensor_model_parallel_region(reports[0]["logits"], group=groups.tp).float()
        logits.copy_(_gather_sequence(part, groups.cp))
    if groups.pp.size() > 1:
        dist.broadcast(logits, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return logits


def _logits_step(data: Any, model: torch.nn.Module) -> Any:
    batch = place_batch(next(data), model)
    output = model(batch["tokens"], batch["position_ids"], None)
    return output, lambda logits: (logits.new_zeros(()), logits.new_ones(()), {"logits": logits})


def _gather_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Undo `slice_batch_for_context_parallel`: [b, s / size, v] of each rank → [b, s, v]."""
    size = group.size()
    if size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    halves = [half for part in parts for half in part.chunk(2, dim=1)]  # rank r holds chunks r and 2 × size - 1 - r
    return torch.cat(halves[0::2] + halves[1::2][::-1], dim=1)
