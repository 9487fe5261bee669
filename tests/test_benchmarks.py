"""What benchmarks stand on: words that say a run, the same tokens and weights for all peers, and reading their logs."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the package

from ranks import run_ranks

from benchmarks import (
    case_runner,
    cases,
    context_parallel,
    fsdp,
    largest_model,
    memory,
    moe,
    precision,
    resharded_training,
    scaling,
    throughput,
    tokens,
    weights,
)
from benchmarks.compare_peers import command_of, read_words, row, run_of, table
from benchmarks.peers import megatron_lm, plain_torch, torchtitan
from benchmarks.peers.processes import Result
from benchmarks.shapes import SHAPES, Run, read_run

LINE = (
    " [2026-11-30 02:38:53.82] iteration {i:8d}/       6 | consumed samples:            2 | elapsed time per iteration "
    "(ms): {ms:.1f} | learning rate: 1.000000E-04 | global batch size:     2 | lm loss: {loss:.6E} | loss scale: 1.0 |"
)
TITAN = "[titan] INFO - step: {i:2}  loss: {loss:8.5f}  grad_norm:  2.1  memory:  1.0GiB(0.00%)  tps: {tps:,}  mfu: 0"
PEAK = json.dumps({"peak_memory_gib": 1.5, "versions": {"torch": "2"}})


def test_a_run_is_what_its_words_say() -> None:
    run = read_run(["C", "gpus=2", "global_batch_size=4", "wgrad_fusion=off"])
    assert (run.shape.num_layers, run.gpus, run.shape.num_microbatches(2)) == (16, 2, 2)
    assert run.options == {"wgrad_fusion": "off"}
    assert read_run(run.words) == run
    with pytest.raises(ValueError, match="multiple of micro_batch_size"):
        run.shape.num_microbatches(3)
    with pytest.raises(ValueError, match="no such peer: megatron"):
        read_words(["C", "megatron"])
    with pytest.raises(ValueError, match="steps=5 leave no window"):
        read_words(["C", "steps=5"])


def test_a_switch_reaches_its_peer_alone() -> None:
    run = read_run(["tiny", "megatron_lm.wgrad_fusion=off", "plain_torch.compile=off"])
    assert run_of("megatron_lm", run).options == {"wgrad_fusion": "off"}
    assert command_of("minloop", run_of("minloop", run))[0][-4:] == run_of("minloop", run).words
    with pytest.raises(ValueError, match="no switch wgrad_fusion; there are compile"):
        plain_torch.command(read_run(["tiny", "wgrad_fusion=off"]))


def test_ranks_read_a_step_as_the_sampler_of_megatron_core_deals_it() -> None:
    shape = read_run(["tiny", "global_batch_size=8", "micro_batch_size=2"]).shape
    dataset = tokens.TokenDataset(shape, 100)
    first = [[int(dataset[i]["tokens"][0]) for i in range(a, a + 2)] for a in (8, 12)]  # rank 0 of 2, step 1
    assert [text[:, 0].tolist() for text in tokens.microbatches(shape, 1, 0, 2)] == first
    assert torch.equal(dataset[3]["labels"][:-1], dataset[3]["tokens"][1:])
    assert int(tokens.batch(shape, 0).max()) < shape.vocab_size


def test_peers_start_from_the_same_weights() -> None:
    shape, cpu = SHAPES["tiny"], torch.device("cpu")
    q, k, v = (weights.draw(f"model.layers.1.self_attn.{kind}_proj.weight", shape, cpu) for kind in "qkv")
    qkv = weights.megatron_core(shape)("module.decoder.layers.1.self_attention.linear_qkv.weight", cpu)
    second_group = qkv.view(shape.num_query_groups, -1, shape.hidden_size)[1]
    torch.testing.assert_close(second_group, torch.cat([q[32:], k[16:], v[16:]]), rtol=0, atol=0)
    wq = weights.torchtitan(shape)("layers.1._orig_mod.attention.wq.weight", cpu)  # pairs (0, 1) are (0, 8) of 16 here
    torch.testing.assert_close(wq[:4], q[[0, 8, 1, 9]], rtol=0, atol=0)
    assert q.std().item() == pytest.approx(weights.STD, rel=0.1)
    assert not torch.equal(q, weights.draw("model.layers.0.self_attn.q_proj.weight", shape, cpu))
    model = plain_torch.Llama(shape)
    weights.fill(model.named_parameters(), weights.llama(shape))
    torch.testing.assert_close(
        model.model.layers[1].get_parameter("self_attn.k_proj.weight").detach(), k, rtol=0, atol=0
    )


def test_megatron_lm_is_told_the_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = megatron_lm.arguments(read_run(["C", "steps=7"]))
    assert {"--num-query-groups=8", "--global-batch-size=16", "--train-iters=7", "--rotary-base=500000"} <= set(given)
    assert "--use-distributed-optimizer" not in given
    assert "--overlap-grad-reduce" in megatron_lm.arguments(read_run(["D", "gpus=2"]))
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"MEGATRON_LM is .* pretrain_gpt.py"):
        megatron_lm.command(read_run(["C"]))
    (tmp_path / "pretrain_gpt.py").touch()
    command, needs = megatron_lm.command(read_run(["C", "gpus=2"]))
    assert command[-4:] == ["C", "gpus=2", "steps=12", "window=1"]
    assert needs["PYTHONPATH"] == str(tmp_path)


def test_experts_are_the_same_for_both() -> None:
    run = read_run(["E", "gpus=2", "expert_model_parallel_size=2", "moe_router_force_load_balancing=True"])
    given = megatron_lm.arguments(run)
    sizes = {"--num-experts=128", "--moe-router-topk=8", "--moe-ffn-hidden-size=768", "--kv-channels=128"}
    flags = {"--moe-router-force-load-balancing", "--qk-layernorm", "--moe-grouped-gemm", "--moe-permute-fusion"}
    assert sizes | flags | {"--expert-model-parallel-size=2", "--moe-aux-loss-coeff=0.001"} <= set(given)
    megatron_lm.check_switches(run, *megatron_lm.SWITCHES)
    shape, cpu = SHAPES["tinyE"], torch.device("cpu")
    second_rank = weights.megatron_core(shape, first_expert=2)
    down = weights.draw("model.layers.1.mlp.experts.3.down_proj.weight", shape, cpu)
    for name in ("experts.linear_fc2.weight1", "experts.local_experts.1.linear_fc2.weight"):
        torch.testing.assert_close(second_rank(f"module.decoder.layers.1.mlp.{name}", cpu), down, rtol=0, atol=0)
    assert second_rank("decoder.layers.0.mlp.router.weight", cpu).shape == (4, 64)
    assert second_rank("decoder.layers.0.self_attention.q_layernorm.weight", cpu).shape == (32,)


def test_cases_of_memory_say_what_they_expect() -> None:
    run = read_run(["D", "gpus=2", "global_batch_size=8"])
    plain, mlp = (memory.estimate(run, memory.CASES[name]) for name in ("plain", "recompute_mlp"))
    assert plain.total - mlp.total > 20 * 2**30
    on_one_gpu = memory.with_estimate({"case": "one_gpu_offload"}, run)["estimate_gib"]
    # half of all, as on each of two GPUs, but with fp32 copies of bf16 gradients
    assert on_one_gpu["optimizer"] == pytest.approx(plain.optimizer / 2**30 * 4 / 3, abs=0.01)
    words = cases.words(memory.CASES["bf16_moments"])
    assert throughput.read("exp_avg_dtype", words["exp_avg_dtype"]) is torch.bfloat16


def test_a_case_is_a_run_of_its_own() -> None:
    asked = cases.read_cases(["zero1", "fsdp2", "steps=6"], fsdp.CASES, fsdp.DEFAULTS)
    assert (asked.names, asked.run.steps, asked.warmup) == (["zero1", "fsdp2"], 6, 5)
    run = cases.one_run(asked.run, fsdp.CASES["fsdp2"])
    assert run.options["reshard_after_forward"] == "True"
    run = cases.one_run(asked.run, context_parallel.CASES["128k_p2p"])
    assert (run.shape.sequence_length, run.options["context_parallel_size"]) == (131_072, "2")
    with pytest.raises(ValueError, match="no such case: zero4"):
        cases.read_cases(["zero4"], fsdp.CASES, fsdp.DEFAULTS)


def test_what_cases_say_are_fields_of_mcore() -> None:
    for module in (context_parallel, fsdp, memory, moe):
        for name, fields in module.CASES.items():
            run = cases.one_run(cases.read_cases([name], module.CASES, moe.DEFAULTS).run, fields)
            for field, text in run.options.items():
                assert throughput.read(field, text) == fields[field], (name, field)


def printed_losses(text: str) -> list[list[float]]:
    return [Result.read(line).losses for line in text.splitlines() if line.startswith(throughput.RESULT)]


def run_together(words: list[str]) -> bool:
    """The last run fails; is a model of those before it still there?"""
    with pytest.raises(ValueError, match="no field of mcore's configs: no_such_field"):
        case_runner.main(words)
    case_runner.free()
    return any(type(each) is GPTModel for each in gc.get_objects())


def test_runs_in_the_same_processes_give_what_each_gives_alone(capsys: pytest.CaptureFixture[str]) -> None:
    base = read_run(["tiny", "gpus=2", "steps=3"])
    runs = [cases.one_run(base, fsdp.CASES[name]).words for name in ("megatron_fsdp", "fsdp2")]
    for words in runs:
        run_ranks(2, throughput.main, words)
    alone = printed_losses(capsys.readouterr().out)
    assert run_ranks(2, run_together, [*runs[0], *runs[1], *base.words, "no_such_field=1"]) == [False, False]
    assert printed_losses(capsys.readouterr().out) == alone
    assert alone[0] != alone[1]


def test_after_a_run_that_fails_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import json, os, sys, time
for place, name in enumerate(word for word in sys.argv[1:] if "=" not in word):
    if name == "C" and place:  # no process but a new one will do
        sys.exit(print("600 MiB are still allocated on a GPU"))
    print("run", name, flush=True)
    if name == "B":
        raise ValueError("no room")
    if name == "E" and place or name == "tiny":
        raise RuntimeError("CUDA out of memory")
    if name == "D":
        time.sleep(60)
    print(json.dumps({"step_ms": [os.getpid()], "losses": [1.0], "peak_memory_gib": 1.0}), flush=True)
"""
    monkeypatch.setattr(case_runner, "torchrun", lambda run, _: [sys.executable, "-c", program, *run.words])
    runs = [read_run([name, f"gpus={gpus}"]) for name, gpus in zip("AABACCA", (1, 1, 1, 1, 1, 1, 2), strict=True)]
    first, second, failed, *others = case_runner.results(runs, 30)
    assert isinstance(failed, RuntimeError)
    assert str(failed).startswith("minloop: exit code 1; its output ends with: run B")
    assert str(failed).endswith("ValueError: no room")
    pids = [result.step_ms[0] for result in (first, second, *others) if isinstance(result, Result)]
    assert pids[0] == pids[1]
    assert len({*pids[1:]}) == len(others) + 1 == 5
    first, again, full = case_runner.results([read_run([name]) for name in ("A", "E", "tiny")], 30)
    assert isinstance(first, Result)
    assert isinstance(again, Result)
    assert first.step_ms != again.step_ms
    assert str(full).endswith("RuntimeError: CUDA out of memory")
    (late,) = case_runner.results([read_run(["D"])], 1)
    assert str(late).endswith("ended after 1 s")


def test_cases_for_more_gpus_than_there_are_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = cases.that_fit(cases.read_cases([], fsdp.CASES, fsdp.DEFAULTS), fsdp.CASES)
    assert asked.names == [name for name in fsdp.CASES if "_4" not in name]
    assert "hsdp_4 is left out: it needs 4 GPUs, and there are 2" in capsys.readouterr().out


def test_more_gpus_have_more_tokens_or_share_them() -> None:
    asked = cases.read_cases([], scaling.CASES, scaling.DEFAULTS)
    runs = {name: cases.one_run(asked.run, case) for name, case in scaling.CASES.items()}
    per_gpu = {name: run.shape.global_batch_size / run.gpus for name, run in runs.items()}
    assert per_gpu == {"dp1": 16, "dp2": 16, "dp4": 16, "tp2": 8, "tp4": 4}
    first = {"tokens_per_s_per_gpu": 100.0, "product_tflops": [700, 690]}
    made = {"tokens_per_s_per_gpu": 98.0, "product_tflops": [685, 695]}
    assert scaling.against(first, made) == {"efficiency": 0.98, "of_product": pytest.approx(0.9871)}
    assert scaling.against(first, {"error": "exit code 1"}) == {}


def test_a_row_replaces_that_of_the_same_case_and_shape(tmp_path: Path) -> None:
    rows = [{"case": "plain", "words": words, "peak_gib": 1} for words in (["D", "gpus=2"], ["C", "gpus=1"])]
    again = rows[0] | {"words": ["D", "gpus=2", "steps=4"]}
    for made in (*rows, again):
        cases.write([made], tmp_path / "rows.json")
    cases.write([again | {"error": "exit code 1"}], tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [rows[1], again]


def test_resharding_replaces_its_own_row_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resharded_training, "RESULTS", tmp_path / "rows.json")
    rows = [
        {"device": "CPU", "gpus": 0, "ranks": ranks, "precision": "fp32", "allowed": new}
        for ranks, new in ((2, 0), (4, 1))
    ]
    for row_made in [*rows, rows[0] | {"allowed": 2}]:
        resharded_training.write(row_made)
    assert json.loads((tmp_path / "rows.json").read_text()) == [rows[1], rows[0] | {"allowed": 2}]
    with pytest.raises(ValueError, match="3 ranks: there are layouts"):
        resharded_training.main(["3"])


@pytest.mark.filterwarnings("ignore:Transformer Engine cross entropy")
def test_sharding_more_makes_room_for_more_layers() -> None:
    run = cases.read_cases([], largest_model.CASES, largest_model.DEFAULTS).run
    zero1, megatron, torch_fsdp = (largest_model.most_layers(run, kind, 128) for kind in largest_model.KINDS.values())
    assert 32 < zero1 < megatron < torch_fsdp


@pytest.mark.filterwarnings("ignore:Transformer Engine cross entropy")
def test_the_largest_model_has_fewer_layers_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cases.read_cases(["zero1", "fsdp2"], largest_model.CASES, largest_model.DEFAULTS)
    none = [*largest_model.largest(asked, 1)]  # and runs nothing
    assert [made["num_layers"] for made in none] == [0, 0]
    assert none[0]["error"].startswith("not even one layer fits budget=1 GiB: it is expected to take 18")
    most = [largest_model.most_layers(asked.run, largest_model.CASES[name], 128) for name in asked.names]
    tried: list[list[int]] = []
    full = "CUDA out of memory. Tried to allocate 2.00 GiB"

    def results(runs: list[Run], _: int) -> list[Result | RuntimeError]:
        tried.append([run.shape.num_layers for run in runs])
        few = [run.shape.num_layers < most[0] for run in runs]
        return [Result([1.0, 1.0], [2.0], 1.0) if fits else RuntimeError(full) for fits in few]

    monkeypatch.setattr(cases, "results", results)
    zero1, torch_fsdp = largest_model.largest(asked, 128)
    fewer = [layers * 15 // 16 for layers in most]
    assert tried == [most, fewer, [fewer[1] * 15 // 16]]
    assert (zero1["num_layers"], zero1["tries"], zero1.get("error")) == (fewer[0], 2, None)
    assert (torch_fsdp["num_layers"], torch_fsdp["tries"], torch_fsdp["error"]) == (tried[2][0], 3, full)
    tried, full = [], "ValueError: no such field"
    assert [made["tries"] for made in largest_model.largest(asked, 128)] == [1, 1]


def test_precisions_read_the_same_text() -> None:
    first, second = (next(precision.batches(SHAPES["tiny"])) for _ in range(2))
    assert torch.equal(first["tokens"], second["tokens"])
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    assert not torch.equal(first["tokens"], next(precision.batches(SHAPES["tiny"], 2))["tokens"])


def test_megatron_lm_log() -> None:
    """The second line's means are over both steps, as Megatron-LM prints them."""
    lines = [LINE.format(i=i, ms=ms, loss=loss) for i, ms, loss in ((1, 478.0, 5.5), (2, 250.0, 5.25), (3, 20.0, 4.75))]
    result = megatron_lm.parse("\n".join([*lines, PEAK]), read_run(["tiny"]))
    assert result == Result([478.0, 22.0, 20.0], [5.5, 5.0, 4.75], 1.5, {"torch": "2"})
    assert megatron_lm.parse("\n".join([*lines, PEAK]), read_run(["tiny", "window=3"])).step_ms == [20.0]
    with pytest.raises(RuntimeError, match="no line of an iteration"):
        megatron_lm.parse("Killed", read_run(["tiny"]))


def test_torchtitan_log() -> None:
    log = "\n".join([TITAN.format(i=1, loss=5.5, tps=64), TITAN.format(i=2, loss=5.25, tps=6400), PEAK])
    result = torchtitan.parse(log, read_run(["tiny"]))  # 64 tokens a step
    assert result == Result([1000.0, 10.0], [5.5, 5.25], 1.5, {"torch": "2"})


def test_rows_compare_after_the_warm_up() -> None:
    asked = read_words(["tiny", "minloop", "torchtitan", "warmup=1", "steps=3"])
    asked.results["minloop"] = [
        Result([900.0, 10.0, 10.0], [3.0, 2.5, 2.0], 1.0),
        Result([900.0, 10.0, 12.0], [3.0], 1.2),
    ]
    asked.results["torchtitan"] = [Result([900.0, 20.0, 20.0], [3.0, 2.5, 2.5], 2.0)]
    own, other = table(asked)
    assert (own["median_ms"], own["p90_ms"], own["peak_memory_gib"]) == (10.0, 12.0, 1.2)
    assert own["tokens_per_s_per_gpu"] == 6400
    assert (other["ratio_to_peer"], other["last_loss_difference"]) == (2.0, pytest.approx(-0.2))
    assert row("minloop", asked)["first_step_ms"] == 900.0
