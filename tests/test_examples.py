"""README's commands and every example run, shortened, as a user would start them."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small import rounding

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


@pytest.mark.usefixtures("shared_gpus")
def test_readmes_loop_runs_and_resumes(tmp_path: Path) -> None:
    (loop,) = re.findall(r"```python\n(import minloop\n.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(loop.splitlines()) <= 40
    script = tmp_path / "my_train.py"
    script.write_text(loop.replace("while state.iteration < 10", "while state.iteration < 4"))
    assert [line.split()[0] for line in torchrun(2, script, tmp_path).splitlines()] == ["1", "2", "3", "4"]
    script.write_text(loop.replace("while state.iteration < 10", "while state.iteration < 6"))
    assert [line.split()[0] for line in torchrun(2, script, tmp_path).splitlines()] == ["5", "6"]


def test_readme_names_every_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in EXAMPLES if f"(examples/{name}.py)" not in readme] == []


def test_every_link_of_the_readme_exists() -> None:
    links = re.findall(r"\]\(((?!http)[^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 3
    assert [link for link in links if not (ROOT / link).exists()] == []


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


@pytest.mark.usefixtures("shared_gpus")
def test_layouts_example_compares(tmp_path: Path) -> None:
    output = torchrun(2, ROOT / "examples" / "compare_layouts.py", tmp_path)
    assert "58 outputs, losses and gradients compared" in output
    assert "the layouts train the same model" in output


def test_layouts_example_names_the_first_difference() -> None:
    first = run_ranks(2, call_main, "compare_layouts", {"tolerance": 1e-9})[0]
    assert first.what == "output of decoder.layers[0]"
