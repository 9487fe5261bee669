import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import minloop.cpu
from minloop.cpu import cpu_backend, light_mcore_import

pytestmark = pytest.mark.usefixtures("without_gpu")


def names() -> dict[tuple[str, str], Any]:
    """All that the backend might touch: the names in torch's namespaces and in megatron-core's modules."""
    owners: list[Any] = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.nvtx, dist]
    owners += [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


def changed(before: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    after = names()
    return {key for key in before.keys() | after.keys() if before.get(key, names) is not after.get(key, names)}


def restores() -> None:
    before = names()
    backend = cpu_backend()
    assert backend.enabled
    assert {("torch", "zeros"), ("Tensor", "is_cuda"), ("torch.cuda", "Stream")} <= changed(before)
    for _ in range(2):
        backend.undo()
        assert not backend.enabled
        assert changed(before) == set()
    with cpu_backend():
        assert torch.zeros(1, device="cuda").is_cuda
    assert changed(before) == set()


def nests() -> None:
    before = names()
    outer = cpu_backend()
    on = changed(before)
    with cpu_backend() as inner:
        assert inner.enabled
        assert changed(before) == on
    inner.undo()
    assert changed(before) == on
    assert outer.enabled
    outer.undo()
    assert changed(before) == set()


def leaves_cuda_alone() -> None:
    torch.cuda.is_available = lambda: True
    before = names()
    with cpu_backend() as backend:
        assert not backend.enabled
        assert changed(before) == set()
    with light_mcore_import():
        assert changed(before) == set()
    backend.undo()
    assert changed(before) == set()


@pytest.mark.parametrize("case", [restores, nests, leaves_cuda_alone])
def test_every_name_is_restored(case: Any) -> None:
    run_ranks(1, case)


def answers() -> None:
    with cpu_backend():
        current = torch.cuda.current_device()
        for device in ("cuda", "cuda:0", torch.device("cuda", 0), current, f"cuda:{current}"):
            for made in (
                torch.zeros(2, device=device),
                torch.tensor([1.0], device=device, pin_memory=True),
                torch.empty_like(torch.ones(2), device=device),
                torch.ones(2).new_full((1,), 3.0, device=device),
                torch.ones(2).to(device),
                torch.ones(2).to(device=device, dtype=torch.bfloat16),
                torch.ones(2).cuda(device, non_blocking=True),
                next(torch.nn.Linear(2, 2).to(device).parameters()),
            ):
                assert made.device == torch.device("cpu")
                assert made.is_cuda
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        kinds = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
        for dtype, kind in kinds.items():
            assert torch.nn.Parameter(torch.ones(2, dtype=dtype)).type() == f"torch.cuda.{kind}Tensor"
        assert torch.ones(2).type(torch.float16).dtype == torch.float16
        with torch.device("meta"):
            meta = torch.zeros(1)
        assert meta.is_meta
        assert not meta.is_cuda
        assert "cuda" not in meta.type()


def runtime() -> None:
    with cpu_backend():
        event = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.Stream(device=0)
        with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.nvtx.range("part"):
            stream.wait_stream(torch.cuda.current_stream())
            assert stream.record_event(event) is event
            stream.record_event().wait(stream)
            event.synchronize()
        torch.cuda.synchronize()
        assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
        assert isinstance(stream, torch.cuda.Stream)
        assert not isinstance(stream, torch.cuda.Event)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0


def random_state() -> None:
    with cpu_backend():
        torch.manual_seed(1)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.cuda.manual_seed(1)
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("case", [answers, runtime, random_state])
def test_cuda_is_answered_with_the_cpu(case: Any) -> None:
    run_ranks(1, case)


# The package's own file is left out: it would import megatron.core first.
ORDER = """
import sys, torch, types
sys.modules["minloop"] = types.ModuleType("minloop")
sys.modules["minloop"].__path__ = [{path!r}]
from minloop import cpu

def draw():
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.tensor_parallel import random
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    tracker.add("dropout", 7)
    torch.manual_seed(3)
    drawn = [torch.rand(2), swiglu(torch.ones(1, 4)).flatten()]
    for _ in range(2):
        with tracker.fork("dropout"):
            drawn.append(torch.nn.functional.dropout(torch.ones(16)))
    return torch.cat(drawn).tolist()

for _ in range(2):
    with cpu.cpu_backend():
        print(draw())
print("torch._inductor" in sys.modules)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_switched_on_before_or_after_importing_mcore() -> None:
    early, late, compiler = python(ORDER.format(path=str(Path(minloop.cpu.__file__).parent))).stdout.splitlines()
    assert early == late
    drawn = [float(number) for number in early.strip("[]").split(",")]
    assert drawn[-32:-16] != drawn[-16:]  # the tracker carries its state from one fork to the next
    assert compiler == "False"


def test_import_is_quiet_and_light_and_changes_nothing_in_torch() -> None:
    process = python("""
import sys, torch
before = {owner: dict(vars(owner)) for owner in (torch, torch.Tensor, torch.cuda, torch.distributed)}
import minloop.cpu
for owner, attributes in before.items():
    for name, value in attributes.items():
        assert vars(owner)[name] is value, name
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
""")
    assert (process.stdout, process.stderr) == ("[]\n", "")


def test_only_the_warnings_of_mcore_are_dropped() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with light_mcore_import():
            warnings.warn_explicit("no apex", UserWarning, "a.py", 1, module="megatron.core.optimizer")
            warnings.warn_explicit("escape", SyntaxWarning, "/site-packages/megatron/core/a.py", 1)
            warnings.warn_explicit("old", FutureWarning, "a.py", 1, module="megatron.core.optimizer")
            warnings.warn_explicit("mine", UserWarning, "a.py", 1, module="a")
    assert [str(warning.message) for warning in seen] == ["old", "mine"]


def compiled(x: torch.Tensor) -> torch.Tensor:
    """1 under the compiler, 0 without."""
    return x + 1 if torch.compiler.is_compiling() else x


def compiles_late() -> None:
    real, zero = torch.compile, torch.zeros(1)
    with light_mcore_import():
        function = torch.compile(compiled, backend="eager")

        class Layer:
            @torch.compile(backend="eager", fullgraph=True)
            def method(self, x: torch.Tensor) -> torch.Tensor:
                return compiled(x)

        assert torch.compile is not real
    assert torch.compile is real
    assert (function.__name__, function.__doc__) == ("compiled", compiled.__doc__)
    with cpu_backend():
        assert function(zero) == Layer().method(zero) == 0
    assert "torch._dynamo" not in sys.modules
    assert function(zero) == Layer().method(zero) == 1
    with cpu_backend():
        assert function(zero) == Layer().method(zero) == 0


def compiled_before_or_meanwhile_is_eager() -> None:
    function, zero = torch.compile(compiled, backend="eager"), torch.zeros(1)
    assert function(zero) == 1
    with cpu_backend():
        assert function(zero) == 0
        module = torch.compile(Compiled(), backend="eager")
        assert module(zero) == 0
    assert function(zero) == module(zero) == 1
    with torch.compiler.set_stance("force_eager"):
        with cpu_backend():
            assert function(zero) == 0
        assert function(zero) == 0  # the caller's stance is back


class Compiled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return compiled(x)


def compiler_works_after_training() -> None:
    assert "torch._dynamo" not in sys.modules
    with cpu_backend():
        module = torch.compile(Compiled(), backend="eager")
        assert module(torch.zeros(1)) == 0
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert "torch._dynamo" in sys.modules  # loaded by the optimizer while torch's functions were replaced
    function = torch.compile(lambda x: compiled(x) + torch.zeros(1).to(x), backend="eager", fullgraph=True)
    assert function(torch.zeros(1)) == module(torch.zeros(1)) == 1


def test_functions_compiled_before_or_meanwhile_are_eager() -> None:
    run_ranks(1, compiled_before_or_meanwhile_is_eager)


@pytest.mark.parametrize("case", [compiles_late, compiler_works_after_training])
def test_the_compiler_is_imported_late(case: Any) -> None:
    """In a process of its own: ranks are forked from one that has imported the compiler."""
    command = [sys.executable, "-c", f"import test_cpu; test_cpu.{case.__name__}()"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def uneven(ranks: list[int], async_op: bool) -> None:
    """all_gather and reduce_scatter of [n, 2] with another n, 0 too, on each rank of a group that is not the world."""
    group: Any = dist.new_group(ranks)
    rank, sizes = dist.get_rank(group), [3, 0, 1][: len(ranks)]
    if rank < 0:
        return
    with cpu_backend():
        gathered = [torch.full((n, 2), -1.0) for n in sizes]
        own = torch.full((sizes[rank], 2), float(rank), requires_grad=True)
        check_handle(dist.all_gather(gathered, own, group=group, async_op=async_op), async_op)
        assert [t.tolist() for t in gathered] == [[[float(i)] * 2] * n for i, n in enumerate(sizes)]

        for op, total in ((dist.ReduceOp.SUM, sum(range(len(ranks)))), (dist.ReduceOp.MAX, len(ranks) - 1)):
            output, parts = torch.full((sizes[rank], 2), -1.0), [torch.full((n, 2), float(rank)) for n in sizes]
            check_handle(dist.reduce_scatter(output, parts, op, group, async_op), async_op)
            assert output.tolist() == [[float(total)] * 2] * sizes[rank]
            assert all((part == rank).all() for part in parts)


def check_handle(work: Any, async_op: bool) -> None:
    """NCCL's contract: a handle to wait for if asynchronous, else None."""
    if not async_op:
        assert work is None
        return
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]])
def test_uneven_collectives(ranks: list[int], async_op: bool) -> None:
    run_ranks(max(ranks) + 1, uneven, ranks, async_op, init="gloo")


def test_a_host_may_have_reset_its_warnings() -> None:
    with warnings.catch_warnings():
        backend = cpu_backend()
        warnings.resetwarnings()
        backend.undo()
