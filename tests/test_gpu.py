"""On GPUs, with Transformer Engine or without, whichever is installed: the same promises as on the CPU."""

import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from ranks import RankError, run_ranks
from small import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, WIDE, small_config, small_state, text_loader, train

import minloop
from minloop.layers.weight_gradient import accumulate_weight_gradient

pytestmark = pytest.mark.gpu
SHARDED = {"use_distributed_optimizer": True}


def one_gpu() -> dict[str, Any]:
    backend = minloop.cpu_backend()
    state = small_state(**WIDE)
    before = [p.detach().clone() for p in state.chunks[0].parameters()]
    loader = text_loader(state)
    history = train(state, loader, 1)
    moved = sum(not torch.equal(a, b) for a, b in zip(before, state.chunks[0].parameters(), strict=True))
    history += train(state, loader, 18)
    metrics = minloop.train_step(state, loader, num_microbatches=4)
    history.append((metrics.loss.item(), metrics.grad_norm.item() if metrics.grad_norm is not None else 0.0))
    report = {
        "cpu_backend": backend.enabled,
        "backend": dist.get_backend(),
        "moved": moved == len(before),
        "device": before[0].device.type,
        "losses": [loss for loss, _ in history],
        "last": history[-1],
        "record": minloop.step_record(state, metrics),
    }
    minloop.shutdown_distributed()
    return report


def test_one_gpu_trains() -> None:
    (report,) = run_ranks(1, one_gpu)
    assert (report["cpu_backend"], report["backend"], report["device"]) == (False, "nccl", "cuda")
    assert report["moved"]
    assert report["losses"][-1] < 0.75 * report["losses"][0]
    assert report["last"] == pytest.approx((report["record"]["lm loss"], report["record"]["grad-norm"]))


def save_initial(directory: str, fields: dict[str, Any]) -> None:
    minloop.save_checkpoint(directory, small_state(**WIDE, **fields))
    minloop.shutdown_distributed()


def run(directory: str, options: dict[str, Any], steps: int, save: bool = False) -> list[tuple[float, float]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    state = small_state(seed=99, **(WIDE | options))
    loader = text_loader(state)
    source = minloop.latest_checkpoint(directory)
    assert source is not None
    minloop.load_checkpoint(source, state, None if source.name == "iter_0000000" else loader)
    history = train(state, loader, steps)
    if save:
        minloop.save_checkpoint(directory, state, loader)
    minloop.shutdown_distributed()
    return history


LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2 ZeRO-1": {"ddp": SHARDED},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP2, local layers": {"context_parallel_size": 2, "transformer_impl": "local"},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[float, float]]]:
    directory = str(tmp_path_factory.mktemp("initial"))
    run_ranks(1, save_initial, directory, {})
    return directory, run_ranks(1, run, directory, {}, 20)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_same_model_as_one(reference: Any, layout: str) -> None:
    directory, expected = reference
    history = run_ranks(2, run, directory, LAYOUTS[layout], 20)[0]
    assert max(abs(a[0] - b[0]) / b[0] for a, b in zip(history, expected, strict=True)) <= 1e-5
    assert max(abs(a[1] - b[1]) / b[1] for a, b in zip(history, expected, strict=True)) <= 1e-4


GATED: dict[str, Any] = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
"""Of which Transformer Engine has the activation as a module."""


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": SHARDED, "bf16": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True, "hidden_dropout": 0.1, **GATED},
        {"pipeline_model_parallel_size": 2, "fp16": True},
        {"ddp": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}, "bf16": True},
        {"ddp": {"reshard_after_forward": True}, "bf16": True},
        {"ddp": SHARDED, "bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
        {"ddp": SHARDED, "bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
    ],
    ids=[
        *("DP2 ZeRO-1 bf16, dropout", "TP2+SP bf16, dropout, SwiGLU", "PP2 fp16", "Megatron FSDP", "FSDP2"),
        *("ZeRO-1, delayed FP8", "ZeRO-1, weights in FP8"),
    ],
)
def test_resumes_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    if "fp8" in options:
        pytest.importorskip("transformer_engine", reason="FP8 is Transformer Engine's")
    options = options | {"deterministic_mode": True}
    run_ranks(2, save_initial, str(tmp_path), options)
    straight = run_ranks(2, run, str(tmp_path), options, 8)
    first = run_ranks(2, run, str(tmp_path), options, 4, save=True)
    second = run_ranks(2, run, str(tmp_path), options, 4)
    assert [a + b for a, b in zip(first, second, strict=True)] == straight


def logits(directory: str, options: dict[str, Any]) -> torch.Tensor:
    torch.backends.cuda.matmul.allow_tf32 = False
    state = small_state(seed=99, **(WIDE | options))
    minloop.load_checkpoint(directory, state)
    result = minloop.forward_logits(state, torch.arange(32)[None])
    minloop.shutdown_distributed()
    return result.cpu()


def test_local_layers_read_the_default_layers_checkpoint(tmp_path: Path) -> None:
    run_ranks(1, save_initial, str(tmp_path), {})
    default, local = (run_ranks(1, logits, str(tmp_path), o)[0] for o in ({}, {"transformer_impl": "local"}))
    assert torch.allclose(default, local, atol=1e-5)


GRAPH: dict[str, Any] = {"cuda_graph_impl": "full_iteration", "bf16": True, "attention_backend": AttnBackend.unfused}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, {"ddp": SHARDED}),
        (2, {"ddp": SHARDED}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=["DDP", "ZeRO-1", "DP2 ZeRO-1", "TP2+SP"],
)
def test_a_graph_trains_as_launches_do(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    """And a checkpoint of a run in the midst of its replays is resumed bit for bit."""
    options = GRAPH | options
    run_ranks(ranks, save_initial, str(tmp_path), options)
    graphs = run_ranks(ranks, run, str(tmp_path), options, 9)
    launches = run_ranks(ranks, run, str(tmp_path), options | {"cuda_graph_impl": "none"}, 9)
    assert graphs == launches
    first = run_ranks(ranks, run, str(tmp_path), options, 5, save=True)
    second = run_ranks(ranks, run, str(tmp_path), options, 4)
    assert [a + b for a, b in zip(first, second, strict=True)] == graphs


def gone_back(directory: str, options: dict[str, Any]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Three steps after a save, and after going back to it in the same process, where they are captured already."""
    state = small_state(**WIDE, **options, hidden_dropout=0.1)
    loader = text_loader(state)
    train(state, loader, 5)
    saved = minloop.save_checkpoint(directory, state, loader)
    straight = train(state, loader, 3)
    minloop.load_checkpoint(saved, state, loader)
    again = train(state, loader, 3)
    minloop.shutdown_distributed()
    return straight, again


def test_a_graph_draws_dropout_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    ((straight, again),) = run_ranks(1, gone_back, str(tmp_path), GRAPH | {"ddp": SHARDED})
    assert straight == again


def test_a_graph_of_cudnns_attention_of_short_sequences_is_refused(tmp_path: Path) -> None:
    options = GRAPH | {"attention_backend": AttnBackend.auto}
    run_ranks(1, save_initial, str(tmp_path), options)
    with pytest.raises(RankError, match=f"sequences of {SEQUENCE_LENGTH} tokens and attention_backend"):
        run_ranks(1, run, str(tmp_path), options, 1)


def overlapped(directory: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """A run whose tensor parallel communication hides behind products."""
    config = small_config(**(WIDE | options))
    minloop.init_distributed(config, seed=1)
    minloop.init_tp_overlap(config, seq_length=SEQUENCE_LENGTH, micro_batch_size=MICRO_BATCH_SIZE)
    return run(directory, options, 10)


def test_overlapped_tensor_parallel_communication_trains_the_same_model(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs: the overlap's buffers lie in the other's memory")
    pytest.importorskip("transformer_engine", reason="the overlap is Transformer Engine's")
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True}
    run_ranks(2, save_initial, str(tmp_path), options)
    plain = run_ranks(2, run, str(tmp_path), options, 10)[0]
    hidden = run_ranks(2, overlapped, str(tmp_path), options | {"tp_comm_overlap": True})[0]
    assert max(abs(a[0] - b[0]) / b[0] for a, b in zip(hidden, plain, strict=True)) <= 2e-3  # bf16, summed otherwise


def weight_gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x, dy = (torch.randn(512, n, generator=generator, device="cuda", dtype=torch.bfloat16) for n in (256, 128))
    start = torch.randn(128, 256, generator=generator, device="cuda")
    results = {"exact": (start.double() + dy.double().t() @ x.double()).float()}
    accumulate_weight_gradient(x, dy, ours := start.clone())
    results["torch"] = ours
    with contextlib.suppress(ImportError):
        apex: Any = import_module("fused_weight_gradient_mlp_cuda")
        apex.wgrad_gemm_accum_fp32(x, dy, theirs := start.clone())
        results["apex"] = theirs
    with contextlib.suppress(ImportError):
        te: Any = import_module("transformer_engine.pytorch")
        linear = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
        linear.weight.main_grad = start.clone()
        linear(x, is_first_microbatch=None).backward(dy)
        results["Transformer Engine"] = linear.weight.main_grad
    return {name: value.cpu() for name, value in results.items()}


def test_all_fused_weight_gradients_agree() -> None:
    (results,) = run_ranks(1, weight_gradients)
    exact = results.pop("exact")
    for name, value in results.items():
        assert (value - exact).norm() <= 1e-5 * exact.norm(), name


def rotations(rotary: int) -> dict[str, list[torch.Tensor]]:
    """Queries, keys and values of grouped queries, and the product's gradient: by formula, and by each fused kernel."""
    fused: Any = import_module("minloop.layers.fused_rope")
    te: Any = import_module("transformer_engine.pytorch.attention.rope")
    generator = torch.Generator("cuda").manual_seed(1)
    s, b, groups, queries, channels = 33, 2, 3, 4, 64
    sizes = [queries * channels, channels, channels]
    product = torch.randn(s, b, groups, sum(sizes), generator=generator, device="cuda").bfloat16()
    half = torch.arange(s, device="cuda")[:, None] * 0.7 ** torch.arange(rotary // 2, device="cuda")
    angles = torch.cat((half, half), -1)[:, None, None]
    weights = torch.randn(s, b, groups * queries, channels, generator=generator, device="cuda")

    def by_formula(product: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        query, key, value = product.double().split(sizes, -1)
        rotated: list[torch.Tensor] = []
        for heads in (query.reshape(s, b, -1, channels), key):
            x, y, rest = heads.split((rotary // 2, rotary // 2, channels - rotary), -1)
            cosine, sine = half.double().cos()[:, None, None], half.double().sin()[:, None, None]
            rotated.append(torch.cat((x * cosine - y * sine, y * cosine + x * sine, rest), -1))
        return [*rotated, value]

    results: dict[str, list[torch.Tensor]] = {}
    for name, rotate in {
        "formula": by_formula,
        "ours": fused.FusedQKVRope(None),
        "Transformer Engine": te.apply_fused_qkv_rotary_pos_emb,
    }.items():
        leaf = product.clone().requires_grad_()
        split = rotate(leaf, angles, angles, sizes)
        torch.stack([(part * weights[:, :, : part.shape[2]]).sum() for part in split]).sum().backward()
        assert leaf.grad is not None
        results[name] = [part.detach().float().cpu() for part in (*split, leaf.grad)]
    return results


@pytest.mark.parametrize("rotary", [64, 32], ids=["all channels", "half of them"])
def test_fused_rotations_agree(rotary: int) -> None:
    pytest.importorskip("transformer_engine", reason="it is mcore's attention with Transformer Engine that rotates so")
    (results,) = run_ranks(1, rotations, rotary)
    for name in ("ours", "Transformer Engine"):
        for made, exact in zip(results[name], results["formula"], strict=True):
            assert (made - exact).abs().max() <= 2**-8 * exact.abs().max(), name


def share_a_gpu() -> None:
    os.environ["LOCAL_RANK"] = "0"
    os.environ.pop("NCCL_HOSTID", None)
    minloop.init_distributed(small_config(), seed=1)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(RankError, match=r"ranks . and . share GPU 0"):
        run_ranks(2, share_a_gpu, timeout=60)


def beyond_the_last_gpu() -> None:
    os.environ["LOCAL_RANK"] = str(torch.cuda.device_count())
    minloop.init_distributed(small_config(), seed=1)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(RankError, match=r"this machine shows \d+ GPU\(s\): start at most one rank per GPU"):
        run_ranks(1, beyond_the_last_gpu, timeout=60)


def _given_back() -> tuple[float, bool]:
    """The share of the state's memory that offload gives back, and whether training then goes on as without."""
    losses: list[list[float]] = []
    share = 0.0
    for moving in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        state = small_state(**WIDE, bf16=True, ddp=SHARDED)
        loader = text_loader(state)
        losses.append([loss for loss, _ in train(state, loader, 2)])
        if moving:
            held = torch.cuda.memory_allocated() - before
            minloop.offload(state)
            share = 1 - (torch.cuda.memory_allocated() - before) / held
            minloop.onload(state)
        losses[-1] += [loss for loss, _ in train(state, loader, 2)]
        del state, loader
        minloop.shutdown_distributed()
    return share, losses[0] == losses[1]


def test_offload_gives_memory_back() -> None:
    ((share, equal),) = run_ranks(1, _given_back)
    assert equal
    assert share > 0.9


def _streamed() -> tuple[int, int]:
    """Bytes that streaming takes at most, and those of the largest weight."""
    state = small_state(hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8)
    largest = max(weight.nbytes for _, weight in minloop.named_full_parameters(state))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in minloop.named_full_parameters(state):
        pass
    taken = torch.cuda.max_memory_allocated() - before
    minloop.shutdown_distributed()
    return taken, largest


def test_streaming_takes_two_full_weights() -> None:
    for taken, largest in run_ranks(1, _streamed):
        assert largest <= taken <= 2 * largest
