"""Saves that lose nothing: in the background, under kill -9, on a full disk, beside another run; and what is kept."""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from ranks import RankError, run_ranks
from small import small_config, small_state, text_loader, train

import minloop
from minloop import disk
from minloop.checkpoint import directory as tree
from minloop.checkpoint import writing
from minloop.checkpoint.commit import Retention
from minloop.checkpoint.integrity import verify_checkpoint

KILLS = int(os.environ.get("MINLOOP_KILLS", "6"))
LAYOUT: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2}


@contextlib.contextmanager
def writers_do(before: Callable[[], object] = int, after: Callable[[], object] = int) -> Generator[None]:
    """While inside, the threads that write files call these, each around each file."""
    write = writing._write

    def wrapper(*args: Any) -> Any:
        before()
        answer = write(*args)
        after()
        return answer

    with mock.patch.object(writing, "_write", wrapper):
        yield


def train_while_saving(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    state = small_state(**LAYOUT, **options)
    loader = text_loader(state)
    train(state, loader, 3)
    with mock.patch.object(DistributedOptimizer, "get_parameter_state_dp_zero", side_effect=NotImplementedError):
        minloop.save_checkpoint(f"{directory}/at once", state, loader)  # without mcore's gather of the whole state
    go_on = threading.Event()
    with writers_do(before=go_on.wait):
        pending = minloop.start_save(f"{directory}/behind", state, loader)
        train(state, loader, 2)
        early = pending.done(), minloop.latest_checkpoint(f"{directory}/behind")
        room = writing._kept[0]
        threading.Timer(0.3, go_on.set).start()
        second = minloop.start_save(f"{directory}/behind", state, loader)  # waits for the first
    assert writing._kept == [room]  # memory is made once
    waited = pending.done(), str(minloop.latest_checkpoint(f"{directory}/behind"))
    minloop.shutdown_distributed()  # waits for the second
    return {"early": early, "waited": waited, "second": second.done(), "latest": second.wait() == second.directory}


def contents(paths: list[str]) -> list[dict[str, Any]]:
    minloop.init_distributed(minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1), seed=1)
    found: list[dict[str, Any]] = []
    for path in paths:
        common = dist_checkpointing.load_common_state_dict(path)
        found.append({**dist_checkpointing.load_plain_tensors(path), "common": json.dumps(common, default=str)})
    minloop.shutdown_distributed()
    return found


@pytest.mark.parametrize("options", [{}, {"bf16": True, "ddp": {"use_distributed_optimizer": True}}], ids=str)
def test_a_save_behind_training_holds_the_moment_of_the_call(tmp_path: Path, options: dict[str, Any]) -> None:
    for answers in run_ranks(2, train_while_saving, str(tmp_path), options):
        assert answers["early"] == (False, None)
        assert answers["waited"] == (True, str(tmp_path / "behind" / "iter_0000003"))
        assert answers["second"]
        assert answers["latest"]
    assert minloop.latest_checkpoint(tmp_path / "behind") == tmp_path / "behind" / "iter_0000005"
    paths = [str(tmp_path / folder / "iter_0000003") for folder in ("at once", "behind")]
    ((at_once, behind),) = run_ranks(1, contents, paths)
    assert at_once.keys() == behind.keys()
    assert len(at_once) > 50
    for key, value in at_once.items():
        assert torch.equal(value, behind[key]) if torch.is_tensor(value) else value == behind[key], key


def save_weights_behind(directory: str) -> list[str]:
    state = small_state(**LAYOUT, ddp={"use_distributed_optimizer": True})
    loader = text_loader(state)
    train(state, loader, 1)
    pending = minloop.start_save(directory, state, loader, weights_only=True)
    whole = minloop.save_checkpoint(f"{directory}/whole", state, loader)
    train(state, loader, 1)
    other = small_state(seed=9, **LAYOUT)
    minloop.load_checkpoint(pending.wait(), other, weights_only=True)
    (weights, all_of_it) = (minloop.describe_checkpoint(path) for path in (pending.directory, whole))
    assert not weights.optimizer
    assert all_of_it.optimizer
    assert weights.weights == all_of_it.weights
    found = [weights_of(other)]
    minloop.load_checkpoint(whole, other, weights_only=True)
    minloop.shutdown_distributed()
    return [*found, weights_of(other)]


def test_weights_alone_are_saved_behind_training(tmp_path: Path) -> None:
    for behind, at_once in run_ranks(2, save_weights_behind, str(tmp_path)):
        assert behind == at_once


def failure_of(save: Callable[[], object]) -> str:
    try:
        save()
    except RuntimeError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def full_disk() -> Generator[None]:
    """On rank 1 a file cannot grow beyond 20 kB while inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(directory: str) -> Generator[None]:
    """While inside, this process is a user who may not write into `directory`."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    else:
        Path(directory).chmod(0o500)
    try:
        yield
    finally:
        os.seteuid(user) if user == 0 else Path(directory).chmod(0o700)


def save_in_trouble(directory: str) -> list[str]:
    state = small_state()
    first = minloop.save_checkpoint(directory, state)
    state.iteration = 1
    removed = Path(directory, "iter_0000001.unfinished")

    def save() -> object:
        return minloop.save_checkpoint(directory, state)

    def remove() -> None:
        shutil.rmtree(removed, ignore_errors=True)

    with full_disk():
        failures = [failure_of(save), failure_of(minloop.start_save(directory, state).wait)]
    said: list[logging.LogRecord] = []
    logger = logging.getLogger("minloop")
    logger.addFilter(lambda record: said.append(record) or True)
    with full_disk():
        unasked = minloop.start_save(directory, state)
        while not unasked.done():
            pass
    assert [record.levelname for record in said] == ["ERROR"] * (dist.get_rank() == 0)  # though nobody has asked
    assert all("iter_0000001 was not saved: on rank 1: OSError" in record.getMessage() for record in said)
    failures.append(failure_of(save))
    with writers_do(before=remove):
        failures.append(failure_of(save))
    with writers_do(after=remove):
        failures.append(failure_of(save))
    with read_only(directory):
        failures.append(failure_of(save))
    dist.barrier()
    names = sorted(path.name for path in Path(directory).iterdir())
    assert names == [".lock", "iter_0000000", tree.TRACKER], names
    assert minloop.latest_checkpoint(directory) == first
    dist.barrier()
    save()
    minloop.shutdown_distributed()
    return failures


def test_a_failed_save_is_one_error_on_every_rank_and_loses_nothing() -> None:
    with tempfile.TemporaryDirectory() as directory:  # tmp_path lies where other users may not look
        Path(directory).chmod(0o755)
        failures, others = run_ranks(2, save_in_trouble, directory)
        assert minloop.latest_checkpoint(directory) == Path(directory, "iter_0000001")
    assert failures == others
    now, behind, unasked, before, after, denied = failures
    assert now.startswith("on rank 1: OSError: [Errno 27] File too large"), now
    assert "iter_0000001 was not saved: on rank 1: OSError: [Errno 27] File too large" in behind
    assert unasked == behind
    assert "No such file or directory" in before
    assert "iter_0000001.unfinished" in before
    assert "removed" in after or "No such file" in after, after
    assert "on rank 0: PermissionError: [Errno 13] Permission denied" in denied


def gloo_threads() -> int:
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # one that has just ended
            count += "gloo" in name.read_text()
    return count


def check_gloo_threads(expected: int) -> None:
    """End the process with 3 if there are more; one that was joined may be listed a little longer."""
    deadline = time.monotonic() + 5
    while gloo_threads() > expected:
        if time.monotonic() > deadline:
            os._exit(3)


def end_as_programs_do(directory: str, how: str) -> int:
    """In a child of this rank: begin a save, and let the interpreter end; its exit code."""
    if (child := os.fork()) == 0:
        state = small_state(**LAYOUT)
        atexit.register(check_gloo_threads, gloo_threads())  # runs after what the save registers
        failing = writers_do(before=lambda: 1 / 0) if how == "failed" else contextlib.nullcontext()
        with failing:
            pending = minloop.start_save(directory, state)
            if how == "waited for":
                pending.wait()
            elif how == "failed":
                failure_of(pending.wait)
        ctypes.pythonapi.Py_Exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("how", ["unasked", "waited for", "failed"])
def test_a_program_that_ends_without_shutdown_ends_after_its_save_and_gloos_threads(tmp_path: Path, how: str) -> None:
    assert run_ranks(2, end_as_programs_do, str(tmp_path), how) == [0, 0]
    assert (minloop.latest_checkpoint(tmp_path) is None) == (how == "failed")


def save_into(directory: str) -> None:
    minloop.save_checkpoint(directory, small_state(**LAYOUT))
    minloop.shutdown_distributed()


def save_and_die(directory: str) -> None:
    minloop.save_checkpoint(directory, small_state(**LAYOUT))
    os.kill(os.getpid(), signal.SIGKILL)


def start_in(directory: str) -> None:
    minloop.init_distributed(small_config(**LAYOUT), seed=1)
    minloop.shared_directory(directory)
    minloop.shutdown_distributed()


def free_after_shutdown(directory: str) -> tuple[bool, bool]:
    start_in(directory)
    assert can_lock(directory)
    minloop.save_checkpoint(directory, small_state(**LAYOUT))
    during = can_lock(directory)
    minloop.shutdown_distributed()
    return during, can_lock(directory)


def can_lock(directory: str) -> bool:
    """Whether another process can take the lock on `directory`."""
    script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", script, f"{directory}/{disk.LOCK}"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_two_runs_do_not_save_into_one_directory(tmp_path: Path) -> None:
    with (tmp_path / disk.LOCK).open("w") as held:
        held.write("process 7 on node13")
        held.flush()
        fcntl.lockf(held, fcntl.LOCK_EX)
        for attempt in (start_in, save_into):
            match = r"another run writes into .*: process 7 on node13 holds its lock"
            with pytest.raises(RankError, match=match) as error:
                run_ranks(2, attempt, str(tmp_path))
            assert "rank 0 failed" in str(error.value)
            assert "rank 1 failed" in str(error.value)
    with pytest.raises(RankError, match="exit code -9"):  # the lock's file still names process 7
        run_ranks(1, save_and_die, str(tmp_path))
    assert run_ranks(1, free_after_shutdown, str(tmp_path)) == [(False, True)]


def removed_meanwhile(directory: str) -> tuple[str, str]:
    state = small_state(**LAYOUT)
    assert minloop.shared_directory(directory) == minloop.shared_directory(directory)
    minloop.save_checkpoint(directory, state)
    dist.barrier()
    if dist.get_rank() == 0:
        assert not can_lock(directory)
        shutil.rmtree(directory)
    failures = [failure_of(lambda: minloop.save_checkpoint(directory, state)) for _ in range(2)]
    assert not Path(directory).exists()
    minloop.shutdown_distributed()
    return failures[0], failures[1]


def test_a_run_is_told_that_its_checkpoints_were_removed(tmp_path: Path) -> None:
    for failures in run_ranks(2, removed_meanwhile, str(tmp_path / "run")):
        assert all("/run was removed or replaced while this run used it" in failure for failure in failures), failures


def keep(directory: str) -> list[list[str]]:
    state = small_state(**LAYOUT)
    names: list[list[str]] = []
    for iteration in (4, 5, 6, 7, 8, 9, 7):
        state.iteration = iteration
        minloop.save_checkpoint(directory, state, keep_newest=2, keep_every=4, checksums=iteration % 2 == 0)
        names.append([path.name.removeprefix("iter_000000") for path in sorted(Path(directory).glob("iter_*"))])
        if iteration == 5:
            minloop.load_checkpoint(directory, small_state(**LAYOUT))
    minloop.shutdown_distributed()
    return names


def test_old_checkpoints_go_when_the_new_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()  # incomplete
    names = run_ranks(1, keep, str(tmp_path))[0]
    kept = [set(name) - {"3"} for name in names]
    assert kept[0] == {"4"}
    assert kept[3] == {"4", "5", "6", "7"}  # 4 as a multiple, 5 in use
    assert kept[5] == {"4", "5", "8", "9"}
    assert kept[6] == {"4", "5", "7", "8", "9"}  # nothing later than 7 is touched
    assert all("3" in name for name in names)
    assert json.loads((tmp_path / "iter_0000008" / "integrity.json").read_text())["algorithm"] == "sha256"
    unhashed = json.loads((tmp_path / "iter_0000007" / "integrity.json").read_text())
    assert (unhashed["algorithm"], unhashed["files"]) == (None, {})
    assert {".metadata", "metadata.json", "__0_0.distcp"} <= unhashed["bytes"].keys()
    assert not verify_checkpoint(tmp_path / "iter_0000007")


@pytest.mark.parametrize("numbers", [(0, None), (None, 3), (2, 0)])
def test_retention_that_makes_no_sense_is_refused(numbers: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="keep_"):
        Retention(*numbers)


def record_syncs(directory: str) -> list[tuple[str, Any]]:
    """Save, and return in order which inodes were synced and which names were given."""
    events: list[tuple[str, Any]] = []
    state = small_state(**LAYOUT)
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def recorded(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            answer = function(*args)
            events.append((kind, os.fstat(args[0]).st_ino if kind == "sync" else Path(args[1]).name))
            return answer

        return wrapper

    with (
        mock.patch.object(os, "fsync", recorded("sync", fsync)),
        mock.patch.object(os, "rename", recorded("name", rename)),
        mock.patch.object(os, "replace", recorded("name", replace)),
    ):
        minloop.save_checkpoint(directory, state)
    minloop.shutdown_distributed()
    return events


def test_all_is_on_the_disk_before_it_has_a_name(tmp_path: Path) -> None:
    events = run_ranks(1, record_syncs, str(tmp_path))[0]
    named = events.index(("name", "iter_0000000"))
    tracked = events.index(("name", tree.TRACKER))
    checkpoint = tmp_path / "iter_0000000"
    assert {path.stat().st_ino for path in [checkpoint, *checkpoint.iterdir()]} <= {x for _, x in events[:named]}
    assert ("sync", tmp_path.stat().st_ino) in events[named:tracked]
    assert events[-1] == ("sync", tmp_path.stat().st_ino)


def weights_of(state: minloop.TrainState) -> str:
    with minloop.gathered_parameters(state.chunks):
        weights = [p.detach().cpu().numpy().tobytes() for chunk in state.chunks for p in chunk.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def save_until_killed(directory: str, notes: str, delay: float, victims: list[int]) -> None:
    """Train and save, by turns at once and in the background, until `victims` are killed from outside."""
    state = small_state(**LAYOUT, ddp={"use_distributed_optimizer": True})
    loader = text_loader(state)
    mine = Path(f"{notes}/weights-{dist.get_rank()}")
    if minloop.latest_checkpoint(directory):
        minloop.load_checkpoint(directory, state, loader)
        saved = dict(line.split() for line in mine.read_text().splitlines())
        assert saved[str(state.iteration)] == weights_of(state), f"iteration {state.iteration} came back changed"
    train(state, loader, 1)  # slower than the next ones
    if dist.get_rank() in victims:
        subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -9 {os.getpid()}"])
    with mine.open("a") as weights, Path(notes, "committed").open("a") as committed:
        while True:
            train(state, loader, 1)
            print(state.iteration, weights_of(state), file=weights, flush=True)
            pending = minloop.start_save(directory, state, loader, keep_newest=3) if state.iteration % 2 else None
            if pending is None:
                minloop.save_checkpoint(directory, state, loader, keep_newest=3)
            else:
                train(state, loader, 1)
                print(state.iteration, weights_of(state), file=weights, flush=True)
                pending.wait()
            if dist.get_rank() == 0:
                print(state.iteration - (pending is not None), file=committed, flush=True)


def test_killed_at_random_no_checkpoint_is_lost(tmp_path: Path) -> None:
    """MINLOOP_KILLS=200 does it more often."""
    committed: list[int] = []
    checkpoints, notes = tmp_path / "checkpoints", tmp_path / "notes"
    notes.mkdir()
    for kill in range(KILLS):
        victims = [[0], [1], [0, 1]][kill % 3]
        delay = random.uniform(0.0, 1.0)
        with pytest.raises(RankError, match="exit code -9"):
            run_ranks(2, save_until_killed, str(checkpoints), str(notes), delay, victims)
        committed = [int(line) for line in (notes / "committed").read_text().split()]
        complete = tree.complete_checkpoints(checkpoints)
        newest = minloop.latest_checkpoint(checkpoints)
        assert len(complete) >= min(3, len(committed))
        for path in complete.values():
            assert not verify_checkpoint(path)
        if committed:
            assert newest is not None
            assert int(newest.name[5:12]) >= committed[-1]
        print(f"kill {kill} of ranks {victims} after {delay:.2f} s: {newest}, {len(committed)} committed")
    assert committed
