"""README's commands and every example run, shortened, as a user would start them."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankError, run_ranks
from small import WIDE, rounding, small_config

import minloop

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def call_main(example: str, options: dict[str, Any]) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(example).main(**options)


def torchrun(ranks: int, script: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("shared_gpus")
def test_the_main_command(tmp_path: Path) -> None:
    output = torchrun(2, ROOT / "examples" / "train.py", tmp_path).splitlines()
    losses = [float(match[1]) for line in output if (match := re.search(r"lm loss: (\S+)", line))]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert all(re.match(r" \[.*\] iteration +\d+/ +10 \| consumed samples: ", line) for line in output[:10])
    assert output[-1].startswith("saved ")
    assert output[-1].endswith("checkpoints/train/iter_0000010; loaded into a model of another seed: weights equal")


def run_script(script: str) -> None:
    runpy.run_path(script, run_name="__main__")


@pytest.mark.usefixtures("shared_gpus")
def test_readmes_loop_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop,) = re.findall(r"```python\n(import minloop\n.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(loop.splitlines()) <= 40
    script = tmp_path / "my_train.py"
    script.write_text(loop.replace("while state.iteration < 10", "while state.iteration < 4"))
    assert [line.split()[0] for line in torchrun(2, script, tmp_path).splitlines()] == ["1", "2", "3", "4"]
    script.write_text(loop.replace("while state.iteration < 10", "while state.iteration < 6"))
    monkeypatch.chdir(tmp_path)
    run_ranks(2, run_script, str(script))
    assert re.findall(r"^(\d+) \d\.\d+$", capsys.readouterr().out, flags=re.MULTILINE) == ["5", "6"]


def test_readme_names_every_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in EXAMPLES if f"(examples/{name}.py)" not in readme] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_link_of_the_pages_exists(page: str) -> None:
    links = re.findall(r"\]\(((?!http)[^)]+)\)", (ROOT / page).read_text())
    assert len(links) > 3 or page != "README.md"
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 2}])
def test_pretraining_example_goes_from_files_to_text(layout: dict[str, int], tmp_path: Path) -> None:
    options = {"train_iters": 30, "num_files": 100, "vocab_size": 512, "directory": str(tmp_path), **layout}
    for before, after in run_ranks(2, call_main, "pretrain_text", options):
        assert 3.5 < before < 6.5
        assert after < 0.8 * before


def test_resharding_example_agrees(tmp_path: Path) -> None:
    losses = run_ranks(4, call_main, "reshard", {"train_iters": 2, "directory": str(tmp_path)})[0]
    assert len(losses) == 5
    assert max(losses.values()) - min(losses.values()) < rounding(1e-5)


def test_hugging_face_example_agrees_both_ways(tmp_path: Path) -> None:
    differences = run_ranks(2, call_main, "hf_weights", {"directory": str(tmp_path / "hf")})[0]
    assert len(differences) == 2
    assert max(differences.values()) < rounding(1e-5)


def test_layouts_example_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(2, run_script, str(ROOT / "examples" / "compare_layouts.py"))
    output = capsys.readouterr().out
    assert "58 outputs, losses and gradients compared" in output
    assert "the layouts train the same model" in output


def test_layouts_example_names_the_first_difference() -> None:
    first = run_ranks(2, call_main, "compare_layouts", {"tolerance": 1e-9})[0]
    assert first.what == "output of decoder.layers[0]"


GIGABYTE = 10**9
DEPLOYMENTS: dict[str, dict[str, float]] = {
    "llama3-8b-h100": {"tp": 1, "pp": 1, "dp": 8, "count": 16, "gflops": 51.47, "parameters": 8.03e9},
    "gpt3-175b-a100": {"tp": 8, "pp": 16, "dp": 1, "count": 1536, "gflops": 1061.95, "parameters": 175.2e9},
}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployments_fit_their_machines(name: str) -> None:
    expected = DEPLOYMENTS[name]
    (plan,) = run_ranks(1, call_main, "deployments", {"name": name, "dry_run": True})
    assert (plan["data_parallel_size"], plan["num_microbatches"]) == (expected["dp"], expected["count"])
    assert plan["flops_per_token"] / 1e9 == pytest.approx(expected["gflops"], abs=0.01)
    assert len(plan["stages"]) == expected["pp"]
    assert max(memory.total for memory in plan["stages"]) < 76 * GIGABYTE  # both cards have 80; CUDA and NCCL take some
    weights = sum(memory.weights for memory in plan["stages"]) / 2  # bytes each
    assert weights * expected["tp"] == pytest.approx(expected["parameters"], rel=2e-3)


def test_a_deployment_is_described_where_it_cannot_train(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "deployments.py"), "llama3-8b-h100"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "SLURM_PROCID")}
    hidden = environment | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "128 samples a step = 16 microbatches of 1 × DP 8" in done.stdout
    assert "in bf16: there is no GPU here, for which fp8, fp8_recipe, fp8_param are set" in done.stdout


TINY: dict[str, Any] = WIDE | {
    "world_size": 2, "global_batch_size": 8, "sequence_length": 64, "vocab_size": 256, "num_layers": 2
}  # fmt: skip
SMALLER: dict[str, dict[str, Any]] = {
    "llama3-8b-h100": TINY | {"num_query_groups": 4, "recompute_num_layers": 1},
    "gpt3-175b-a100": TINY
    | {"tensor_model_parallel_size": 1, "sequence_parallel": False, "pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", SMALLER)
def test_a_small_deployment_trains(name: str) -> None:
    first, second = run_ranks(2, call_main, "deployments", {"name": name, "train_iters": 4, **SMALLER[name]})
    assert first == second
    assert len(first) == 4
    assert first == sorted(set(first), reverse=True)


def test_a_deployment_wants_its_number_of_ranks() -> None:
    with pytest.raises(RankError, match="llama3-8b-h100 is for 8 ranks, and 2 were started"):
        run_ranks(2, call_main, "deployments", {"name": "llama3-8b-h100"})
    with pytest.raises(RankError, match=r"no case 'llama': choose one of llama3-8b-h100, gpt3-175b-a100"):
        run_ranks(1, call_main, "deployments", {"name": "llama"})


GRID: dict[str, str] = {
    "tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "etp": "expt_tp", "ep": "ep", "edp": "expt_dp"
}  # fmt: skip
"""Axes of docs/layouts.md → the groups' names."""


def places() -> tuple[dict[str, int], dict[str, list[int]]]:
    """This rank's index on each axis, and the ranks of its groups, of 16."""
    experts: dict[str, Any] = {"num_moe_experts": 4, "add_bias_linear": False, "expert_model_parallel_size": 4}
    config = small_config(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=1, **experts,
    )  # fmt: skip
    groups = minloop.init_distributed(config, seed=1)
    indices = {axis: getattr(groups, name).rank() for axis, name in GRID.items()}
    ranks = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in GRID.values()}
    minloop.shutdown_distributed()
    return indices, ranks


def test_ranks_are_numbered_as_the_page_says() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text()
    found = run_ranks(16, places)
    for rank, (at, _) in enumerate(found):
        assert rank == at["tp"] + 2 * at["cp"] + 4 * at["dp"] + 8 * at["pp"]
        assert rank == at["etp"] + at["ep"] + 4 * at["edp"] + 8 * at["pp"]
    rows = [tuple(map(int, row)) for row in re.findall(r"^" + r"\| (\d+) " * 8 + r"\|$", page, flags=re.MULTILINE)]
    assert len(rows) == 6
    for rank, *indices in rows:
        assert [found[rank][0][axis] for axis in GRID] == indices
    of_13 = dict(re.findall(r"^\| [a-z ]+ \| `(\w+)` \| ([\d ]+) \|$", page, flags=re.MULTILINE))
    assert {name: [int(rank) for rank in ranks.split()] for name, ranks in of_13.items()} == found[13][1]
