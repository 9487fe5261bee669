"""mcore's combined schedule: what its overlap of experts' communication trains is what is trained without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sameness_cases import MOE, RECIPE, ZERO1
from small import WIDE, rounding, small_config, small_state, text_loader, train

import minloop

OVERLAP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True}
LOCAL: dict[str, Any] = {"transformer_impl": "local"}
EXPERTS: dict[str, Any] = MOE | {
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_layer_freq": [0, 1, 1, 1],
    "bf16": True,
}


def history(steps: int = 5, **options: Any) -> list[float]:
    """Losses and gradient norms of the steps, and the loss of a validation step after them."""
    state = small_state(**(RECIPE | EXPERTS | options))
    loader = text_loader(state)
    seen = [number for step in train(state, loader, steps) for number in step]
    seen.append(minloop.eval_step(state, loader, num_microbatches=2).loss.item())
    minloop.shutdown_distributed()
    return seen


def with_and_without(layouts: list[dict[str, Any]], **overlap: Any) -> list[tuple[list[float], list[float]]]:
    return [(history(**layout), history(**layout, **overlap)) for layout in layouts]


def a_step_of_ones_own(data: Iterator[Any], model: torch.nn.Module) -> Any:
    return minloop.gpt_forward_step(data, model)


def refused_step() -> str:
    state = small_state(**(RECIPE | EXPERTS | OVERLAP))
    with pytest.raises(ValueError, match="a forward_step that takes no return_schedule_plan") as raised:
        minloop.train_step(state, text_loader(state), num_microbatches=2, forward_step=a_step_of_ones_own)
    minloop.shutdown_distributed()
    return str(raised.value)


def on_two_ranks() -> tuple[list[tuple[list[float], list[float]]], str]:
    shared: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32, "ddp": ZERO1}
    return with_and_without([LOCAL, LOCAL | shared], **OVERLAP), refused_step()


def test_overlap_trains_the_same() -> None:
    pairs, message = run_ranks(2, on_two_ranks)[0]
    for without, overlapped in pairs:
        print(max(abs(a / b - 1) for a, b in zip(overlapped, without, strict=True)))
        assert overlapped == pytest.approx(without, rel=rounding(1e-4))
    assert "build_schedule_plan" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_model_parallel_size": 1}, "=1: it hides .*; set it to 2 or more, or set overlap"),
        ({"bf16": False}, "bf16=False: set bf16=True"),
        ({"moe_token_dispatcher_type": "allgather"}, "'allgather': set it to 'alltoall'"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "leave 'moe' out"),
        ({"delay_wgrad_compute": True}, "needs Transformer Engine's layers"),
        ({"pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size=None: set it to 2 or more"),
    ],
)
def test_what_it_cannot_overlap_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**({n: v for n, v in EXPERTS.items() if n != "gpt"} | OVERLAP | LOCAL | fields))


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"delay_wgrad_compute": True}], ids=["overlap", "delayed weight gradients"])
def test_on_gpus(more: dict[str, Any]) -> None:
    layouts: list[dict[str, Any]] = [{}, {"ddp": ZERO1}]
    size = WIDE | {"num_query_groups": 4}
    layouts = [layout | size for layout in layouts]
    for without, overlapped in run_ranks(2, with_and_without, layouts, **OVERLAP, **more)[0]:
        assert overlapped == pytest.approx(without, rel=1e-2)
