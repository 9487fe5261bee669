"""Who a process is by its launcher's environment, torchrun's or srun's; and what a launcher can set against faults."""

import os
import socket
from datetime import timedelta
from unittest import mock

import pytest
from ranks import run_ranks
from small import small_config, small_state, text_loader, train

import minloop
from minloop import distributed, launch
from minloop.launch import LAUNCH_VARIABLES, Launch, find_launch, first_host

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login",
    "SLURM_JOB_ID": "123456",
}


def test_who_a_process_is(caplog: pytest.LogCaptureFixture) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    assert find_launch({}) is None
    assert find_launch(SRUN) == Launch(5, 16, 1, "gpu07", 20_000 + 123456 * 8 % 10_000)
    assert find_launch(SRUN | torchrun) == Launch(3, 4, 1, "::1", 29500)  # torchrun under srun
    assert find_launch(SRUN | {"MASTER_ADDR": "n", "MASTER_PORT": "9"}) == Launch(5, 16, 1, "n", 9)
    assert find_launch(SRUN | {"CUDA_VISIBLE_DEVICES": "3"}) == find_launch(SRUN | {"SLURM_LOCALID": "0"})
    assert find_launch(SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    with pytest.raises(RuntimeError, match="has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        find_launch({"RANK": "0"})
    with pytest.raises(RuntimeError, match="neither SLURM_JOB_NODELIST nor MASTER_ADDR names"):
        find_launch(SRUN | {"SLURM_JOB_NODELIST": ""})
    for wrong in ({"SLURM_PROCID": "16"}, {"SLURM_NTASKS": "4(x2)"}, torchrun | {"RANK": "4"}, torchrun | {"RANK": ""}):
        with pytest.raises(RuntimeError, match=r"SLURM_PROCID is 16|SLURM_NTASKS is '4|RANK is 4 and|RANK is '', and"):
            find_launch(SRUN | wrong)
    assert find_launch({"SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "gpu07"}) is None  # a batch script's own shell
    for half in ({"SLURM_PROCID": "1"}, {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu07"}):
        with pytest.raises(RuntimeError, match="but not SLURM_NTASKS: this process would train alone"):
            find_launch(half)
    assert find_launch({"SLURM_NTASKS": "2"}) is None
    assert "SLURM_NTASKS is 2 but there is no SLURM_PROCID" in caplog.text
    lists = {"a,b": "a", "r[1-2]n[03-04]": "r1n03", "n[1,3]-ib,x": "n1-ib", "node1": "node1"}
    assert {text: first_host(text) for text in lists} == lists


def test_a_process_alone_keeps_the_gpu_that_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[int] = []

    def claim(number: int) -> None:
        raise InterruptedError(claimed.append(number))

    monkeypatch.setattr(distributed, "claim_gpu", claim)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    for name in (*LAUNCH_VARIABLES, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for local_rank in ({}, {"LOCAL_RANK": "1"}):
        with mock.patch.dict(os.environ, local_rank), pytest.raises(InterruptedError):
            minloop.init_distributed(small_config(), seed=1)
    assert claimed == [3, 1]


def train_as_srun_starts_it() -> tuple[list[str], list[tuple[float, float]]]:
    """The ranks' own variables are torchrun's: exchange them for srun's."""
    torchrun = {name: os.environ.pop(name) for name in (*LAUNCH_VARIABLES, "LOCAL_RANK")}
    os.environ["MASTER_PORT"] = torchrun["MASTER_PORT"]  # free on this machine
    os.environ |= {"SLURM_PROCID": torchrun["RANK"], "SLURM_NTASKS": "2", "SLURM_LOCALID": torchrun["LOCAL_RANK"]}
    os.environ["SLURM_JOB_NODELIST"] = "localhost,node[2-3]"
    state = small_state(tensor_model_parallel_size=2)
    losses = train(state, text_loader(state), 2)
    return sorted(os.environ.keys() & torchrun.keys()), losses


def train_as_torchrun_starts_it() -> list[tuple[float, float]]:
    state = small_state(tensor_model_parallel_size=2)
    return train(state, text_loader(state), 2)


def test_srun_starts_what_torchrun_does() -> None:
    expected = run_ranks(2, train_as_torchrun_starts_it)[0]
    assert run_ranks(2, train_as_srun_starts_it) == [(["MASTER_PORT"], expected)] * 2


def test_a_port_that_another_program_holds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(RuntimeError, match=r"met no others at MASTER"):
        launch.meet(Launch(1, 2, 1, "127.0.0.1", other.getsockname()[1]), timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 met no others at MASTER_ADDR nowhere.invalid, MASTER_PORT 7 "):
        launch.meet(Launch(1, 2, 1, "nowhere.invalid", 7), timedelta(seconds=0.5))


def test_what_nccl_is_told() -> None:
    environment = minloop.fault_environment("/traces", timeout=timedelta(minutes=5))
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == "/traces/nccl_trace_rank_"
    assert environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "360"
