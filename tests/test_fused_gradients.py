"""`gradient_accumulation_fusion` without apex: the same gradients, added to main_grad by the products themselves."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small import rounding, small_state, text_loader, train

import minloop
from minloop.layers.embedding import FusedGradientEmbedding
from minloop.layers.weight_gradient import accumulate_weight_gradient

PLAIN: dict[str, Any] = {"gradient_accumulation_fusion": False}
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, bf16": (1, {"bf16": True}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP, MTP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "mtp_num_layers": 1,
                        "gpt": {"position_embedding_type": "rope"}}),
    "PP2, tied": (2, {"pipeline_model_parallel_size": 2, "gpt": {"share_embeddings_and_output_weights": True}}),
    "DP2 ZeRO-1": (2, {"ddp": {"use_distributed_optimizer": True}}),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "main_grad"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16",) * 2])
def test_a_product_adds_to_main_grad(inputs: str, main_grad: str) -> None:
    dtype, generator = getattr(torch, inputs), torch.Generator().manual_seed(1)
    x, dy = (torch.randn(7, n, generator=generator).to(dtype) for n in (5, 3))
    total = torch.randn(3, 5, generator=generator).to(getattr(torch, main_grad))
    expected = total.double() + dy.double().t() @ x.double()
    accumulate_weight_gradient(x, dy, total)
    assert torch.allclose(total.double(), expected, rtol=1e-5 if main_grad == "float32" else 1e-2, atol=1e-6)


def both(options: dict[str, Any]) -> list[Any]:
    """The histories without and with fusion, and how many of the fused model's embeddings add to main_grad."""
    outcome: list[Any] = []
    for fusion in (PLAIN, FUSED):
        state = small_state(**(options | fusion))
        outcome.append(train(state, text_loader(state), 5))
        if fusion is FUSED:
            outcome.append(sum(type(m) is FusedGradientEmbedding for c in state.chunks for m in c.modules()))
        minloop.shutdown_distributed()
    return outcome


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_trains_alike_with_fused_gradients(layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    plain, fused, embeddings = run_ranks(ranks, both, options)[0]
    # bf16 rounds each microbatch's gradient, fused gradients do not
    tolerance = 2e-3 if options.get("bf16") else rounding(1e-6)
    for (loss, norm), (expected_loss, expected_norm) in zip(fused, plain, strict=True):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert embeddings == (0 if "tied" in layout or "MTP" in layout else 1)
