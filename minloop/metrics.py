"""What a run says of itself: records of plain numbers under Megatron-LM's names, and its log line."""

from collections.abc import Mapping
from datetime import datetime

import torch

from minloop.evaluation import Evaluation
from minloop.state import TrainState
from minloop.step import StepMetrics

Record = dict[str, float]
"""One step's or one evaluation's numbers; the names are the tags of Megatron-LM's TensorBoard, where it has one."""

# Record's name → its name, format and factor in Megatron-LM's line, in the order of that line; losses go before the
# loss scale.
BEFORE_LOSSES = {
    "iteration-time": ("elapsed time per iteration (ms)", "{:.1f}", 1000),
    "throughput": ("throughput per GPU (TFLOP/s/GPU)", "{:.1f}", 1),
    "iter-energy/gpu": ("energy per GPU (J/iter/GPU)", "{:.1f}", 1),
    "power/gpu": ("power per GPU (W/GPU)", "{:.1f}", 1),
    "learning-rate": ("learning rate", "{:.6E}", 1),
    "batch-size": ("global batch size", "{:5.0f}", 1),
}
AFTER_LOSSES = {
    "loss-scale": ("loss scale", "{:.1f}", 1),
    "grad-norm": ("grad norm", "{:.3f}", 1),
    "skipped-iterations": ("number of skipped iterations", "{:3.0f}", 1),
    "tokens-per-second/gpu": ("tokens per second per GPU", "{:.0f}", 1),
    "mfu": ("MFU", "{:.3f}", 1),
    "mem-max-allocated-bytes": ("max allocated (GiB)", "{:.2f}", 2**-30),
}
OF_THE_RUN = ("iteration", "consumed-samples", "num-tokens")

MEMORY = ("mem-rss-bytes", "mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes")
SPREAD = ("iteration-time min", "iteration-time median", "iteration-time max")
TIMING = ("iteration-time", *SPREAD, "throughput", "mfu", "tokens-per-second", "tokens-per-second/gpu")
ENERGY = ("iter-energy/gpu", "power/gpu")
OF_THE_MACHINE = frozenset((*MEMORY, *TIMING, *ENERGY))
"""What `StepTimer.lap` may give: these names say how the machine did, all others how the training does."""


def step_record(state: TrainState, metrics: StepMetrics) -> Record:
    """Return a step's numbers: iteration, losses, learning rate and so on. Waits for the GPU, once."""
    tensors = [metrics.num_tokens, *metrics.losses.values()]
    if metrics.grad_norm is not None:
        tensors.append(metrics.grad_norm.to(metrics.loss))
    num_tokens, *values = torch.stack(tensors).tolist()
    record: Record = {
        "iteration": state.iteration,
        "consumed-samples": state.consumed_samples,
        "learning-rate": metrics.learning_rate,
        "batch-size": metrics.num_samples,
        "num-tokens": num_tokens,
        **dict(zip(metrics.losses, values, strict=False)),
        "loss-scale": metrics.loss_scale,
    }
    if metrics.grad_norm is not None:
        record["grad-norm"] = values[-1]
    return record | {"skipped-iterations": state.skipped_iterations}


def evaluation_record(state: TrainState, evaluations: Mapping[str, Evaluation]) -> Record:
    """Return what `evaluate` returned as a record: "lm loss validation-NAME", the same with " ppl", and so on."""
    record: Record = {"iteration": state.iteration, "consumed-samples": state.consumed_samples}
    for name, evaluation in evaluations.items():
        record |= {f"{loss} validation-{name}": value for loss, value in evaluation.losses.items()}
        first = next(iter(evaluation.losses))
        record[f"{first} validation-{name} ppl"] = evaluation.perplexity
        if evaluation.bits_per_byte is not None:
            record[f"{first} validation-{name} bits per byte"] = evaluation.bits_per_byte
    return record


def record_line(record: Record, *, train_iters: int | None = None, train_samples: int | None = None) -> str:
    """Return a record as one line in Megatron-LM's form, which log parsers know.

    Args:
        record: of a step, with the numbers of `StepTimer.lap` or without; of an evaluation; or one of your own.
        train_iters, train_samples: iterations and samples of the whole run; what is None is not shown.
    """
    iteration = f"{int(record['iteration']):8d}"
    if "learning-rate" not in record:
        values = [f"{name}: {value:.6E}" for name, value in record.items() if name not in OF_THE_RUN]
        title = "validation loss at " if any(" validation-" in name for name in record) else ""
        return f" {title}iteration {iteration} | " + " | ".join(values) + " |"
    named = {*BEFORE_LOSSES, *AFTER_LOSSES, *OF_THE_RUN, *OF_THE_MACHINE}
    losses = {name: value for name, value in record.items() if name not in named}
    samples = f"consumed samples: {int(record['consumed-samples']):12d}"
    parts = [
        f"iteration {iteration}" if train_iters is None else f"iteration {iteration}/{train_iters:8d}",
        samples if train_samples is None else f"{samples}/{train_samples:12d}",
    ]
    parts += _named(record, BEFORE_LOSSES)
    parts += [f"{name}: {value:.6E}" for name, value in losses.items()]
    parts += _named(record, AFTER_LOSSES)
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(parts) + " |"


def _named(record: Record, names: Mapping[str, tuple[str, str, float]]) -> list[str]:
    return [
        f"{title}: {form.format(record[name] * factor)}"
        for name, (title, form, factor) in names.items()
        if name in record
    ]


def log_line(state: TrainState, metrics: StepMetrics, *, train_iters: int, elapsed: float) -> str:
    """Return one line about a step in Megatron-LM's form, which log parsers know. Reading the loss waits for the GPU.

    Args:
        train_iters: iterations of the whole run.
        elapsed: seconds that the step took.
    """
    return record_line(step_record(state, metrics) | {"iteration-time": elapsed}, train_iters=train_iters)
