"""Per-token log-probabilities, of a policy or of a reference, on every rank."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minloop.data import Batch
from minloop.embedding.step_parts import may_vary
from minloop.hybrid_context_parallel import refuse_hybrid
from minloop.layers.cp_layout import gather_sequence
from minloop.losses import LossFunction, Report
from minloop.microbatches import Microbatches
from minloop.packed import packed_forward_step
from minloop.schedule import ForwardStep, forward_backward, least_count
from minloop.state import TrainState
from minloop.step import evaluating, gpt_forward_step


@torch.no_grad()
def token_logprobs(
    state: TrainState, batches: Sequence[Batch], *, forward_step: ForwardStep | None = None
) -> list[torch.Tensor]:
    """Return the log-probability of each label, given what stands before it, on every rank of a model replica.

    Weights and random streams stay as they are, dropout is off. The last pipeline stage computes, and gives the others
    its result; context parallel ranks put their parts together.

    Args:
        batches: microbatches of this data parallel rank, as for `train_step`; `labels` are the tokens asked about, and
            `loss_mask` does not count. Every rank gives as many. They may differ in length where the config has
            ``variable_seq_lengths=True``, or without pipeline parallelism.
        forward_step: one whose output on the last stage is [b, s], the loss of each token in nats; by default
            `gpt_forward_step`, and `packed_forward_step` where batches have `cu_seqlens`.
    Returns:
        For each batch a tensor [b, s] float32, in the order of its tokens, not part of a graph.
    Raises:
        ValueError: batches of different shapes where they must be of one; as `train_step`.
    """
    refuse_hybrid(state.config, "token_logprobs")
    packed = bool(batches) and "cu_seqlens" in batches[0]
    forward_step = forward_step or (packed_forward_step if packed else gpt_forward_step)
    if not batches:
        return []
    padded = [*batches, *[batches[-1]] * (-len(batches) % least_count(state.config))]
    with evaluating(state):
        microbatches = Microbatches(padded, len(padded), varying=may_vary(state))
        reports = forward_backward(state, microbatches, partial(_keep_output, forward_step), forward_only=True)
    groups, results = state.groups, list[torch.Tensor]()
    for index, batch in enumerate(batches):
        if reports:
            boundaries = batch["cu_seqlens"].flatten().unique() if packed else None
            result = reports[index]["loss"].float().neg()
            if groups.cp.size() > 1:
                result = gather_sequence(result.transpose(0, 1), groups.cp, boundaries).transpose(0, 1).contiguous()
        else:
            result = torch.empty(batch["tokens"].shape, device=torch.cuda.current_device())
        if groups.pp.size() > 1:
            dist.broadcast(result, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
        results.append(result)
    return results


def _keep_output(forward_step: ForwardStep, data: Iterator[Any], model: Any) -> tuple[torch.Tensor, LossFunction]:
    output, _ = forward_step(data, model)

    def keep(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        return output.new_zeros(()), output.new_ones(()), {"loss": output}

    return output, keep
