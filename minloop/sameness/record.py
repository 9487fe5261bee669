"""What one layout makes of one global batch: the output of every layer and the gradient of every weight."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from minloop.checkpoint.content import unwrapped_models
from minloop.checkpoint.parts import sharded_parameters
from minloop.data import Batch
from minloop.distributed import is_first_rank
from minloop.fully_sharded import refuse_fully_sharded
from minloop.hybrid_context_parallel import refuse_hybrid
from minloop.layers.cp_layout import gather_sequence
from minloop.losses import reduce_reports
from minloop.microbatches import Microbatches
from minloop.sameness.full_tensors import full_gradients, gather_objects
from minloop.schedule import ForwardStep, forward_backward
from minloop.state import TrainState, require_optimizer
from minloop.step import clear_gradients, evaluating, gpt_forward_step
from minloop.traces import remember_traces

OTHERWISE = "train both from one checkpoint and compare losses and full_weights after a step, or"
"""What to do with fully sharded models."""


@dataclass
class LayoutRecord:
    """What one layout makes of one global batch; full on the first rank, empty on others. `torch.save` takes it.

    Attributes:
        samples: sample → how often data parallel ranks read it; a sample is named by a digest of its tokens, labels and
            loss mask.
        disagreeing: data parallel indices whose ranks (tensor, context, pipeline) did not all read the same.
        outputs: layer → its output [samples, s, h], float32, samples in the order of their names, dropout off; last,
            "token losses" [samples, s].
        losses: name → mean over the tokens of the global batch.
        gradients: weight → its gradient in full shape, see `full_gradients`.
        sequence_parallel: the weights that tensor parallel ranks hold in common but see parts of the sequence with.
    """

    samples: Counter[str] = field(default_factory=Counter[str])
    disagreeing: list[int] = field(default_factory=list[int])
    outputs: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    losses: dict[str, float] = field(default_factory=dict[str, float])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    sequence_parallel: set[str] = field(default_factory=set[str])


def record_layout(
    state: TrainState,
    data: Iterator[Batch],
    *,
    num_microbatches: int,
    forward_step: ForwardStep = gpt_forward_step,
) -> LayoutRecord:
    """Run the next `num_microbatches` microbatches forward, then forward and backward, and gather all they lead to.

    Weights and buffers stay as they are; the gradients are left in their buffers, complete. A layer is any module with
    a `layer_number` in a `ModuleList`, as mcore's are; its output is the first tensor that it returns, [s, b, h].

    Raises:
        ValueError: the config has dropout, whose masks differ between layouts; a fully sharded model.
        RuntimeError: the data ended before that many microbatches.
    """
    refuse_fully_sharded(state.chunks, f"record_layout: {OTHERWISE}")
    config = state.config
    refuse_hybrid(config, "record_layout")
    if config.hidden_dropout or config.attention_dropout:
        raise ValueError(
            f"hidden_dropout is {config.hidden_dropout} and attention_dropout {config.attention_dropout}: layouts draw "
            "other masks, so that nothing could be compared; set both to 0.0"
        )
    require_optimizer(state)
    batches = list(islice(data, num_microbatches))
    if len(batches) < num_microbatches:
        raise RuntimeError(f"the data ended: it held {len(batches)} of {num_microbatches} microbatches")
    with evaluating(state), torch.no_grad(), _Recorder(state, forward_step) as recorder:
        _run(state, batches, recorder.forward_step, forward_only=True)
    clear_gradients(state)
    put_back = remember_traces(state.chunks, config)
    reports = _run(state, batches, forward_step, forward_only=False)
    put_back()
    losses, _ = reduce_reports(state, reports, forward_step)
    record = LayoutRecord(gradients=full_gradients(state))
    own = (state.groups.dp.rank(), _names(batches), recorder.outputs, _sequence_parallel_weights(state))
    everyones = gather_objects(own, state.groups)
    if is_first_rank(state.groups):
        readers = {rank: names for rank, names, _, _ in everyones}
        record.samples = Counter(name for names in readers.values() for name in names)
        record.disagreeing = sorted({rank for rank, names, _, _ in everyones if names != readers[rank]})
        record.outputs = _join([(names, outputs) for _, names, outputs, _ in everyones])
        record.losses = {name: loss.item() for name, loss in losses.items()}
        record.sequence_parallel = set().union(*(weights for *_, weights in everyones))
    return record


class _Recorder:
    """Collects the outputs of this rank's layers, each gathered over the sequence, microbatch by microbatch."""

    def __init__(self, state: TrainState, forward_step: ForwardStep) -> None:
        self.state, self._forward_step = state, forward_step
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "_Recorder":
        for model in unwrapped_models(self.state):
            for path, module in model.named_modules():
                place = re.fullmatch(r"(?:(.*)\.)?layers\.\d+", path)
                number: Any = getattr(module, "layer_number", None)
                if place and number is not None:
                    name = f"{place[1] or 'model'}.layers[{number - 1}]"
                    self._hooks.append(module.register_forward_hook(self._layer_hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _layer_hook(self, name: str) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if self.state.config.sequence_parallel:
                output = gather_from_sequence_parallel_region(output, group=self.state.groups.tp)
            self._keep(name, output)

        return hook

    def forward_step(self, data: Iterator[Any], model: torch.nn.Module) -> Any:
        output, loss_function = self._forward_step(data, model)

        def recording_loss(tensor: torch.Tensor) -> Any:
            if tensor.dim() == 2:
                self._keep("token losses", tensor.transpose(0, 1))
            return loss_function(tensor)

        return output, recording_loss

    def _keep(self, name: str, output: torch.Tensor) -> None:
        """[s / cp, b, ...] of this rank → [b, s, ...] on the CPU, once per data parallel rank."""
        groups = self.state.groups
        whole = gather_sequence(output, groups.cp) if groups.cp.size() > 1 else output
        if groups.tp.rank() == 0 and groups.cp.rank() == 0:
            self.outputs.setdefault(name, []).append(whole.detach().transpose(0, 1).float().cpu())


def _run(state: TrainState, batches: list[Batch], forward_step: ForwardStep, *, forward_only: bool) -> Any:
    return forward_backward(
        state,
        Microbatches(iter(batches), len(batches)),
        forward_step,
        forward_only=forward_only,
        plain=forward_step is gpt_forward_step,
    )


def _names(batches: list[Batch]) -> list[str]:
    """A digest of each sample that this rank read."""
    read = ("tokens", "labels", "loss_mask")
    return [
        hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in sample)).hexdigest()[:16]
        for batch in batches
        for sample in zip(*(batch[name] for name in read if name in batch), strict=True)
    ]


def _sequence_parallel_weights(state: TrainState) -> set[str]:
    own = sharded_parameters(state.chunks, state.groups)
    return {leaf.key for leaf, weight in own if getattr(weight, "sequence_parallel", False)}


def _join(parts: list[tuple[list[str], dict[str, list[torch.Tensor]]]]) -> dict[str, torch.Tensor]:
    """Put the ranks' outputs together, samples in the order of their names."""
    rows: dict[str, dict[str, torch.Tensor]] = {}
    for samples, outputs in parts:
        for name, microbatches in outputs.items():
            calls = sum(map(len, microbatches)) // len(samples)  # of a layer that a pass runs through several times
            for call in range(calls):
                called = name if call == 0 else f"{name}, call {call + 1}"
                rows.setdefault(called, {}).update(zip(samples, torch.cat(microbatches[call::calls]), strict=True))
    number = {name: int(re.sub(r"\D", "", name) or 10**6) for name in rows}
    return {
        name: torch.stack([rows[name][sample] for sample in sorted(rows[name])])
        for name in sorted(rows, key=lambda name: (not name.startswith("decoder"), number[name]))
    }
