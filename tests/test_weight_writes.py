"""Weights written in the pass that updates their master weights are those that mcore's copy writes, bit for bit."""

import contextlib
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from ranks import run_ranks
from small import WIDE, small_state, text_loader, train

import minloop


class LikeTransformerEngines(torch.optim.Optimizer):
    """AdamW as Transformer Engine's FusedAdam takes its steps: by lists of tensors, four or five, for one function."""

    master_weights = capturable = False

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")})
        self.multi_tensor_adam = adam

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rows: list[tuple[torch.Tensor, ...]] = []
            for weight in group["params"]:
                state = self.state[weight]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(weight))
                if weight.grad is not None and weight.numel():
                    rows.append((weight.grad, weight.data, state["exp_avg"], state["exp_avg_sq"]))
            if rows:
                lists = [list(column) for column in zip(*rows, strict=True)]
                settings = [group[name] for name in ("lr", "betas", "eps", "step", "weight_decay")]
                self.multi_tensor_adam(65536, torch.zeros(1, dtype=torch.int), lists, *settings)


LikeTransformerEngines.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def adam(
    chunk_size: int, noop: torch.Tensor, lists: list[list[torch.Tensor]], lr: float, betas: Any, *settings: Any
) -> None:
    (beta1, beta2), (eps, step, decay) = betas, settings
    for gradient, weight, first, second, *master in zip(*lists, strict=True):
        whole = master[0] if master else weight
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(eps)
        whole.mul_(1 - lr * decay).addcdiv_(first, root, value=-lr / (1 - beta1**step))
        if master:
            weight.copy_(whole)


@contextlib.contextmanager
def fused_adam() -> Generator[None]:
    """While inside, states are built with this Adam where Transformer Engine's is not to be had."""
    if torch.cuda.is_available() and find_spec("transformer_engine"):
        yield
        return
    with mock.patch.multiple(mcore_optimizer, Adam=LikeTransformerEngines, USING_PYTORCH_OPTIMIZER=False):
        yield


def run(options: dict[str, Any], fused: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], int]:
    """Losses and norms of six steps, the weights after them, and how often mcore copied weights."""
    copies = 0

    def counted(copy: Any) -> Any:
        def call(optimizer: Any) -> None:
            nonlocal copies
            copies += 1
            copy(optimizer)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(fused_adam())
        for kind in (Float16OptimizerWithFloat16Params, DistributedOptimizer):
            name = "_copy_main_params_to_model_params"
            stack.enter_context(mock.patch.object(kind, name, counted(getattr(kind, name))))
        if not fused:
            stack.enter_context(mock.patch("minloop.optimizer.fuse_weight_writes"))
        fields: dict[str, Any] = WIDE | {"deterministic_mode": True} | options
        state = small_state(**fields)
        history = train(state, text_loader(state), 6)
        weights = minloop.full_weights(state)
    minloop.shutdown_distributed()
    return history, weights, copies


MOE: dict[str, Any] = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "add_bias_linear": False}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"bf16": True}),
        (2, {"bf16": True, "ddp": {"use_distributed_optimizer": True}}),
        (2, {"bf16": True, "ddp": {"use_distributed_optimizer": True}} | MOE),
        (1, {"fp16": True, "optimizer": {"initial_loss_scale": 256.0}}),
    ],
    ids=["bf16", "ZeRO-1", "ZeRO-1, EP2", "fp16"],
)
def test_weights_are_those_of_copied_master_weights(ranks: int, options: dict[str, Any]) -> None:
    ours, theirs = (run_ranks(ranks, run, options, fused) for fused in (True, False))
    for (history, weights, copies), (expected, expected_weights, all_copies) in zip(ours, theirs, strict=True):
        assert history == expected
        assert history[-1][0] < history[0][0]
        assert [*weights] == [*expected_weights]
        assert [name for name in weights if not torch.equal(weights[name], expected_weights[name])] == []
        assert copies == 0 < all_copies
