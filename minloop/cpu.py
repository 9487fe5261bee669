"""Run megatron-core where there is no GPU: CPU tensors, gloo.

megatron-core asks for CUDA in five ways, and each is answered with the CPU:

1. a device      ``torch.zeros(1, device="cuda")``, ``t.to("cuda")``, ``device=torch.cuda.current_device()``
2. a move        ``t.cuda()``, ``t.pin_memory()``, ``t.record_stream(s)``
3. a tensor kind ``t.is_cuda``, ``t.type() == "torch.cuda.FloatTensor"``
4. the runtime   ``torch.cuda``: streams, events, synchronize, memory
5. random state  ``torch.cuda.get_rng_state``, ``default_generators``: the CPU's one generator

and gloo is given what only NCCL has (see `minloop.gloo`): ``all_gather`` and ``reduce_scatter`` of unequal shapes.
"""

import contextlib
import functools
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any, cast

import torch

from minloop.engine import pass_over_broken_engine
from minloop.gloo import Changes, collective_changes

_MAKERS = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace normal ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices "
    "triu_indices zeros zeros_like"
)
_CPU = torch.device("cpu")
_compile = torch.compile  # the real one, while torch.compile is _lazy_compile
_handles: "list[CPUBackend]" = []  # the backend is on while there are any
_undo = contextlib.ExitStack()


def _cpu(device: Any) -> Any:
    """The CPU for a CUDA device (a torch.device, "cuda:0" or 0); anything else as it is."""
    if isinstance(device, torch.device | str):
        return _CPU if torch.device(device).type == "cuda" else device
    return _CPU if type(device) is int else device  # a bool is no device


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(*args, **kwargs)

    return wrapper


def _tensor_changes() -> Changes:
    for name in _MAKERS.split():
        yield torch, name, _on_cpu(getattr(torch, name))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        yield torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name))
    to, kind = _on_cpu(torch.Tensor.to), torch.Tensor.type

    def cuda_kind(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = kind(t, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and t.is_cpu else answer

    yield torch.Tensor, "to", lambda t, *args, **kwargs: to(t, *map(_cpu, args[:1]), *args[1:], **kwargs)
    yield torch.Tensor, "type", cuda_kind
    yield torch.Tensor, "is_cuda", property(lambda t: t.is_cpu)
    yield torch.Tensor, "cuda", lambda t, *args, **kwargs: t
    yield torch.Tensor, "pin_memory", lambda t, *args, **kwargs: t
    yield torch.Tensor, "record_stream", lambda t, stream: None


class _Stream:
    """A stream, or an event on one. The CPU works in order: what was asked for is done, nothing is waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    record = synchronize = wait_event = wait_stream = wait
    priority_range = staticmethod(lambda: (0, 0))

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(_Stream): ...


def _runtime_changes() -> Changes:
    """Only what torch looks up at each call: megatron-core binds ``_lazy_call`` and ``device`` when it is imported."""
    answers = {
        **dict.fromkeys(["reset_peak_memory_stats", "set_device", "set_stream", "synchronize"]),
        **dict.fromkeys(["current_device", "_exchange_device", "_maybe_exchange_device"], 0),
        **dict.fromkeys(["current_stream", "default_stream"], _Stream()),
        "device_count": 1,
        "get_device_capability": (0, 0),
        "is_available": False,  # with PYTORCH_NVML_BASED_CUDA_CHECK=1, as Lightning sets it, torch counts devices
        "is_current_stream_capturing": False,
        "is_initialized": True,  # so that _lazy_call calls, and _lazy_init does nothing
        "stream": contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *args, answer=answer, **kwargs: answer
    yield torch.cuda, "Stream", _Stream
    yield torch.cuda, "Event", _Event
    yield torch.cuda, "default_generators", (torch.default_generator,)
    yield torch.cuda.random, "current_device", lambda: 0
    yield torch.cuda.random, "device_count", lambda: 1
    yield torch.cuda.nvtx, "range_push", lambda message: 0
    yield torch.cuda.nvtx, "range_pop", lambda: 0


def _set(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute; return what undoes it. What was inherited (Tensor.is_cuda) is deleted again, not set."""
    own, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    return functools.partial(setattr, owner, name, old) if own else functools.partial(delattr, owner, name)


def _switch_on() -> None:
    with torch.device("cpu"):
        torch.empty(0)  # the first `with device` makes torch list what heeds it: its own functions, not ours
    with contextlib.ExitStack() as undo:
        for change in itertools.chain(_tensor_changes(), _runtime_changes(), collective_changes()):
            undo.callback(_set(*change))
        undo.callback(_set(torch, "compile", _lazy_compile))
        # All that this logger says is that the CPU's generator moved while CUDA's was in use; they are one here.
        undo.callback(_set(logging.getLogger("megatron.core.tensor_parallel.random"), "disabled", True))
        warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")  # advice for a GPU
        undo.callback(_forget_filter, warnings.filters[0])
        if "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        _undo.push(undo.pop_all())


def _forget_filter(own: Any) -> None:
    with contextlib.suppress(ValueError):  # the host has removed it
        cast("Any", warnings.filters).remove(own)


class CPUBackend(contextlib.AbstractContextManager["CPUBackend"]):
    """What `cpu_backend` returns: the backend is on until ``undo()``, or to the end of a ``with`` block."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            if not _handles:
                _switch_on()
            _handles.append(self)

    @property
    def enabled(self) -> bool:
        """Whether this handle keeps the backend on: False after ``undo()``, and always where there is CUDA."""
        return self in _handles

    def undo(self) -> None:
        """Give the backend up. The last handle to go restores all that was changed; twice is as good as once."""
        if self.enabled:
            _handles.remove(self)
            if not _handles:
                _undo.close()
                if trace_rules := sys.modules.get("torch._dynamo.trace_rules"):
                    trace_rules.clear_lru_cache()  # a dynamo loaded meanwhile took ours for torch's

    def __exit__(self, *exception: object) -> None:
        self.undo()


def cpu_backend() -> CPUBackend:
    """Let megatron-core run on CPU tensors and gloo, from now until ``undo()``. Where there is CUDA, change nothing.

    It may be called before or after the first import of megatron.core, and more than once. Meanwhile, process-wide:

    - CPU tensors say ``is_cuda`` and ``type()`` "torch.cuda.*"; their ``device`` stays the CPU.
    - ``t.cuda()``, ``t.cpu()`` and ``t.to(...)`` between the two are ``t`` itself, never a copy.
    - The CPU and "CUDA" draw from one generator, the CPU's: seeding one seeds the other, and whatever else draws from
      it (a data loader, say) shifts the model's dropout. Give such things a ``torch.Generator`` of their own.
    - Functions under ``torch.compile`` run uncompiled.
    - ``torch.cuda.is_available()`` stays False; memory figures are 0.
    """
    return CPUBackend()


def _lazy_compile(model: Any = None, **options: Any) -> Any:
    """torch.compile, put off until the first call made while the backend is off."""
    if model is None:
        return functools.partial(_lazy_compile, **options)
    if isinstance(model, torch.nn.Module):
        if _handles:
            _undo.enter_context(torch.compiler.set_stance("force_eager"))
        return _compile(model, **options)
    compiled: Any = None

    @functools.wraps(model)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if _handles:
            return model(*args, **kwargs)
        if compiled is None:
            compiled = _compile(model, **options)
        return compiled(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def light_mcore_import() -> Generator[None]:
    """Around the first import of megatron.core, make it quiet and, where there is no CUDA, quick.

    megatron.core decorates with torch.compile, which loads the compiler at once, and warns of each optional package
    that is missing (Transformer Engine, Apex). In here these warnings are dropped, and without CUDA the compiler waits
    for the first call of a decorated function without `cpu_backend`. A Transformer Engine that cannot be used is
    hidden, see `minloop.engine`. Not for several threads at once.
    """
    with contextlib.ExitStack() as undo:
        if not torch.cuda.is_available():
            undo.callback(_set(torch, "compile", _lazy_compile))
        undo.callback(_set(logging.getLogger("torch.utils.cpp_extension"), "disabled", True))
        # emerging-optimizers' first record would set up logging for the program
        undo.callback(_set(logging.root, "handlers", logging.root.handlers or [logging.NullHandler()]))
        undo.enter_context(warnings.catch_warnings())
        for category in (UserWarning, DeprecationWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", category=category, module=r".*megatron")
        pass_over_broken_engine()
        yield
