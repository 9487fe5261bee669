"""What mcore would train wrongly by, or fail at without a name, is refused where a model is wrapped or steps."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small import small_config, small_state, text_loader, train

import minloop
from minloop.wrapping_checks import check_fused_gradients

ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
MEGATRON: dict[str, Any] = {"use_megatron_fsdp": True}
TORCH: dict[str, Any] = {"reshard_after_forward": True}
REPLICAS: dict[str, Any] = {"num_distributed_optimizer_instances": 2}


def said_by(error: type[Exception], function: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(error) as raised:
        function(*args, **options)
    return str(raised.value)


def wrap(instances: int, ddp: dict[str, Any], change: Callable[[Any], object] = lambda chunk: None) -> list[Any]:
    config = small_config(num_layers=1, gradient_accumulation_fusion=False)
    groups = minloop.init_distributed(config, seed=1, num_distributed_optimizer_instances=instances)
    chunks = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=32)
    change(chunks[0])
    ddp_config = minloop.build_ddp_config(config, **ddp)
    fully = ddp_config.use_megatron_fsdp or "reshard_after_forward" in ddp
    once: list[Any] = [*(minloop.wrap_fsdp if fully else minloop.wrap_ddp)(chunks, ddp_config, groups)]
    for again in (minloop.wrap_fsdp, minloop.wrap_ddp) if fully else (minloop.wrap_ddp,):
        other = ddp_config if again is minloop.wrap_fsdp else minloop.build_ddp_config(config)
        assert "wrapped already" in said_by(ValueError, again, once, other, groups)
    return once


@pytest.mark.parametrize(
    ("strategy", "ranks", "experts", "message"),
    [
        ("optim", 2, None, "strategy='optim', where"),
        ("optim_grads_params", 1, None, "'optim_grads_params' and one data parallel rank, where"),
        ("optim_grads", 2, 4, "and one expert data parallel rank, where"),
        ("optim_grads", 2, None, None),
        ("no_shard", 1, None, None),
    ],
)
def test_fused_gradients_that_megatron_fsdp_would_lose(
    strategy: str, ranks: int, experts: int | None, message: str | None
) -> None:
    config = SimpleNamespace(gradient_accumulation_fusion=True, num_moe_experts=experts)
    ddp_config = SimpleNamespace(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy)
    sizes = {"intra_dp_cp": ranks, "intra_expt_dp": 1}
    groups = SimpleNamespace(**{name: SimpleNamespace(size=partial(int, size)) for name, size in sizes.items()})
    if message is not None:
        assert message in said_by(ValueError, check_fused_gradients, config, ddp_config, groups)
        config.gradient_accumulation_fusion = False
    check_fused_gradients(config, ddp_config, groups)


def freeze_weights(chunk: torch.nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(not name.endswith("weight"))


def add_unused(chunk: Any) -> None:
    chunk.lonely = torch.nn.Linear(4, 4).cuda()


def refusals() -> dict[str, str]:
    """What each kind says to groups of another number of replicas, to biases of frozen weights, to unused ones."""
    said: dict[str, str] = {}
    for kind, ddp in {"ZeRO-1": ZERO1, "Megatron FSDP": MEGATRON}.items():
        for made, asked in ((2, {}), (1, REPLICAS)):
            said[f"groups {kind} {made}"] = said_by(ValueError, wrap, made, ddp | asked)
            minloop.shutdown_distributed()
    for kind, ddp in {"DDP": {}, "Megatron FSDP": MEGATRON, "FSDP2": TORCH}.items():
        said[f"bias {kind}"] = said_by(ValueError, wrap, 1, ddp, freeze_weights)
        minloop.shutdown_distributed()
        wrap(1, ddp)
        minloop.shutdown_distributed()
    for ddp in ({}, ZERO1):
        state = small_state(num_layers=1, ddp=ddp, gpt={"before_wrapping": add_unused})
        said[f"unused {ddp}"] = said_by(RuntimeError, train, state, text_loader(state), 1)
        minloop.shutdown_distributed()
    state = small_state(num_layers=1, ddp={"overlap_grad_reduce": False}, gpt={"before_wrapping": add_unused})
    train(state, text_loader(state), 2)
    return said


def test_what_would_train_wrongly_is_refused_by_name() -> None:
    starts = {
        "groups": "num_distributed_optimizer_instances is",
        "bias": "decoder.layers.0.self_attention.linear_qkv.bias of frozen weights",
        "unused": "lonely.weight, lonely.bias got no gradient",
    }
    for said in run_ranks(2, refusals):
        assert len(said) == 9
        for what, message in said.items():
            assert message.startswith(starts[what.split()[0]]), what


def replicas_that_do_not_divide() -> None:
    for instances in (0, 2, 3):
        message = rf"num_distributed_optimizer_instances \({instances}\) does not divide the 1 data and context"
        with pytest.raises(ValueError, match=message):
            minloop.init_distributed(small_config(), seed=1, num_distributed_optimizer_instances=instances)


def test_replicas_divide_the_ranks() -> None:
    run_ranks(1, replicas_that_do_not_divide)
