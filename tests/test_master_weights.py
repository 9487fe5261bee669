"""Master weights that Transformer Engine's precision-aware Adam keeps by itself: saved, loaded, following."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import distrib_optimizer
from ranks import run_ranks
from small import WIDE, small_state, text_loader, train
from torch.overrides import TorchFunctionMode

import minloop
from minloop.checkpoint import tensors
from minloop.master_weights import joined, split
from minloop.optimizer import inner_optimizers

REPLICAS: dict[str, Any] = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}


class LikeTransformerEngines(torch.optim.Optimizer):
    """AdamW that keeps bf16 weights' remainders, or fp32 master weights, as Transformer Engine's FusedAdam does."""

    store_param_remainders = True

    def __init__(self, params: Any, **options: Any) -> None:
        own = {"cpu_optimizer_cls": torch.optim.AdamW}  # as mcore's optimizer on the CPU has it in its groups
        super().__init__(params, own | {name: options[name] for name in ("lr", "betas", "eps")})
        assert options["master_weights"]
        assert options["use_decoupled_grad"]

    def initialize_state(self, parameter: Any, store_param_remainders: bool) -> None:
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        master = (
            torch.zeros_like(parameter, dtype=torch.int16) if store_param_remainders else parameter.detach().float()
        )
        self.state[parameter] = {**moments, "master_param": master}

    def get_unscaled_state(self, parameter: Any, name: str) -> torch.Tensor:
        return self.state[parameter][name]

    def set_scaled_state(self, parameter: Any, name: str, value: torch.Tensor) -> None:
        remainders = self.store_param_remainders and name == "master_param" and parameter.dtype == torch.bfloat16
        assert value.dtype == (torch.int16 if remainders else torch.float32)
        self.state[parameter].setdefault(name, torch.empty_like(value)).copy_(value)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, held in state_dict["state"].items():
            self.state[parameters[number]] = {name: value.clone() for name, value in held.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            step, (beta1, beta2) = group.get("step", 0) + 1, group["betas"]
            group["step"] = step
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, self.store_param_remainders)
                state, grad = self.state[parameter], parameter.decoupled_grad
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                master = state["master_param"]
                whole = joined(parameter, master) if self.store_param_remainders else master
                whole.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
                rounded, remainder = split(whole) if self.store_param_remainders else (whole, whole)
                parameter.copy_(rounded)
                master.copy_(remainder)


@contextlib.contextmanager
def precision_aware() -> Generator[None]:
    """While inside, states are built with this Adam, as where Transformer Engine is."""
    build = minloop.build_optimizer_config

    def aware(*args: Any, **options: Any) -> Any:
        config = build(*args, **options)
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        return config

    with contextlib.ExitStack() as stack:
        patched: list[tuple[Any, dict[str, Any]]] = [
            (mcore_optimizer, {"Adam": LikeTransformerEngines, "USING_PYTORCH_OPTIMIZER": False}),
            (distrib_optimizer, {"Adam": LikeTransformerEngines, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
            (minloop, {"build_optimizer_config": aware}),
        ]
        for module, names in patched:
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


class OnHost(TorchFunctionMode):
    """Without a GPU, what mcore would make on it, for ranks that read for each other, is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, missing = kwargs or {}, not torch.cuda.is_available()
        return func(*args, **options | ({"device": "cpu"} if missing and options.get("device") == "cuda" else {}))


def masters(state: Any) -> list[torch.Tensor]:
    """This rank's parts of the fp32 master weights, in the order of the optimizer's parameters."""
    found: list[torch.Tensor] = []
    for outer in inner_optimizers(state.optimizer):
        for weight in (weight for group in outer.optimizer.param_groups for weight in group["params"]):
            master = outer.optimizer.state[weight].get("master_param", weight)
            found.append(joined(weight, master) if master.dtype == torch.int16 else master.detach().clone())
    return found


def weights(state: Any) -> list[torch.Tensor]:
    with minloop.gathered_parameters(state.chunks):
        return [parameter.detach().clone() for parameter in state.chunks[0].parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return [*map(torch.equal, first, second)] == [True] * len(first)


def save_and_load(directory: str, remainders: bool) -> dict[str, bool]:
    LikeTransformerEngines.store_param_remainders = remainders
    options: dict[str, Any] = {"num_layers": 2, "bf16": True, "ddp": REPLICAS}
    with precision_aware(), mock.patch.object(tensors, "_exchange_pays", return_value=True):
        state = small_state(seed=1, **options)
        loader = text_loader(state)
        first, begun = minloop.save_checkpoint(directory, state, loader), masters(state)
        train(state, loader, 3)
        saved, trained = minloop.save_checkpoint(directory, state, loader), masters(state)
        straight = train(state, loader, 3), weights(state)
        with OnHost():
            minloop.load_checkpoint(first, state, weights_only=True)
        followed = masters(state)
        minloop.shutdown_distributed()
        state = small_state(seed=77, **options)
        loader = text_loader(state)
        with OnHost():
            minloop.load_checkpoint(saved, state, loader)
        loaded = masters(state)
        resumed = train(state, loader, 3), weights(state)
        minloop.shutdown_distributed()
    state = small_state(seed=77, **options)
    minloop.load_checkpoint(saved, state)
    others = masters(state)
    minloop.shutdown_distributed()
    return {
        "more than the weights": any(not torch.equal(master, master.bfloat16().float()) for master in trained),
        "loaded": same(loaded, trained),
        "resumed": straight[0] == resumed[0] and same(straight[1], resumed[1]),
        "loaded into another Adam": same(others, trained),
        "followed weights": same(followed, begun),
    }


@pytest.mark.parametrize("remainders", [True, False], ids=["remainders", "whole"])
def test_what_the_optimizer_keeps_itself_is_saved_and_loaded(tmp_path: Path, remainders: bool) -> None:
    for report in run_ranks(4, save_and_load, str(tmp_path), remainders):
        assert report == dict.fromkeys(report, True)


def test_halves_make_the_whole() -> None:
    torch.manual_seed(1)
    master = torch.randn(100_000)
    master[:3] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF], dtype=torch.int32).view(torch.float32)  # two ties
    weight, remainder = split(master)
    assert torch.equal(joined(weight, remainder), master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert weight[:3].view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F80]
    assert torch.equal(weight[3:], master[3:].bfloat16()) or (master[3:].view(torch.int32) & 0xFFFF).eq(0x8000).any()
    assert torch.equal(joined(weight, torch.zeros_like(remainder)), weight.float())


def resumes(directory: str, optimizer: dict[str, Any], ddp: dict[str, Any]) -> bool:
    options: dict[str, Any] = WIDE | {"bf16": True, "deterministic_mode": True, "ddp": ddp}
    options |= {"optimizer": optimizer | {"use_precision_aware_optimizer": True}}
    state = small_state(seed=1, **options)
    loader = text_loader(state)
    train(state, loader, 3)
    pending = minloop.start_save(directory, state, loader)
    straight = train(state, loader, 4)
    pending.wait()
    minloop.shutdown_distributed()
    state = small_state(seed=77, **options)
    loader = text_loader(state)
    minloop.load_checkpoint(directory, state, loader)
    resumed = train(state, loader, 4)
    minloop.shutdown_distributed()
    return straight == resumed


ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
HALVES = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OFFLOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("optimizer", "ddp"),
    [({}, ZERO1), ({"store_param_remainders": False}, ZERO1), (HALVES, ZERO1), (OFFLOADED, ZERO1), ({}, FSDP)],
    ids=["remainders", "whole", "bf16 moments", "offloaded", "Megatron FSDP"],
)
def test_precision_aware_optimizers_resume_bit_for_bit(
    tmp_path: Path, optimizer: dict[str, Any], ddp: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    for name, value in deterministic.items():
        monkeypatch.setenv(name, value)
    assert run_ranks(2, resumes, str(tmp_path), optimizer, ddp) == [True, True]
