"""A check that what several ranks hold in common is the same on all of them, bit for bit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor

from minloop.checkpoint.content import unwrapped_models
from minloop.data_parallel import gathered_parameters
from minloop.everyone import from_all_ranks
from minloop.state import TrainState


@dataclass(frozen=True)
class _Shared:
    """Weights that the ranks of `group` hold in common, and what is wrong when they do not."""

    name: str
    group: dist.ProcessGroup
    weights: Mapping[str, torch.Tensor]
    cause: str


def check_replicas(state: TrainState) -> None:
    """Check that all weights and saved buffers that ranks hold in common are equal bit for bit; call it on every rank.

    Compared are data parallel replicas (context parallel ranks among them, expert data parallel ones for experts), what
    tensor parallel ranks do not share out, and embeddings tied over pipeline stages; not the optimizer's moments. Ranks
    exchange two checksums per weight; a weight is read once. It waits for the GPU: call it now and then, not at every
    step.

    Raises:
        RuntimeError: on every rank, with the first weights that differ, the ranks, and the usual cause.
    """
    with gathered_parameters(state.chunks):
        found = [line for shared in _shared_weights(state) for line in _differences(shared)]
    if lines := sorted({line for part in from_all_ranks(found, state.groups) for line in part}):
        more = f"\n  … and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise RuntimeError("replicas of the model have come apart:\n  " + "\n  ".join(lines[:8]) + more)


def _shared_weights(state: TrainState) -> Iterator[_Shared]:
    groups = state.groups
    weights = {
        f"{f'chunk {index}: ' if len(state.chunks) > 1 else ''}{name}": parameter
        for index, model in enumerate(unwrapped_models(state))
        for name, parameter in _saved_tensors(model)
    }
    dense = {name: weight for name, weight in weights.items() if getattr(weight, "allreduce", True)}
    experts = {name: weight for name, weight in weights.items() if name not in dense}
    unreduced = (
        "gradients were not summed over these ranks (finalize_model_grads), or weights were not broadcast (wrap_ddp)"
    )
    yield _Shared("data and context parallel", groups.dp_cp, dense, unreduced)
    if experts:
        yield _Shared("expert data parallel", groups.expt_dp, experts, unreduced)
    for sequence_parallel, cause in (
        (True, "with sequence_parallel their gradients must be summed over these ranks (finalize_model_grads)"),
        (False, "these ranks drew different random numbers where they must draw the same (seeds, dropout's stream)"),
    ):
        whole = {
            name: weight
            for name, weight in dense.items()
            if not getattr(weight, "tensor_model_parallel", False)
            and getattr(weight, "sequence_parallel", False) is sequence_parallel
        }
        yield _Shared("tensor parallel", groups.tp, whole, cause)
    yield from _embeddings(state)


def _saved_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, and those buffers that checkpoints hold, such as the bias of a router's experts."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _embeddings(state: TrainState) -> Iterator[_Shared]:
    """The word embedding that stages hold copies of: the first and the last if tied, and those of predicted tokens."""
    group: Any = state.groups.embd
    if group is None or group.size() == 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    for model in unwrapped_models(state):
        chunk: Any = model
        tied = getattr(chunk, "share_embeddings_and_output_weights", False)
        predicts = getattr(chunk, "mtp_process", False)
        if not (tied or state.config.mtp_num_layers):
            return
        if chunk.pre_process or predicts or (tied and chunk.post_process):
            own = hasattr(chunk, "embedding")
            weight = chunk.embedding.word_embeddings.weight if own else chunk.shared_embedding_or_output_weight()
            cause = "gradients of copies of the embedding were not summed over the stages (finalize_model_grads)"
            yield _Shared("embedding", group, {"word embedding": weight}, cause)
            return


def _differences(shared: _Shared) -> list[str]:
    group, ranks = shared.group, dist.get_process_group_ranks(shared.group)
    if group.size() == 1 or not shared.weights:
        return []
    own = torch.stack([_checksums(weight) for weight in shared.weights.values()])
    everyones = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyones, own, group=group)
    differing: dict[str, list[int]] = {
        name: [rank for rank, theirs in zip(ranks, everyones, strict=True) if not theirs[row].equal(everyones[0][row])]
        for row, name in enumerate(shared.weights)
    }
    return [
        f"{name} differs between {shared.name} ranks {ranks[0]} and {', '.join(map(str, others))}: {shared.cause}"
        for name, others in differing.items()
        if others
    ]


def _checksums(weight: torch.Tensor) -> torch.Tensor:
    """Two int64 sums: of a tensor's bits, and of squares of its bits with their places mixed in, modulo 2**64."""
    if is_float8tensor(weight):  # its bytes are not of the dtype that it says
        weight = weight.dequantize()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    bits = weight.detach().contiguous().view(integer).flatten().to(torch.int64)
    mixed = bits + torch.arange(1, bits.numel() + 1, device=bits.device) * 0x9E3779B97F4A7C1
    return torch.stack([bits.sum(), (mixed * mixed).sum()])
