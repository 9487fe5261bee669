"""Experts whose products are one launch: equal to expert after expert, in the buffers of DDP and ZeRO-1, too."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from ranks import run_ranks
from sameness_cases import LLAMA, MOE
from small import WIDE, small_config, small_state, text_loader, train

import minloop
from minloop.checkpoint.optimizer_state import mended_optimizers
from minloop.layers import expert_products
from minloop.layers.expert_products import (
    add_weight_gradients,
    are_joined,
    as_one,
    join_weights,
    joins_experts,
    spare_gradients,
)

EXPERTS, IN, OUT = 4, 16, 24
SPLITS = ([3, 0, 9, 4], [0, 0, 0, 5], [7, 1, 0, 0])


class OneByOne(torch.nn.Module):
    """What Transformer Engine's grouped layers compute, their names too."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.num_gemms, self.calls, self.is_first_microbatch = EXPERTS, 0, True
        generator = torch.Generator().manual_seed(1)
        for index in range(EXPERTS):
            weight = torch.randn(OUT, IN, generator=generator).to(dtype)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        self.calls += 1
        parts = zip(x.split(m_splits), range(EXPERTS), strict=True)
        return torch.cat([part @ getattr(self, f"weight{index}").t() for part, index in parts]), None


def with_main_grads(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    sums = torch.ones(EXPERTS, OUT, IN, dtype=dtype)
    for index, part in enumerate(sums):
        getattr(layer, f"weight{index}").main_grad = part
    return sums


@pytest.mark.parametrize("spared", [False, True], ids=["all gradients", "one"])
@pytest.mark.parametrize("main_grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_equal_to_expert_after_expert(splits: list[int], main_grad_dtype: torch.dtype, spared: bool) -> None:
    layer: Any = OneByOne()
    reference = OneByOne()
    join_weights(layer)
    if spared:
        layer.ddp_config = SimpleNamespace(overlap_grad_reduce=False)
        spare_gradients(layer)
    sums = with_main_grads(layer, main_grad_dtype)
    x = torch.randn(sum(splits), IN, dtype=torch.bfloat16, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    output, bias = layer(x, splits)
    expected, _ = reference(same, splits)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient)
    assert (bias, layer.calls) == (None, 0)
    assert torch.allclose(output.float(), expected.float(), rtol=1e-2, atol=1e-2)
    assert x.grad is not None
    assert same.grad is not None
    assert torch.allclose(x.grad.float(), same.grad.float(), rtol=1e-2, atol=1e-2)
    for index, found in enumerate(sums):
        weight = getattr(layer, f"weight{index}")
        assert weight.grad_added_to_main_grad
        assert (None if weight.grad is None else weight.grad.shape) == (
            None if spared and index < EXPERTS - 1 else weight.shape
        )
        wanted = getattr(reference, f"weight{index}").grad
        assert torch.allclose(found.float() - 1, torch.zeros(()) if wanted is None else wanted.float(), atol=0.1)


def test_what_does_not_lie_together_is_multiplied_as_before() -> None:
    layer: Any = OneByOne()
    join_weights(layer)
    x = torch.randn(6, IN, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x, [1, 2, 3, 0])
        assert layer.calls == 0
    assert not layer.is_first_microbatch, "Transformer Engine would write main_grad anew"
    layer(x, [1, 2, 3, 0])  # with gradients, and no place for them
    assert layer.calls == 1
    with_main_grads(layer, torch.float32)
    layer(x, [1, 2, 3, 0])
    assert layer.calls == 1
    layer.weight2.main_grad = layer.weight2.main_grad.clone()
    layer(x, [1, 2, 3, 0])
    assert layer.calls == 2
    with_main_grads(layer, torch.float32)
    layer.weight1.data = layer.weight1.data.clone()
    layer(x, [1, 2, 3, 0])
    assert layer.calls == 3
    layer(x[:0], [0, 0, 0, 0])
    assert layer.calls == 4
    layer = OneByOne()
    join_weights(layer)
    with_main_grads(layer, torch.float32)
    layer.weight3.requires_grad_(False)
    layer(x, [1, 2, 3, 0])  # of some experts alone
    assert layer.calls == 1


def test_a_view_of_what_lies_together() -> None:
    block = torch.arange(24.0).view(4, 2, 3)
    whole = as_one([*block])
    assert whole is not None
    assert torch.equal(whole, block)
    assert whole.data_ptr() == block.data_ptr()
    assert as_one([block[1], block[0]]) is None
    assert as_one([block[0], block[2]]) is None
    assert as_one([block[3], block[3]]) is None
    assert as_one([part.t() for part in block]) is None


def buffers(sharded: bool) -> list[bool]:
    config = small_config(bf16=True)
    groups = minloop.init_distributed(config, seed=1)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=sharded, bucket_size=OUT * IN)
    layer: Any = OneByOne()
    layer.config = config
    before = copy.deepcopy(layer)
    join_weights(layer)
    DistributedDataParallel(config, ddp_config, layer, pg_collection=groups)
    weights = [getattr(layer, f"weight{index}") for index in range(EXPERTS)]
    same = all(torch.equal(weight, getattr(before, f"weight{index}")) for index, weight in enumerate(weights))
    found = [same, as_one(weights) is not None, as_one([weight.main_grad for weight in weights]) is not None]
    minloop.shutdown_distributed()
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "ZeRO-1"])
def test_buffers_keep_them_together(sharded: bool) -> None:
    assert run_ranks(2, buffers, sharded) == [[True, True, True]] * 2


def refusal(by_buckets: bool) -> bool:
    config = small_config(pipeline_model_parallel_size=2)
    groups = minloop.init_distributed(config, seed=1)
    layer = OneByOne()
    if groups.pp.rank() == 1:  # the first stage has no experts
        join_weights(layer)
    state: Any = SimpleNamespace(chunks=[layer], groups=groups, optimizer=SimpleNamespace(chained_optimizers=[]))
    try:
        with mended_optimizers(state, by_buckets=by_buckets):
            return False
    except ValueError as error:
        return "set gradient_accumulation_fusion=False" in str(error)
    finally:
        minloop.shutdown_distributed()


def test_state_stored_by_buckets_is_refused_on_all_stages() -> None:
    assert run_ranks(2, refusal, True) == [True, True]
    assert run_ranks(2, refusal, False) == [False, False]


def test_gradients_are_summed_in_float32() -> None:
    ends = torch.tensor([300, 300, 1000], dtype=torch.int32)
    x, gradient = torch.randn(1000, IN, dtype=torch.bfloat16), torch.randn(1000, OUT, dtype=torch.bfloat16)
    sums = torch.zeros(3, OUT, IN)
    add_weight_gradients(x, gradient, ends, sums)
    parts = zip(gradient.double().split([300, 0, 700]), x.double().split([300, 0, 700]), strict=True)
    wanted = torch.stack([a.t() @ b for a, b in parts])
    assert ((sums - wanted).norm() / wanted.norm()).item() < 5e-3
    assert not sums[1].any()


def test_where_experts_are_joined() -> None:
    names = "fp8 fp4 add_bias_linear delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad".split()
    names += ["use_transformer_engine_op_fuser", "fine_grained_activation_offloading", "quant_recipe"]
    fields: dict[str, Any] = dict.fromkeys(names, False)
    fields |= {"num_moe_experts": 4, "moe_grouped_gemm": True, "bf16": True, "gradient_accumulation_fusion": True}
    assert joins_experts(SimpleNamespace(**fields))
    for name, value in fields.items():
        assert not joins_experts(SimpleNamespace(**(fields | {name: not value})))


def test_only_chips_with_a_kernel_join_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_products, "TEGroupedLinear", OneByOne)
    monkeypatch.setattr(expert_products, "joins_experts", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found: list[bool] = []
    for capability in [(8, 9), (9, 0), (10, 3), (12, 0)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        expert_products.join_experts(layer := OneByOne(), small_config())
        found.append(are_joined(layer))
    assert found == [False, True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(256, 512), (200, 136), (8, 16)], ids=str)
def test_gradients_on_a_gpu(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    outputs, inputs = sizes
    splits = [300, 0, 1, 700, 64]
    ends = torch.tensor(splits).cumsum(0).int().cuda()
    x, gradient = (torch.randn(1065, size, device="cuda").bfloat16() for size in (inputs, outputs))
    before = torch.randn(5, outputs, inputs, device="cuda").to(dtype)
    sums = before.clone()
    add_weight_gradients(x, gradient, ends, sums)
    parts = zip(gradient.double().split(splits), x.double().split(splits), strict=True)
    wanted = before.double() + torch.stack([a.t() @ b for a, b in parts])
    assert ((sums - wanted).norm() / wanted.norm()).item() < (1e-6 if dtype == torch.float32 else 5e-3)
    assert torch.equal(sums[1], before[1])


MIXTURE: dict[str, Any] = LLAMA | MOE | WIDE | {"bf16": True, "lr": 1e-3}


def ready(overlap: bool) -> tuple[list[bool], list[bool], bool]:
    """Which experts' weights autograd waits for in minloop's DDP; whether DDP reduces in the last of three backward
    passes, of which one is of experts one after another; and whether it sums what the layers add.
    """
    config = small_config(bf16=True)
    groups = minloop.init_distributed(config, seed=1)
    layer: Any = OneByOne()
    layer.config = config
    join_weights(layer)
    ddp_config = minloop.build_ddp_config(config, overlap_grad_reduce=overlap)
    with mock.patch("minloop.data_parallel.check_wrapping"):
        (wrapped,) = minloop.wrap_ddp([layer], ddp_config, groups)
    seen: list[Any] = []
    weights = [getattr(layer, f"weight{index}") for index in range(EXPERTS)]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(seen.append)
    x = torch.ones(8, IN, dtype=torch.bfloat16) * (1 + groups.dp.rank())
    begun: list[bool] = []
    waited_for: list[bool] = []
    for joined in (True, True, False, True):  # DDP learns in the first what it is to wait for
        wrapped.zero_grad_buffer()
        taken = x if joined else x.t().contiguous().t()
        with wrapped.no_sync():
            layer(taken, [2] * EXPERTS)[0].sum().backward()
        waited_for = waited_for or [any(weight is each for each in seen) for weight in weights]
        layer(taken, [2] * EXPERTS)[0].sum().backward()
        begun.append(all(group.grad_reduce_handle is not None for group in wrapped.bucket_groups))
        wrapped.finish_grad_sync()
        assert all((weight.main_grad == 2 * 2 * (1 + 2)).all().item() for weight in weights)
    minloop.shutdown_distributed()
    return waited_for, begun, layer.calls == 2


@pytest.mark.parametrize("overlap", [False, True], ids=["after the backward pass", "overlapped"])
def test_ddp_sums_gradients_that_it_does_not_wait_for(overlap: bool) -> None:
    for waited_for, begun, one_by_one in run_ranks(2, ready, overlap):
        assert waited_for == [False] * (EXPERTS - 1) + [True]
        assert begun == [False, overlap, overlap, overlap]
        assert one_by_one


def trained(directory: str, joined: bool, options: dict[str, Any]) -> tuple[bool, list[float]]:
    with mock.patch("minloop.model.join_experts", expert_products.join_experts if joined else lambda *_: None):
        state = small_state(**(MIXTURE | options))
    found = are_joined(state.chunks[0])
    one_by_one = mock.Mock(side_effect=AssertionError("these experts do not lie together"))
    for layer in state.chunks[0].modules():
        if isinstance(forward := vars(layer).get("forward"), expert_products.ExpertProducts):
            forward.one_by_one = one_by_one
    if joined:
        minloop.save_checkpoint(directory, state)
    else:
        minloop.load_checkpoint(directory, state)
    loader = text_loader(state)
    losses = [loss for loss, _ in train(state, loader, 12)]
    losses.append(minloop.eval_step(state, [next(loader)], num_microbatches=1).loss.item())
    minloop.shutdown_distributed()
    return found, losses


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, {"ddp": {"use_distributed_optimizer": True}}),
        (2, {"ddp": {"use_distributed_optimizer": True}}),
        (2, {"expert_model_parallel_size": 2}),
    ],
    ids=["DDP", "ZeRO-1", "DP2 ZeRO-1", "EP2"],
)
def test_trains_like_transformer_engines(ranks: int, options: dict[str, Any], tmp_path: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    joined, losses = run_ranks(ranks, trained, str(tmp_path), True, options)[0]
    apart, usual = run_ranks(ranks, trained, str(tmp_path), False, options)[0]
    assert (joined, apart) == (HAVE_TE, False)
    assert losses == pytest.approx(usual, rel=3e-3)
    assert losses[-1] < losses[0]
