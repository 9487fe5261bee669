"""`cuda_graph_impl="full_iteration"`: forward and backward of a whole step as one CUDA graph.

A small model's step is bound by the launches of its kernels, thousands of them; a graph replays them at once. mcore's
own wrapper (megatron/core/full_cuda_graph.py) keeps its graph in the class, one per process, whatever the model.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states

from minloop.distributed import created

Batches = Sequence[dict[str, torch.Tensor]]
Run = Callable[[Batches], list[Any]]


@dataclass
class _Captured:
    """Steps of one form: how many ran by launches so far, then the graph, what it reads and what it writes."""

    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: Batches = field(default_factory=list[dict[str, torch.Tensor]])
    reports: list[Any] = field(default_factory=list[Any])


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream() -> Generator[None]:
    """Run what is inside on the stream of which graphs are captured, in order with what is around it."""
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class StepGraphs:
    """The CUDA graphs of one training state, one for each form of step: forward step, number and shapes of batches."""

    def __init__(self) -> None:
        self._captured: dict[Any, _Captured] = {}

    def run(self, run: Run, forward_step: Any, batches: Batches, warmup_steps: int) -> list[Any]:
        """Run a step: by launches on the first `warmup_steps` of its form, then capture it, then replay.

        Args:
            run: forward and backward of these microbatches. It may not wait for the GPU.
            batches: the microbatches, dicts of tensors on the device.
        Returns:
            What `run` returned. Its tensors are overwritten by the next step.
        """
        form = (forward_step, *(tuple((name, value.shape) for name, value in batch.items()) for batch in batches))
        step = self._captured.setdefault(form, _Captured())
        step.steps += 1
        if step.steps <= warmup_steps:
            with on_capture_stream():
                return run(batches)
        if step.graph is None:
            self._capture(step, run, batches)
        for buffers, batch in zip(step.inputs, batches, strict=True):
            for name, buffer in buffers.items():
                buffer.copy_(batch[name])
        assert step.graph is not None
        step.graph.replay()
        return step.reports

    def _capture(self, step: _Captured, run: Run, batches: Batches) -> None:
        step.inputs = [type(batch)((name, value.clone()) for name, value in batch.items()) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        states: dict[str, Any] = get_all_rng_states() or {}
        for generator in states.values():
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=_capture_stream(), capture_error_mode="thread_local"):
            step.reports = run(step.inputs)
        step.graph = graph
        created.callback(_release, weakref.ref(step))  # before the communicators of which the graph has kernels


def _release(reference: weakref.ref[_Captured]) -> None:
    step = reference()
    if step is not None and step.graph is not None:
        torch.cuda.synchronize()
        step.graph.reset()
        step.graph, step.inputs, step.reports = None, [], []
