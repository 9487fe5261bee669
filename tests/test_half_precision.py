"""bf16 and fp16: a layout differs from one rank about as much as one rank differs from itself in another order of sums.

Every product of activations and weights is rounded, so that no two layouts agree to the last digit. How much that alone
may make is measured, on one rank: with every product summed in two halves, each rounded, as two tensor parallel ranks
would do it, and with other micro batches.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from sameness_cases import LLAMA, RECIPE, SP, ZERO1
from small import MICRO_BATCH_SIZE, shared_state, text_loader, train

import minloop

STEPS, MARGIN = 10, 2.0
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    # A small and constant scale: a dynamic one skips steps, and which ones is itself a matter of rounding.
    "fp16": {"fp16": True, "optimizer": RECIPE["optimizer"] | {"loss_scale": 16.0}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor_model_parallel_size": 2, **SP},
    "PP2 ZeRO-1": {"pipeline_model_parallel_size": 2, "ddp": ZERO1},
    "CP2": {"context_parallel_size": 2},
    "DP2 ZeRO-1": {"ddp": ZERO1},
}

matmul = torch.matmul


def matmul_in_halves(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    size = left.size(-1)
    if right.dim() != 2 or size % 2:
        return matmul(left, right, **options)
    return matmul(left[..., : size // 2], right[: size // 2]) + matmul(left[..., size // 2 :], right[size // 2 :])


def run(
    directory: str, options: dict[str, Any], first: bool = False, halves: bool = False, size: int = MICRO_BATCH_SIZE
) -> torch.Tensor:
    """Losses and gradient norms, [steps, 2], from the weights in `directory`, which the first run writes."""
    local = {"transformer_impl": "local"}  # whose products are torch.matmul
    state = shared_state(directory, first, **(RECIPE | LLAMA | local | options))
    with mock.patch.object(torch, "matmul", matmul_in_halves if halves else matmul):
        history = train(state, text_loader(state, size), STEPS, size)
    minloop.check_replicas(state)
    minloop.shutdown_distributed()
    return torch.tensor(history, dtype=torch.float64)


def worst(history: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[2]: the largest relative differences of losses and of gradient norms."""
    return ((history - reference).abs() / reference).amax(0)


@pytest.fixture(scope="module", params=PRECISIONS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, precision, one rank's run, how far its other runs are from it)."""
    directory, precision = str(tmp_path_factory.mktemp("initial")), PRECISIONS[request.param]
    (straight,) = run_ranks(1, run, directory, precision, first=True)
    variants: list[dict[str, Any]] = [{"halves": True}, {"size": 1}, {"size": 8}]
    others = [run_ranks(1, run, directory, precision, **variant)[0] for variant in variants]
    return directory, precision, straight, torch.stack([worst(other, straight) for other in others]).amax(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_differ_no_more_than_orders_of_sums(reference: Any, layout: str) -> None:
    directory, precision, straight, spread = reference
    assert straight[-1, 0] < 0.9 * straight[0, 0]
    assert (spread < 0.05).all()
    difference = worst(run_ranks(2, run, directory, precision | LAYOUTS[layout])[0], straight)
    print(f"{layout}: {difference.tolist()} with a spread of {spread.tolist()}")
    assert (difference <= MARGIN * spread).all()
