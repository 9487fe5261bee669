"""Logs: records under Megatron-LM's names, where they go, what a resumed run makes of them, and what is timed."""

import gc
import json
import logging
import math
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from small import SEQUENCE_LENGTH, small_state, text_loader, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import minloop
from minloop import timing

RECORD: dict[str, float] = {
    "iteration": 3, "consumed-samples": 24, "learning-rate": 1e-3, "batch-size": 8, "num-tokens": 240.0,
    "lm loss": 5.25, "loss-scale": 1.0, "grad-norm": 2.5, "skipped-iterations": 0, "iteration-time": 0.25,
    "throughput": 312.5,
}  # fmt: skip


def record(iteration: int, loss: float = 5.25) -> dict[str, float]:
    return RECORD | {"iteration": iteration, "consumed-samples": 8 * iteration, "lm loss": loss}


def test_the_line_is_megatron_lms(caplog: pytest.LogCaptureFixture):
    lines: list[str] = []
    minloop.console_sink(train_iters=9, write=lines.append)(RECORD)
    date, line = lines[0].split("] ")
    assert date.startswith(" [20")
    assert line == (
        "iteration        3/       9 | consumed samples:           24 | elapsed time per iteration (ms): 250.0 | "
        "throughput per GPU (TFLOP/s/GPU): 312.5 | learning rate: 1.000000E-03 | global batch size:     8 | "
        "lm loss: 5.250000E+00 | loss scale: 1.0 | grad norm: 2.500 | number of skipped iterations:   0 |"
    )
    with caplog.at_level(logging.INFO):
        write = logging.getLogger("run").info
        minloop.console_sink(train_iters=9, write=write)({"iteration": 3, "lm loss validation-a": 5.0})
        minloop.console_sink(train_iters=9, write=write)({"iteration": 3, "slowest": 2.0})
    minloop.console_sink(train_samples=99, write=lines.append)(RECORD)
    assert "] iteration        3 | consumed samples:           24/          99 | elapsed" in lines[1]
    assert caplog.messages == [
        " validation loss at iteration        3 | lm loss validation-a: 5.000000E+00 |",
        " iteration        3 | slowest: 2.000000E+00 |",
    ]


def test_a_resumed_run_logs_every_iteration_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "logs" / "run.jsonl"
    first = minloop.jsonl_sink(path)
    for iteration in range(1, 5):
        first(record(iteration, loss=math.nan if iteration == 4 else 5.0))
    with path.open("a") as file:
        file.write('{"iteration": 5, "lm')  # killed while writing
    second = minloop.jsonl_sink(path, iteration=2)
    second(record(3) | {"lm loss": torch.tensor(4.0)})  # pyright: ignore[reportArgumentType]  # easily done
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["iteration"], r["lm loss"]) for r in records] == [(1, 5.0), (2, 5.0), (3, 4.0)]
    assert all(r["time"] > 1.7e9 for r in records)
    superseded = path.with_name("run.jsonl.superseded").read_text().splitlines()
    assert [json.loads(line)["lm loss"] for line in superseded[:2]] == [5.0, None]
    assert superseded[2:] == ['{"iteration": 5, "lm']

    monkeypatch.chdir(tmp_path)
    elsewhere = minloop.jsonl_sink("here.jsonl")
    monkeypatch.chdir("/")
    elsewhere(RECORD)
    assert (tmp_path / "here.jsonl").exists()

    foreign = tmp_path / "foreign"
    foreign.write_text("a diary\n")
    with pytest.raises(ValueError, match="foreign, line 1 is no record"):
        minloop.jsonl_sink(foreign)
    assert foreign.read_text() == "a diary\n"


def test_a_broken_line_ends_neither_this_start_nor_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "run.jsonl"
    sink = minloop.jsonl_sink(path)
    sink(record(1))
    with pytest.raises(ValueError, match=r"has no finite 'iteration'"):
        sink({"lm loss": 5.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            sink(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink(record(2))
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]

    path.write_text(lines[0] + lines[0][:40] + lines[1] + lines[1] + '{"lm loss": 5.0}\n' + "\0\n" + lines[1][:9])
    minloop.jsonl_sink(path, iteration=2)
    assert path.read_text() == lines[0] + lines[1]
    superseded = path.with_name("run.jsonl.superseded").read_text()
    assert superseded == lines[0][:40] + lines[1] + '{"lm loss": 5.0}\n' + "\0\n" + lines[1][:9] + "\n"
    assert caplog.messages == [f"{path}, line 2, 4, 5: no record with an iteration, moved to run.jsonl.superseded"]


def test_two_runs_do_not_log_to_one_file(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    sinks = [minloop.jsonl_sink(path)]
    sinks[0](record(3))
    hold = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    hold += "print('process 7', file=file, flush=True); print('held', flush=True); input()"
    command = [sys.executable, "-c", hold, f"{path}.lock"]
    assert subprocess.run(command, capture_output=True).returncode == 1
    sinks.append(minloop.jsonl_sink(path, iteration=3))  # the same run, which went back
    sinks.pop(0)
    assert path.open().read()
    assert subprocess.run(command, capture_output=True).returncode == 1
    sinks.clear()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=r"another run writes into .*run\.jsonl: process 7"):
            minloop.jsonl_sink(path)
        assert len(path.read_text().splitlines()) == 1
        other.communicate("\n")
    minloop.jsonl_sink(path)(record(1))


def test_tensorboard_has_megatron_lms_tags(tmp_path: Path):
    sink = minloop.tensorboard_sink(tmp_path)
    sink(record(1))
    sink(record(2, loss=5.0) | {"lm loss validation-a": 4.5})
    events = EventAccumulator(str(tmp_path)).Reload()  # while the run goes on
    per_sample = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "skipped-iterations",
                  "lm loss validation-a"}  # fmt: skip
    expected = per_sample | {f"{name} vs samples" for name in per_sample} | {"iteration-time", "throughput"}
    tags: Any = events.Tags()["scalars"]
    assert set(tags) == expected
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(1, 5.25), (2, 5.0)]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [8, 16]
    missing = mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None})
    with missing, pytest.raises(RuntimeError, match=r"pip install minloop\[logs\]"):
        minloop.tensorboard_sink(tmp_path)


@pytest.mark.parametrize("value", ["0.5", None])
def test_what_is_no_number_is_refused_by_its_name(tmp_path: Path, value: Any):
    sinks = [minloop.console_sink(), minloop.jsonl_sink(tmp_path / "log"), minloop.tensorboard_sink(tmp_path)]
    for name, sink in zip(("console_sink", "jsonl_sink", "tensorboard_sink"), sinks, strict=True):
        with pytest.raises(ValueError, match=f"{name}: 'mine' of the record is {value!r}"):
            sink(RECORD | {"mine": value})
    with pytest.raises(ValueError, match=r"wandb_sink\(.*\): give it the run that wandb.init"):
        minloop.wandb_sink(value)


def test_weights_and_biases_gets_the_iteration_as_step():
    run = mock.Mock()
    minloop.wandb_sink(run)(RECORD)
    values, step = run.log.call_args.args[0], run.log.call_args.kwargs["step"]
    assert step == 3
    assert values == {name: value for name, value in RECORD.items() if name != "iteration"}


def test_a_bar_is_drawn_on_a_terminal_only(capsys: pytest.CaptureFixture[str]):
    for terminal in (False, True):
        stderr = mock.patch.object(sys.stderr, "isatty", return_value=terminal)
        with stderr, minloop.progress_bar(train_iters=9) as sink:
            sink(RECORD)
        said = capsys.readouterr().err
        assert ("3/9" in said and "lm loss 5.25" in said) if terminal else not said
        with stderr, minloop.progress_bar(train_samples=99) as sink:
            sink(RECORD)
        assert ("24/99" in capsys.readouterr().err) is terminal


def timed() -> tuple[dict[str, float], dict[str, float], int]:
    state = small_state(tensor_model_parallel_size=2)
    loader = text_loader(state)
    train(state, loader, 1)  # in which a GPU loads kernels
    timer = minloop.StepTimer(state, sequence_length=SEQUENCE_LENGTH, flops_per_token=1e6, peak_tflops=2.0)
    with pytest.raises(RuntimeError, match="no step was taken"):
        timer.lap()
    with mock.patch.object(timing, "from_all_ranks", wraps=timing.from_all_ranks) as gather:
        train(state, loader, 2)
        calls = gather.call_count
        with timer.paused():
            timing.time.sleep(1.0)
        lap = timer.lap()
    train(state, loader, 1)
    metrics = minloop.train_step(state, loader, num_microbatches=4, empty_unused_memory_level=2)
    step = minloop.step_record(state, metrics)
    assert step["lm loss"] == metrics.loss.item()
    assert metrics.grad_norm is not None
    assert step["grad-norm"] == metrics.grad_norm.item()
    assert (step["iteration"], step["consumed-samples"], step["num-tokens"]) == (5, 40, metrics.num_tokens.item())
    minloop.shutdown_distributed()
    return lap, step, calls


def test_time_is_that_of_the_steps_between_laps():
    (lap, step, calls), (other, _, _) = run_ranks(2, timed)
    assert calls == 0, "a step that is not logged gathers nothing"
    assert lap == other
    assert 0 < lap["iteration-time min"] <= lap["iteration-time median"] <= lap["iteration-time max"]
    assert lap["iteration-time"] == lap["iteration-time max"] < 0.5, "the pause counted"
    assert lap["tokens-per-second"] == pytest.approx(8 * SEQUENCE_LENGTH / lap["iteration-time"])
    assert lap["tokens-per-second/gpu"] == lap["tokens-per-second"] / 2
    assert lap["throughput"] == pytest.approx(lap["tokens-per-second/gpu"] * 1e6 / 1e12)
    assert lap["mfu"] == lap["throughput"] / 2
    assert lap["mem-rss-bytes"] > 2**27
    assert torch.cuda.is_available() or "power/gpu" not in lap
    assert " | lm loss: " in minloop.record_line(step | lap, train_iters=9)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_inside_alone(enabled: bool):
    try:
        (gc.enable if enabled else gc.disable)()
        with minloop.manual_gc():
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0
        with pytest.raises(KeyError), minloop.manual_gc():
            raise KeyError
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def what_a_step_does() -> list[list[str]]:
    """In which order a step updates and empties torch's cache, at each level; 0 is the default."""
    state = small_state()
    loader, found = text_loader(state), list[list[str]]()
    options: list[dict[str, Any]] = [{}, *({"empty_unused_memory_level": level} for level in (0, 1, 2))]
    step = state.optimizer.step
    for option in options:
        done: list[str] = []

        def updating(done: list[str] = done) -> Any:
            done.append("update")
            return step()

        empty = mock.patch.object(torch.cuda, "empty_cache", side_effect=lambda done=done: done.append("empty"))
        with empty, mock.patch.object(state.optimizer, "step", updating):
            minloop.train_step(state, loader, num_microbatches=4, **option)
        found.append(done)
    minloop.shutdown_distributed()
    return found


def test_unused_memory_is_given_back_where_the_level_says():
    (found,) = run_ranks(1, what_a_step_does)
    assert found == [["update"], ["update"], ["empty", "update"], ["empty", "update", "empty"]]


def test_energy_is_what_nvml_counts():
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit = OSError, lambda: None
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-12-ab": 7}.__getitem__
    nvml.nvmlDeviceGetTotalEnergyConsumption = {7: 4500}.__getitem__
    with (
        mock.patch.dict(sys.modules, {"pynvml": nvml}),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(uuid="12-ab")),
    ):
        assert timing._energy_meter()() == 4.5
        nvml.nvmlDeviceGetTotalEnergyConsumption = mock.Mock(side_effect=OSError("not supported"))
        assert timing._energy_meter()() == 0.0
