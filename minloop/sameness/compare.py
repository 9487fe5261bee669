"""Do two layouts train the same model? Their first step compared, layer by layer and gradient by gradient."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig

from minloop.checkpoint import load_checkpoint, save_checkpoint
from minloop.data import Batch, num_microbatches
from minloop.distributed import shutdown_distributed
from minloop.fully_sharded import refuse_fully_sharded
from minloop.messages import say_once
from minloop.sameness.full_tensors import from_first_rank
from minloop.sameness.record import OTHERWISE, LayoutRecord, record_layout
from minloop.sameness.replicas import check_replicas
from minloop.schedule import ForwardStep
from minloop.state import TrainState
from minloop.step import gpt_forward_step

TINY = 1e-30
_PARTIAL = "with sequence_parallel finalize_model_grads sums it over tensor parallel ranks"


@dataclass(frozen=True)
class Difference:
    """How far two layouts are apart in one thing.

    Attributes:
        what: for instance "output of decoder.layers[2]" or "gradient of decoder.layers.mlp.linear_fc1.weight[2]", the
            checkpoint's name of a weight; layers are counted from 0.
        relative: largest absolute difference over the reference's largest absolute value.
        hint: what usually causes it.
    """

    what: str
    relative: float
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.relative:.1e}" + (f" ({self.hint})" if self.hint else "")


def compare_records(reference: LayoutRecord, other: LayoutRecord) -> list[Difference]:
    """How far `other` is from `reference`, in the order of computation: samples, outputs, losses, gradients."""
    for name, record in (("the reference", reference), ("the other layout", other)):
        if record.disagreeing:
            which = f"ranks of data parallel index {record.disagreeing} of {name} read different batches"
            return [Difference("samples", 1.0, f"{which}: tensor, context and pipeline ranks must read the same")]
    if reference.samples != other.samples:
        repeated = [max(record.samples.values(), default=0) for record in (reference, other)]
        hint = f"; a sample was read {max(repeated)} times, by several data parallel ranks" if max(repeated) > 1 else ""
        return [Difference("samples", 1.0, f"the layouts did not see the same global batch{hint}")]
    differences = [
        Difference(f"output of {name}", relative_difference(other.outputs.get(name), reference.outputs.get(name)))
        for name in reference.outputs | other.outputs
    ]
    for name, loss in reference.losses.items():
        relative = abs(other.losses.get(name, torch.nan) - loss) / max(abs(loss), TINY)
        differences.append(Difference(name, relative))
    for name in sorted(reference.gradients | other.gradients, key=_forward_order):
        relative = relative_difference(other.gradients.get(name), reference.gradients.get(name))
        partial = re.sub(r"\[.*", "", name) in other.sequence_parallel
        differences.append(Difference(f"gradient of {name}", relative, _PARTIAL if partial else ""))
    return differences


def first_difference(differences: Sequence[Difference], tolerance: float) -> Difference | None:
    """The first that is above `tolerance`, in the order of computation; NaN is above all."""
    return next((difference for difference in differences if not difference.relative <= tolerance), None)


def compare_layouts[Config: TransformerConfig](
    build: Callable[[Config], TrainState],
    reference: Config,
    other: Config,
    data: Callable[[TrainState], Iterator[Batch]],
    *,
    global_batch_size: int,
    micro_batch_size: int,
    forward_step: ForwardStep = gpt_forward_step,
    directory: str | Path | None = None,
) -> list[Difference]:
    """Compare what two layouts make of the same weights and the same global batch, on the ranks there are.

    The model is built in layout `reference` and saved, then rebuilt in layout `other` and loaded: what differs beyond
    rounding (some 1e-6 in fp32) is wrong in one of them, and `first_difference` is where to look. On a GPU, set
    NVIDIA_TF32_OVERRIDE=0 before the program starts: Transformer Engine rounds what it multiplies in fp32 to TF32.
    Both layouts must fit the number of ranks; what a layout does not use is data parallel. The config must be without
    dropout. A fully sharded model is compared by hand: load one checkpoint into both kinds, and compare losses and
    `full_weights` after a step of `train_step`.

    Args:
        build: makes a training state of a config, from `init_distributed` on; groups are destroyed in between.
        reference: for instance ``replace_layout(config, tensor_model_parallel_size=1)``.
        other: another layout of the same model.
        data: makes an iterator of a state's batches.
        directory: where to write a checkpoint, on a file system that all ranks share; by default a temporary one.
    Returns:
        On every rank all differences in the order of computation, small and large.
    Raises:
        ValueError: a fully sharded model; what `record_layout` refuses.
        RuntimeError: ranks of one layout began with different copies of a weight, see `check_replicas`.
    """
    records: list[LayoutRecord] = []
    with tempfile.TemporaryDirectory() as own:
        folder = str(directory or own)
        for config in (reference, other):
            try:
                state = build(config)
                refuse_fully_sharded(state.chunks, f"compare_layouts: {OTHERWISE}")
                _say_what_rounds(state.config)
                check_replicas(state)  # which loading would make equal
                if config is reference:
                    folder = from_first_rank(folder, state.groups)
                    save_checkpoint(folder, state)
                else:
                    load_checkpoint(folder, state)
                count = num_microbatches(global_batch_size, micro_batch_size, state.groups)
                records.append(record_layout(state, data(state), num_microbatches=count, forward_step=forward_step))
                differences = from_first_rank(compare_records(records[0], records[-1]), state.groups)
            finally:
                shutdown_distributed()
    return differences


def _say_what_rounds(config: TransformerConfig) -> None:
    of_transformer_engine = config.transformer_impl == "transformer_engine" and config.params_dtype == torch.float32
    if of_transformer_engine and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        say_once(
            "Transformer Engine multiplies fp32 as TF32, of 11 bits, by which layouts differ far beyond 1e-6: set "
            "NVIDIA_TF32_OVERRIDE=0 before the program starts to compare what fp32 makes of them"
        )


def _forward_order(name: str) -> tuple[bool, bool, int, str]:
    number = re.search(r"\[(\d+)\]|\.(\d+)\.", name)
    layer = int(next(n for n in number.groups() if n is not None)) if number else -1
    return (name.startswith("output_layer"), name.startswith("decoder.final"), layer, name)


def relative_difference(value: torch.Tensor | None, reference: torch.Tensor | None) -> float:
    """The largest absolute difference of any element over the reference's largest; infinite if shapes differ."""
    if value is None or reference is None or value.shape != reference.shape:
        return torch.inf
    scale = max(reference.abs().max().item(), TINY)
    return (value.double() - reference.double()).abs().max().item() / scale
