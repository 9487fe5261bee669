"""What holds for all tests: the server of ranks is started once, and a test leaves the pytest process clean.

On a machine with a GPU the same tests train there, with Transformer Engine if it is installed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import REPEATABLE, place, start_server

if torch.cuda.is_available():  # tests compare runs bit by bit, and products in float32 with those of float64
    os.environ |= REPEATABLE | {"NVIDIA_TF32_OVERRIDE": "0"} | os.environ


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Share all tests among a few processes; run those of named files here, where ``-s`` and debuggers work.

    A few, as every process has its own server, and up to eight ranks at a time. One GPU is not to be shared.
    """
    chosen = config.option.keyword or not all(Path(argument).is_dir() for argument in config.args)
    return 0 if chosen or torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks(request: pytest.FixtureRequest) -> None:
    """Let the server's imports run beside the first tests."""
    if any(hasattr(getattr(item, "module", None), "run_ranks") for item in request.session.items):
        start_server()


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test starts sees no GPU, and, but for ranks, which have imported it already, no Transformer Engine."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "transformer_engine.py").write_text("raise ModuleNotFoundError")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


SHARE = """
import os
if number := os.environ.get("LOCAL_RANK"):
    os.environ |= {places}[int(number)]
"""


@pytest.fixture
def shared_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let torchrun's ranks share GPUs of which there are fewer, as those of `run_ranks` do."""
    if gpus := torch.cuda.device_count():
        folder = tmp_path_factory.mktemp("site")  # Python imports this module as it starts
        places = [place(number, gpus) for number in range(8)]
        (folder / "sitecustomize.py").write_text(SHARE.format(places=places))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """After each test no default process group is left, nor is torch still patched for running mcore without a GPU.

    Gone is also what mcore's GPTModel sets: the next one, with another `attention_backend`, would refuse it.
    """
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)
    initialised = torch.distributed.is_initialized()
    if initialised:
        torch.distributed.destroy_process_group()  # the tests that follow are not at fault
    assert not initialised, "the test left the default process group initialised"
    assert isinstance(torch.Tensor.is_cuda, types.GetSetDescriptorType), "the test left torch.Tensor patched"
