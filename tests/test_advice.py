"""What is said of the environment, which minloop never sets."""

from typing import Any

import pytest

import minloop
from minloop.advice import environment_advice, say_choices

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {
    **{"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False, "bf16": True},
    **{"expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True, "add_bias_linear": False},
}
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("fields", "ranks", "capability", "environment", "said"),
    [
        ({}, 1, HOPPER, {}, []),
        ({"tensor_model_parallel_size": 2}, 1, HOPPER, {}, ["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
        ({"tensor_model_parallel_size": 2}, 1, HOPPER, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, []),
        (
            {"context_parallel_size": 2},
            2,
            HOPPER,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
            ["CUDA_DEVICE_MAX_CONNECTIONS=1"],
        ),
        ({"tensor_model_parallel_size": 2}, 1, BLACKWELL, {}, []),
        (EXPERTS, 1, BLACKWELL, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["such as 32"]),
        (
            EXPERTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            1,
            HOPPER,
            {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
            [],
        ),
        (EXPERTS, 1, HOPPER, {}, []),
    ],
)
def test_advice_follows_layout_chip_and_environment(
    fields: dict[str, Any], ranks: int, capability: tuple[int, int], environment: dict[str, str], said: list[str]
) -> None:
    config = minloop.build_config(**MODEL, **fields, transformer_impl="local")
    config.transformer_impl = "transformer_engine"  # which cannot be built without a GPU
    margins = dict.fromkeys(("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN"), "16")
    advice = environment_advice(
        config,
        minloop.build_ddp_config(config),
        data_parallel_size=ranks,
        capability=capability,
        environment=environment | margins,
    )
    assert len(advice) == len(said)
    assert all(part in line for part, line in zip(said, advice, strict=True))


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fields", "name"),
    [({"use_megatron_fsdp": True}, "use_megatron_fsdp=True"), ({"reshard_after_forward": True}, "FSDP2")],
)
def test_fully_sharded_models_want_many_connections(
    fields: dict[str, Any], name: str, tp: int, capability: tuple[int, int]
) -> None:
    config = minloop.build_config(**MODEL, tensor_model_parallel_size=tp, gradient_accumulation_fusion=False)
    config.transformer_impl = "transformer_engine"
    given: dict[str, Any] = {"data_parallel_size": 1, "capability": capability}
    ddp_config = minloop.build_ddp_config(config, **fields)
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    (said,) = environment_advice(config, ddp_config, **given, environment=one)
    assert f"{name}: leave CUDA_DEVICE_MAX_CONNECTIONS unset" in said
    assert not environment_advice(config, ddp_config, **given, environment={})


def test_norms_leave_room_for_communication_and_slow_layers_are_named() -> None:
    config = minloop.build_config(**MODEL, transformer_impl="local")
    ddp_config = minloop.build_ddp_config(config)
    (local,) = environment_advice(config, ddp_config, data_parallel_size=2, capability=HOPPER, environment={})
    assert "Transformer Engine is not installed" in local or "'local' was asked for" in local
    config.transformer_impl = "transformer_engine"
    (margins,) = environment_advice(config, ddp_config, data_parallel_size=2, capability=HOPPER, environment={})
    assert "NVTE_FWD_LAYERNORM_SM_MARGIN=16 NVTE_BWD_LAYERNORM_SM_MARGIN=16" in margins
    assert not environment_advice(config, ddp_config, data_parallel_size=1, capability=HOPPER, environment={})


def test_experts_one_after_another_want_cutlass() -> None:
    config = minloop.build_config(**MODEL, num_moe_experts=4, bf16=True, add_bias_linear=False)
    config.transformer_impl, config.moe_grouped_gemm = "transformer_engine", True  # of a GPU with Transformer Engine
    config.gradient_accumulation_fusion = False
    ddp_config = minloop.build_ddp_config(config)
    given: dict[str, Any] = {"data_parallel_size": 1, "capability": HOPPER, "environment": {}}
    (said,) = environment_advice(config, ddp_config, **given)
    assert "NVTE_USE_CUTLASS_GROUPED_GEMM=1" in said
    given["environment"] = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    assert not environment_advice(config, ddp_config, **given)
    config.gradient_accumulation_fusion = True
    given["environment"] = {}
    assert not environment_advice(config, ddp_config, **given)


def test_without_a_gpu_steps_are_launched_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    for fields in ({}, {"cuda_graph_impl": "full_iteration"}, {"cuda_graph_impl": "full_iteration"}):
        config = minloop.build_config(**MODEL, **dropout, **fields)
        say_choices(config, minloop.build_ddp_config(config, check_for_nan_in_grad=False), 1)
    (said,) = caplog.messages
    assert "cuda_graph_impl='full_iteration', but there is no GPU: steps run without graphs" in said
