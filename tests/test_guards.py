"""The project's principles, as tests over its source: what minloop must not do, and what shape its files have."""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import minloop

ROOT = Path(__file__).parent.parent
FILES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "minloop").rglob("*.py"))}

# A stage may import those before it, never those after it; minloop/__init__.py comes after all.
STAGES = """
messages disk engine gloo cpu determinism spelling combined_checks context_parallel_checks expert_checks fsdp_checks
graph_checks ignored_checks kernel_checks memory_checks optimizer_config_checks precision_checks tensor_parallel_checks
checks config
launch alive traces init_checks distributed groups everyone tp_overlap
layers architecture meta_device model hybrid_pattern hybrid cuda_graph advice wrapping_checks
fully_sharded master_weights weight_writes first_gradients data_parallel optimizer
lr_schedule moe state signals stragglers data losses microbatches placement
hybrid_context_parallel packed schedule injection step evaluation
flops parameter_count activation_memory fsdp_memory estimate_checks memory metrics timing logs profiling garbage
inference checkpoint fault_places faults embedding sameness
""".split()

MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 40  # without the docstring
LONGER_FUNCTIONS: dict[str, str] = {}  # "minloop/step.py:train_step": the reason

FORBIDDEN_IMPORTS = ("argparse.", "atexit.", "megatron.training.")
ALLOWED_IMPORTS = ("argparse.Namespace",)  # in which Megatron-LM's checkpoints hold their settings
FORBIDDEN_CALLS = {
    "exit", "quit", "print", "os._exit", "os.chdir", "os.putenv", "os.unsetenv", "sys.exit", "logging.basicConfig",
    "signal.signal", "os.environ.clear", "os.environ.pop", "os.environ.popitem", "os.environ.setdefault",
    "os.environ.update",
}  # fmt: skip
ALLOWED_THERE = {
    # what `stop_signals` is entered for, which puts back the handlers before; how a data worker ends
    "minloop/signals.py": {"signal.signal", "os._exit"},
    # threads of gloo's that a save in the background began abort a process that ends before them
    "minloop/checkpoint/background.py": {"atexit"},
}

PUBLIC_NAMES = """
Batch CheckpointDescription CheckpointError DatasetDescription Difference DistributedDataParallelConfig Evaluation Fault
FaultError FaultGuard GPTDatasetConfig LayoutRecord Loader MLATransformerConfig MemoryEstimate ModelProvider
OptimizerConfig PendingSave ProcessGroupCollection Record Sink StepMetrics StepTimer StepTimes StopRequest
TokenizeReport TrainState TransformerConfig begin_step build_byte_tokenizer build_config build_dataset_config
build_ddp_config build_gpt_datasets build_gpt_model build_groups build_hybrid_model build_loader build_mock_loader
build_model build_optimizer build_optimizer_config build_scheduler build_stream_loader build_tokenizer check_replicas
compare_layouts compare_records console_sink cpu_backend describe_checkpoint describe_dataset estimate_memory eval_step
evaluate evaluation_record expert_load export_weights fault_environment finish_step first_difference flops_per_token
forward_backward forward_logits forward_times full_gradients full_weights gathered_parameters gpt_forward_step
gpt_provider hf_config_fields hybrid_provider init_distributed init_tp_overlap inject_fault is_first_rank jsonl_sink
latest_checkpoint load_checkpoint load_full_parameters load_hf_weights load_weights log_line lora manual_gc mask_prompt
merge_lora named_full_parameters num_microbatches offload onload pack_samples packed_forward_step padded_vocab_size
peak_tflops place_batch prefetch_to_device profiled_steps progress_bar ramped_batch_size read_run_config record_layout
record_line replace_layout save_checkpoint save_hf_weights seed_ranks shared_directory shutdown_distributed start_save
step_record stop_signals tensorboard_sink token_logprobs token_loss tokenize_to_indexed train_step verify_checkpoint
wandb_sink wrap_ddp wrap_fsdp write_indexed write_run_config
""".split()


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name → dotted origin, for every import of a file: {"np": "numpy", "getpid": "os.getpid"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The chain of names that an expression is, "os.environ.pop", imports resolved; "" if it is none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


def misdeeds(tree: ast.AST, allowed: Collection[str] = ()) -> Iterator[str]:
    """Every forbidden import, call, `global` statement and environment write of a file."""
    forbidden_calls = FORBIDDEN_CALLS.difference(allowed)
    names = imported(tree)
    for origin in names.values():
        if origin not in (*ALLOWED_IMPORTS, *allowed) and f"{origin}.".startswith(FORBIDDEN_IMPORTS):
            yield f"import of {origin}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        elif isinstance(node, ast.Call) and (name := dotted(node.func, names)) in forbidden_calls:
            yield f"line {node.lineno}: {name}()"
        elif isinstance(node, ast.Subscript | ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            target = node.value if isinstance(node, ast.Subscript) else node
            if dotted(target, names) == "os.environ":
                yield f"line {node.lineno}: write to os.environ"


def stage(module: str) -> int:
    """Position in STAGES of "minloop.data.loader"; anything else of minloop, its public names above all, is last."""
    part = module.split(".")[1] if "." in module else ""
    return STAGES.index(part) if part in STAGES else len(STAGES)


def later_imports(tree: ast.AST, module: str) -> list[str]:
    own = [origin for origin in imported(tree).values() if f"{origin}.".startswith(("minloop.", "."))]
    return [origin for origin in own if origin.startswith(".") or stage(origin) > stage(module)]


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def test_a_file_does_nothing_behind_the_users_back(name: str, tree: ast.Module):
    assert list(misdeeds(tree, ALLOWED_THERE.get(name, ()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import argparse",
        "from atexit import register",
        "from megatron.training.global_vars import get_args",
        "from megatron import training",
        "def f():\n    global x",
        "import os\nos.environ['A'] = '1'",
        "from os import environ as e\ndel e['A']",
        "import os\nos.environ |= {}",
        "import os\nos.environ.setdefault('A', '1')",
        "from os import chdir\nchdir('/')",
        "import signal as s\ns.signal(s.SIGINT, s.SIG_IGN)",
        "from logging import basicConfig\nbasicConfig()",
        "import sys\nsys.exit()",
        "print('x')",
    ],
)
def test_the_guard_sees(source: str):
    assert len(list(misdeeds(ast.parse(source)))) == 1


def test_a_file_imports_no_later_stage(name: str, tree: ast.Module):
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert module == "minloop" or stage(module) < len(STAGES), "STAGES lacks this file"
    assert later_imports(tree, module) == []


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ("from minloop.step import train_step", "minloop.step.train_step"),
        ("from minloop import config, checkpoint", "minloop.checkpoint"),
        ("import minloop.data.loader, minloop.state", "minloop.data.loader"),
        ("from minloop import build_model", "minloop.build_model"),
        ("import minloop", "minloop"),
        ("from . import cpu", "..cpu"),
    ],
)
def test_the_order_guard_sees(source: str, origin: str):
    assert later_imports(ast.parse(source), "minloop.state") == [origin]


def test_files_and_functions_are_short(name: str, tree: ast.Module):
    lines = FILES[name].read_text().count("\n")
    assert lines <= MAX_FILE_LINES
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f"{name}:{f.name}": function_lines(f) for f in functions if function_lines(f) > MAX_FUNCTION_LINES}
    assert {function: lines for function, lines in long.items() if function not in LONGER_FUNCTIONS} == {}


def test_public_names_are_pinned():
    assert minloop.__all__ == PUBLIC_NAMES == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("public_name", PUBLIC_NAMES)
def test_what_is_public_is_documented(public_name: str):
    value = getattr(minloop, public_name)
    if getattr(value, "__module__", "").startswith("minloop"):
        assert inspect.getdoc(value)


IMPORT_AND_COMPARE = """
import json, logging, os, signal, sys
import torch, torch.distributed
import torch._dynamo  # which wraps torch.manual_seed; Transformer Engine imports it

def state():
    owners = {"torch": torch, "Tensor": torch.Tensor, "cuda": torch.cuda, "distributed": torch.distributed}
    attributes = {f"{owner}.{key}": id(value) for owner, place in owners.items() for key, value in vars(place).items()}
    signals = {s.name: str(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)}
    return {"attributes": attributes, "signals": signals, "environment": dict(os.environ),
            "logging": {"handlers": str(logging.root.handlers), "level": logging.root.level}}

before = state()
import minloop
after = state()
changes = {kind: [key for key in before[kind] if before[kind][key] != after[kind].get(key)] for kind in before}
changes["environment"] += [key for key in after["environment"] if key not in before["environment"]]
changes["initialised"] = [torch.cuda.is_initialized(), torch.distributed.is_initialized()]
print(json.dumps(changes))
"""


def test_importing_minloop_changes_nothing():
    """In torch (names it had before), signal handlers, environment and logging; nor does it start CUDA or a group."""
    run = subprocess.run([sys.executable, "-c", IMPORT_AND_COMPARE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "attributes": [],
        "signals": [],
        "environment": [],
        "logging": [],
        "initialised": [False, False],
    }
    assert len(run.stdout.splitlines()) == 1, "importing minloop printed something"
