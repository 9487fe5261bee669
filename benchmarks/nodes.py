"""Do several machines train as one does, lose some of them and go on, and take them back?  examples/long_run.py, CPU.

    sudo PATH=$PATH benchmarks/nodes.sh 4

Every machine is a network namespace with a disk of its own, one rank and one torchrun; they share the directory of
checkpoints and nothing else. Half of them are lost, once by `kill -9` of all that runs there and once with the cable
cut before; the others, one of which serves the rendezvous, go on from the newest checkpoint with half the data parallel
size; the lost ones come back. What is then logged is compared with what as many ranks of one machine log from a copy of
the same checkpoints. Writes results/nodes_<number>.json.
"""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.long_run_kills import ROOT, LongRun, survive, wait_until
from benchmarks.machines import Node, Run

TRAIN_ITERS = 200
LOST_AT, BACK_AT = 25, 60  # iterations
TOLERANCE = 1e-5  # relative: another data parallel size sums gradients in another order
# With dropout, whose masks belong to a layout: losses can be compared bit for bit within one, and not between two.
OPTIONS: dict[str, Any] = {"train_iters": TRAIN_ITERS, "num_files": 40, "save_interval": 10, "timeout_in_seconds": 15}
WITHOUT_DROPOUT = OPTIONS | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
EVALUATION = """
import sys; sys.path.insert(0, {examples!r})
from pathlib import Path
import minloop, long_run
config = minloop.build_config(
    num_layers=2, hidden_size=128, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False
)
groups = minloop.init_distributed(config, seed=1)
state = long_run.build_state(config, groups, 1)
directory = minloop.shared_directory({directory!r})
minloop.load_checkpoint(directory, state, weights_only=True)
_, valid = long_run.build_text(directory, {num_files})
held_out = {{"text": minloop.build_loader(valid, groups, micro_batch_size=4)}}
found = minloop.evaluate(state, held_out, num_microbatches=minloop.num_microbatches(16, 4, groups))
print("evaluated", float(found["text"].loss).hex(), flush=True)
minloop.shutdown_distributed()
"""


def one_machine(folder: Path, ranks: int, options: dict[str, Any]) -> LongRun:
    run = LongRun(folder, ranks=ranks, **options)
    survive(run, [])
    return run


def losses(run: LongRun) -> dict[int, float]:
    return {int(record["iteration"]): record["lm loss"] for record in run.records() if "lm loss" in record}


def largest_difference(run: LongRun, other: LongRun, last: int) -> float:
    """Of a loss up to step `last`, relative."""
    ours, theirs = losses(run), losses(other)
    return max(abs(ours[step] - theirs[step]) / theirs[step] for step in range(1, last + 1))


def without_times(run: LongRun) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k != "time"} for record in run.records()]


def equal_until(run: LongRun, other: LongRun, iteration: int) -> int:
    """How many records up to `iteration` there are, all equal."""
    ours, theirs = (
        [record for record in without_times(each) if record["iteration"] <= iteration] for each in (run, other)
    )
    assert ours == theirs, next(pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1])
    return len(ours)


def undisturbed(nodes: list[Node], work: Path, alone: LongRun) -> dict[str, Any]:
    run = Run("undisturbed", nodes, work, **OPTIONS)
    run.begin(nodes)
    assert not any(run.exit_codes())
    (records, weights), (expected, weights_expected) = run.outcome(), alone.outcome()
    assert records == expected
    assert weights == weights_expected
    return {"records_equal_to_one_machine": len(records), "weights_equal": True}


def loss_and_return(
    name: str, nodes: list[Node], stay: list[Node], work: Path, alone: LongRun, *, cut_cable: bool
) -> dict[str, Any]:
    """All but the machines that `stay` are lost; one of these serves the rendezvous."""
    go = [node for node in nodes if node not in stay]
    options = {name: value for name, value in alone.options.items() if name != "directory"}
    run = Run(name, nodes, work, fewest=len(stay), host=stay[0].number, **options)
    lost, back = (LongRun(work / f"{name}-{when}", ranks=1) for when in ("lost", "back"))
    run.begin(nodes)
    wait_until(partial(run.at, LOST_AT))
    before, begin = run.alive(), time.monotonic()
    for node in go:
        node.kill(cut_cable=cut_cable)
    run.only(stay)
    run.copy_once_gone(before, lost.folder)
    seconds = {"until_survivors_end": time.monotonic() - begin}
    wait_until(partial(run.trains, without=before))
    seconds["until_survivors_train"] = time.monotonic() - begin
    wait_until(partial(run.at, BACK_AT))
    before, begin = run.alive(), time.monotonic()
    for node in go:
        node.cable("up")
    run.begin(go)
    run.copy_once_gone(before, back.folder)
    run.only(nodes)
    wait_until(partial(run.trains, without=before))
    seconds["from_the_return_until_all_train"] = time.monotonic() - begin
    assert not any(run.exit_codes()), run.exit_codes()
    return {
        **compared(run, lost, back, len(stay), alone, options),
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
        "exit_codes": run.exit_codes(),
    }


def compared(
    run: LongRun, lost: LongRun, back: LongRun, fewer: int, alone: LongRun, options: dict[str, Any]
) -> dict[str, Any]:
    """`run`, which lost and took back machines, with one machine that goes on from what there was at these moments."""
    from_loss, from_return = newest(lost.folder), newest(back.folder)
    went_on, ended = one_machine(lost.folder, fewer, options), one_machine(back.folder, run.ranks, options)
    assert run.outcome() == ended.outcome()
    result = {
        "ranks": f"{run.ranks}, {fewer} after iteration {from_loss}, {run.ranks} after iteration {from_return}",
        "records_equal_until_the_loss": equal_until(run, alone, from_loss),
        "records_equal_until_the_return": equal_until(run, went_on, from_return),
        "records_equal_in_all": len(run.records()),
        "weights_equal": True,
    }
    if options == WITHOUT_DROPOUT:
        result["largest_relative_difference_of_a_loss_to_undisturbed"] = {
            "10 steps after the loss": largest_difference(run, alone, from_loss + 10),
            "at the return": largest_difference(run, alone, from_return),
            "at the end": largest_difference(run, alone, TRAIN_ITERS),
        }
        assert largest_difference(run, alone, TRAIN_ITERS) < TOLERANCE
    return result


def newest(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def loss_of_the_rendezvous(nodes: list[Node], work: Path) -> dict[str, Any]:
    """The machine of the rendezvous is lost: the others cannot meet again, and end."""
    run = Run("rendezvous", nodes, work, fewest=1, **OPTIONS)
    run.begin(nodes)
    wait_until(partial(run.at, LOST_AT))
    begin = time.monotonic()
    nodes[0].kill()
    run.only(nodes[1:])
    codes = run.exit_codes()
    assert codes == [1] * len(codes), codes
    messages = {node.said("Error: ")[-1] for node in run.nodes}
    return {"exit_codes": codes, "seconds": round(time.monotonic() - begin, 1), "messages": sorted(messages)}


def own_directories(nodes: list[Node], work: Path) -> dict[str, Any]:
    """Checkpoints on each machine's own disk are refused at the start, on every one."""
    run = Run("own", nodes, work, **(OPTIONS | {"directory": str(work / "disk" / "checkpoints")}))
    begin = time.monotonic()
    run.begin(nodes)
    codes = run.exit_codes()
    assert codes == [1] * len(codes), codes
    lines = [line for node in nodes for line in node.said("is not the same directory on all ranks")]
    messages = {line[line.index("RuntimeError") :].replace(str(work), "") for line in lines}
    assert all(node.said("is not the same directory on all ranks") for node in nodes)
    seconds = round(time.monotonic() - begin, 1)
    return {"exit_codes": codes, "seconds_from_the_start_of_torchrun": seconds, "messages": sorted(messages)}


def evaluation(nodes: list[Node], alone: LongRun) -> dict[str, Any]:
    script = EVALUATION.format(examples=str(ROOT / "examples"), directory=str(alone.folder), num_files=40)
    for node in nodes:
        node.start(script, str(len(nodes)), "evaluation")
    assert not any(node.agent.wait(200) for node in nodes if node.agent)
    found = [line for node in nodes for line in node.said("evaluated")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(nodes)}"]
    launcher += ["--no-python", sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    expected = subprocess.run(launcher, env=environment, capture_output=True, text=True, check=True).stdout
    assert found == [line for line in expected.splitlines() if "evaluated" in line], (found, expected)
    return {"ranks_equal_to_one_machine": len(found)}


def duration(nodes: list[Node], work: Path, alone: LongRun) -> dict[str, Any]:
    run = Run("duration", nodes, work, exit_duration_in_mins=0.1, **OPTIONS)
    run.begin(nodes)
    assert not any(run.exit_codes())
    ended = newest(run.folder)
    assert nodes[0].said(f"exit_duration_in_mins (0.1) reached: ended after iteration {ended}")
    assert 0 < ended < TRAIN_ITERS
    return {"all_ended_after_iteration": ended, "records_equal_to_one_machine": equal_until(run, alone, ended)}


def main(number: int, work: Path) -> None:
    nodes = [Node(index, work) for index in range(number)]
    try:
        alone = one_machine(work / "alone", number, OPTIONS)
        without_dropout = one_machine(work / "without_dropout", number, WITHOUT_DROPOUT)
        result: dict[str, Any] = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {number} network "
            "namespaces, a rank on gloo in each",
            "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
            "train_iters": TRAIN_ITERS,
        }
        first, second = nodes[: number // 2], nodes[number // 2 :]
        for name, part in {
            "undisturbed": partial(undisturbed, nodes, work, alone),
            "half_killed": partial(loss_and_return, "killed", nodes, first, work, without_dropout, cut_cable=False),
            "half_with_rank_0_cut_off": partial(loss_and_return, "cut", nodes, second, work, alone, cut_cable=True),
            "rendezvous_lost": partial(loss_of_the_rendezvous, nodes, work),
            "checkpoints_on_own_disks": partial(own_directories, nodes, work),
            "evaluation": partial(evaluation, nodes, alone),
            "exit_duration": partial(duration, nodes, work, alone),
        }.items():
            result[name] = part()
            print(json.dumps({name: result[name]}, indent=1), flush=True)
    except BaseException:
        for node in nodes:
            print(f"----- {node.output} -----\n{node.output.read_text()[-6000:]}" if node.output.exists() else "")
        raise
    finally:
        for node in nodes:
            if node.agent and node.agent.poll() is None:
                node.kill()
    (Path(__file__).parent / "results" / f"nodes_{number}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
