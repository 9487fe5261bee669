"""What a run says of itself: the log line."""

from datetime import datetime

from minloop.state import TrainState
from minloop.step import StepMetrics


def log_line(state: TrainState, metrics: StepMetrics, *, train_iters: int, elapsed: float) -> str:
    """Return one line about a step in Megatron-LM's form, which log parsers know. Reading the loss waits for the GPU.

    Args:
        train_iters: iterations of the whole run.
        elapsed: seconds that the step took.
    """
    parts = [
        f"iteration {state.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {state.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed * 1000:.1f}",
        f"learning rate: {metrics.learning_rate:.6E}",
        f"global batch size: {metrics.num_samples:5d}",
        *(f"{name}: {loss.item():.6E}" for name, loss in metrics.losses.items()),
        f"loss scale: {metrics.loss_scale:.1f}",
    ]
    if metrics.grad_norm is not None:
        parts.append(f"grad norm: {metrics.grad_norm.item():.3f}")
    parts.append(f"number of skipped iterations: {state.skipped_iterations:3d}")
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(parts)
