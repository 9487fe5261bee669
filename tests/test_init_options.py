"""What `init_distributed` is given and what it finds: options of mcore's, groups of a host's, a broken installation."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from small import small_config, small_state, text_loader, train

import minloop
from minloop.distributed import check_world_size

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({name: value}, rf"{name} is a field of the config: build_config\({name}={value!r}\)".replace("[", r"\["))
            for name, value in {
                **TP2,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "context_parallel_size": 2,
                "hierarchical_context_parallel_sizes": [1, 2],
                "hybrid_context_parallel": True,
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "pipeline_model_parallel_comm_backend": "nccl",
            }.items()
        ],
        ({"gtp_remat_size": 2}, r"build_config\(gtp_weight_remat_size=2\)"),
        ({"expert_gtp_remat_size": 2}, r"build_config\(expert_gtp_weight_remat_size=2\)"),
        ({"use_sharp": True}, "give sharp_enabled_group='dp_replica' and num_distributed_optimizer_instances > 1"),
        ({"use_sharp": True, "sharp_enabled_group": "dp"}, "before it has set it, and fails"),
    ],
)
def test_options_that_are_fields_or_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minloop.init_distributed(small_config(), seed=1, **options)


@pytest.mark.parametrize(
    ("fields", "order", "named"),
    [
        (TP2, "dp-pp", r"tp \(2\), dp \(4\)"),
        (TP2, "tp-cp-ep-pp", r"tp \(2\), dp \(4\)"),
        ({"expert_model_parallel_size": 2, "num_moe_experts": 2}, "tp-dp-pp", r"ep \(2\), dp \(8\)"),
        ({"context_parallel_size": 4}, "tp-dp-pp", r"cp \(4\), dp \(8\)"),
        ({}, "tp-cp-ep-dp-dp-pp", r"dp \(8\)"),
        ({}, "tp,dp,pp", r"dp \(8\)"),
        (TP2, "TP-PP-DP", None),
        (TP2 | {"pipeline_model_parallel_size": 4}, "tp-pp", None),
    ],
)
def test_an_order_has_every_axis(fields: dict[str, Any], order: str, named: str | None) -> None:
    config = small_config(**fields)
    if named is None:
        check_world_size(config, 8, order)
        return
    with pytest.raises(ValueError, match=f"order='{order}' must name every axis of more than one rank, .* {named}, no"):
        check_world_size(config, 8, order)


def groups_of_a_host() -> None:
    config = small_config()
    parallel_state.initialize_model_parallel()
    sharp: dict[str, Any] = {
        "use_sharp": True,
        "sharp_enabled_group": "dp_replica",
        "num_distributed_optimizer_instances": 2,
    }
    named = "use_sharp=True, sharp_enabled_group='dp_replica', num_distributed_optimizer_instances=2"
    order: dict[str, Any] = {"order": "tp-pp-dp"}
    for options, said in (order, "order='tp-pp-dp'"), (sharp, named):
        with pytest.raises(RuntimeError, match=f"exist already, so that {said} would do nothing"):
            minloop.init_distributed(config, seed=1, **options)
    minloop.init_distributed(config, seed=1, num_distributed_optimizer_instances=1)
    minloop.shutdown_distributed()
    assert parallel_state.model_parallel_is_initialized()
    parallel_state.destroy_model_parallel()

    given: dict[str, Any] = {"order": "tp-pp-dp", "num_distributed_optimizer_instances": 2}
    for _ in range(2):  # a second model on groups that minloop made
        assert minloop.init_distributed(config, seed=1, **given).intra_dp_cp.size() == 1
    with pytest.raises(RuntimeError, match="so that num_distributed_optimizer_instances=1 would do nothing"):
        minloop.init_distributed(config, seed=1, num_distributed_optimizer_instances=1)
    minloop.shutdown_distributed()
    minloop.init_distributed(config, seed=1, num_distributed_optimizer_instances=1)
    minloop.shutdown_distributed()


def test_options_for_groups_that_are_there_are_refused() -> None:
    run_ranks(2, groups_of_a_host, init="any")


def failing_then_right() -> None:
    make, calls = parallel_state.create_group, list[Any]()

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(options)
        if len(calls) == 3:
            raise OSError("no third group")
        return make(*args, **options)

    with mock.patch.object(parallel_state, "create_group", fail), pytest.raises(OSError, match="no third group"):
        minloop.init_distributed(small_config(**TP2), seed=1)
    assert not dist.is_initialized()
    state = small_state(**TP2)
    assert all(norm > 0 for _, norm in train(state, text_loader(state), 2))
    minloop.shutdown_distributed()


def test_a_failure_inside_mcore_leaves_nothing_behind() -> None:
    run_ranks(2, failing_then_right)


def with_gloo_groups(directory: str) -> None:
    for first in (True, False):
        state = small_state(
            seed=1 if first else 9,
            ddp={"use_distributed_optimizer": True},
            init={"create_gloo_process_groups": True},
        )
        group: Any = parallel_state.get_data_parallel_group_gloo()
        assert dist.get_backend(group) == "gloo"
        loader = text_loader(state)
        if first:
            train(state, loader, 2)
            minloop.save_checkpoint(directory, state, loader)
            expected = train(state, loader, 1)
        else:
            minloop.load_checkpoint(directory, state, loader)
            assert train(state, loader, 1) == expected  # pyright: ignore[reportPossiblyUnboundVariable]
        minloop.shutdown_distributed()


def test_with_groups_on_gloo_it_trains_and_saves(tmp_path: Path) -> None:
    run_ranks(2, with_gloo_groups, str(tmp_path))


def options_that_arrive() -> None:
    given: dict[str, Any] = {
        "nccl_communicator_config_path": "nccl.yaml",
        "high_priority_stream_groups": ["dp_cp", "ep_dp"],
    }
    make, arrived = parallel_state.initialize_model_parallel, dict[str, Any]()

    def make_without(**options: Any) -> None:
        arrived.update({name: options.pop(name) for name in given})  # on gloo there is nothing to set
        make(**options)

    with mock.patch.object(parallel_state, "initialize_model_parallel", make_without):
        minloop.init_distributed(small_config(), seed=1, **given)
    assert arrived == given
    minloop.shutdown_distributed()


def test_options_of_nccl_arrive_in_mcore() -> None:
    run_ranks(1, options_that_arrive)


ONE_PROCESS = """
import minloop, sys, torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import mlp
config = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
for _ in range(2):
    groups = minloop.init_distributed(config, seed=1)
    minloop.build_gpt_model(config, groups, vocab_size=8, max_sequence_length=4)
    minloop.shutdown_distributed()
print(HAVE_TE, mlp.HAVE_TE, config.transformer_impl, "transformer_engine.part" in sys.modules)
try:
    minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="transformer_engine")
except ValueError as error:
    print(error)
"""
BROKEN = {
    "an empty folder": (None, "ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
    "a meta package": (
        {"__init__": "raise RuntimeError('Found empty meta package\\nSee')"},
        "Found empty meta package",
    ),
    "a library that does not fit": (
        {
            "__init__": "from . import part\n__version__ = '2.19.0'",
            "part": "",
            "pytorch": "raise ImportError('undefined symbol: abc')",
        },
        "ImportError: undefined symbol: abc",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_transformer_engine_that_cannot_be_used_is_named_and_passed_over(case: str, tmp_path: Path) -> None:
    files, reason = BROKEN[case]
    if files is None and find_spec("transformer_engine"):
        pytest.skip("the package that is installed comes before a folder without __init__.py")
    folder = tmp_path / "transformer_engine"
    folder.mkdir()
    for name, content in (files or {}).items():
        (folder / f"{name}.py").write_text(content)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), environment.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", ONE_PROCESS], env=environment, capture_output=True, text=True)
    first, refusal, *_ = done.stdout.splitlines() or [done.stderr, ""]
    assert first == "False False local False"
    said = f"the package transformer_engine in {folder} cannot be used ("
    assert f"transformer_impl='transformer_engine' but {said}" in refusal
    (line,) = [line for line in done.stderr.splitlines() if said in line]
    assert reason in line
    assert "pip uninstall transformer-engine, or remove that folder, or pip install transformer-engine[pytorch]" in line
