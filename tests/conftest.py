"""What holds for all tests: the server of ranks is started once, and a test leaves the pytest process clean."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import start_server


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


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """After each test no default process group is left, nor is torch still patched for running mcore without a GPU."""
    yield
    initialised = torch.distributed.is_initialized()
    if initialised:
        torch.distributed.destroy_process_group()  # the tests that follow are not at fault
    assert not initialised, "the test left the default process group initialised"
    assert isinstance(torch.Tensor.is_cuda, types.GetSetDescriptorType), "the test left torch.Tensor patched"
