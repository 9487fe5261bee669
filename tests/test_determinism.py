"""Runs repeat bit by bit, with dropout, in every kind of layout; what is replicated stays equal on all ranks."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankError, run_ranks
from small import small_config, small_state, text_loader, train

import minloop
from minloop.determinism import check_deterministic_environment

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": TP,
    "TP2+SP": TP | {"sequence_parallel": True},
    "PP2 VPP2": PP | {"virtual_pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "DP2 distributed optimizer": {"ddp": {"use_distributed_optimizer": True}},
    "EP2": EXPERTS,
}


def run(fields: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[bool]]:
    """Losses and gradient norms of three steps with dropout; this rank's weights after them; what torch was told."""
    state = small_state(hidden_dropout=0.2, attention_dropout=0.2, deterministic_mode=True, **fields)
    inside = torch.are_deterministic_algorithms_enabled()
    history = torch.tensor(train(state, text_loader(state), steps=3), dtype=torch.float64)
    minloop.check_replicas(state)
    with minloop.gathered_parameters(state.chunks):
        weights = {
            f"{index}.{name}": parameter.detach().clone()
            for index, chunk in enumerate(state.chunks)
            for name, parameter in chunk.named_parameters()
        }
    minloop.shutdown_distributed()
    return history, weights, [inside, torch.are_deterministic_algorithms_enabled()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_are_equal_bit_by_bit(layout: str) -> None:
    first, second = run_ranks(2, run, LAYOUTS[layout]), run_ranks(2, run, LAYOUTS[layout])
    for (history, weights, told), (history_again, weights_again, _) in zip(first, second, strict=True):
        assert told == [True, False]
        assert torch.equal(history, history_again)
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
        assert len(weights) > 10


def build_without_init(**fields: Any) -> None:
    groups = minloop.init_distributed(small_config(), seed=1)
    minloop.build_gpt_model(
        small_config(deterministic_mode=True), groups, vocab_size=256, max_sequence_length=32, **fields
    )


def test_a_model_needs_what_init_distributed_sets() -> None:
    with pytest.raises(RankError, match="deterministic_mode=True, but torch does not use deterministic algorithms"):
        run_ranks(1, build_without_init)


@pytest.mark.parametrize("field", ["cross_entropy_loss_fusion", "tp_comm_overlap"])
def test_fields_that_are_not_deterministic_are_refused(field: str) -> None:
    parallel: dict[str, Any] = TP | {"sequence_parallel": True, "deterministic_mode": True, field: True}
    with pytest.raises(ValueError, match=f"deterministic_mode=True with {field}=True"):
        small_config(**parallel)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, r"needs CUBLAS_WORKSPACE_CONFIG=:4096:8 \(it is not set\), NCCL_ALGO=Ring \(it is not set\): "),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring,Tree"}, r"needs NCCL_ALGO=Ring \(it is Ring,Tree\)"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^NVLS"}, None),
    ],
)
def test_on_a_gpu_the_environment_is_asked_for(environment: dict[str, str], message: str | None) -> None:
    config = small_config(deterministic_mode=True, transformer_impl="local")
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=2),
        mock.patch("torch.distributed.get_backend_config", return_value="cpu:gloo,cuda:nccl"),
    ):
        if message is None:
            check_deterministic_environment(config)
            return
        with pytest.raises(RuntimeError, match=message):
            check_deterministic_environment(config)
