"""Checkpoints of fully sharded states: resume bit for bit, change kind and size element by element, in known forms."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.transformer.fsdp_dtensor_checkpoint import flatten_state_dict, handle_swiglu_in_state_dict
from ranks import RankError, run_ranks
from reshard import load_and_save, train_and_save
from safetensors.torch import load_file
from sameness_cases import LLAMA, MAMBA, MOE, SP
from small import small_state, text_loader, train
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import minloop
from minloop.architecture import unwrapped
from minloop.checkpoint import reading, save
from minloop.checkpoint.fully_sharded_state import put_the_rest
from minloop.optimizer import inner_optimizers

GATED: dict[str, Any] = {"gated_linear_unit": True}
BF16: dict[str, Any] = {"bf16": True, **GATED}
TORCH: dict[str, Any] = {"reshard_after_forward": True}
ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
REPLICAS: dict[str, Any] = {"num_distributed_optimizer_instances": 2}


def megatron(strategy: str = "optim_grads_params", **fields: Any) -> dict[str, Any]:
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy, **fields}


def hybrid(config: Any, groups: Any, **sizes: Any) -> Any:
    return minloop.build_hybrid_model(config, groups, hybrid_layer_pattern="M*", **sizes)


ON_TWO: dict[str, dict[str, Any]] = {
    "no_shard": {"ddp": megatron("no_shard"), **BF16},
    "optim": {"ddp": megatron("optim"), **BF16},
    "optim_grads, fp32, tied": {"ddp": megatron("optim_grads"), "gpt": {"share_embeddings_and_output_weights": True}},
    "optim_grads_params": {"ddp": megatron(), **BF16},
    "optim_grads_params, double buffer": {"ddp": megatron(fsdp_double_buffer=True)},
    "FSDP2": {"ddp": TORCH, **BF16},
    "FSDP2, fp32, weights stay": {"ddp": {"reshard_after_forward": False}},
    "FSDP2, Mamba": {"ddp": TORCH, "build": hybrid, "is_hybrid_model": True, **LLAMA, **MAMBA},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "HSDP": {"ddp": megatron(**REPLICAS), **BF16},
    "HSDP, optimizer states over all": {"ddp": megatron(outer_dp_sharding_strategy="optim", **REPLICAS), **BF16},
    "EP2, expert bias": {
        "ddp": megatron(),
        "expert_model_parallel_size": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        **MOE,
        **BF16,
    },
}


def resume(directory: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """What follows a save in the background, in the state saved, in another one, and in one that has gone on."""
    history: list[Any] = []
    pending: Any = None
    for seed in (1, 77):
        state = small_state(seed=seed, num_layers=2, scheduler={"train_iters": 8, "lr_warmup_iters": 3}, **options)
        loader, validation = text_loader(state), text_loader(state)
        if seed == 1:
            train(state, loader, 1)
            pending = minloop.start_save(directory, state, loader)
        else:
            minloop.load_checkpoint(directory, state, loader)
        for _ in range(seed // 77 + 1):
            loss = minloop.eval_step(state, iter(validation), num_microbatches=1).loss.item()
            history.append([loss, *train(state, loader, 2), bits(state)])
            if seed == 77:
                minloop.load_checkpoint(directory, state, loader)
                validation = text_loader(state)
        if seed == 1:
            pending.wait()
        minloop.shutdown_distributed()
    straight, *loaded = history
    return [straight] * 2, loaded


def bits(state: minloop.TrainState) -> dict[str, bytes]:
    """The weights, and buffers, of a state that can show them in full."""
    buffers = dict(unwrapped(state.chunks[0]).named_buffers())
    weights = {} if state.chunks[0].ddp_config.fsdp_double_buffer else minloop.full_weights(state)
    held: dict[str, Any] = {**weights, **buffers}
    return {name: x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for name, x in held.items()}


def resume_each(directory: str, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: resume(f"{directory}/{name}", options) for name, options in cases.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_resumes_bitwise(tmp_path: Path, ranks: int) -> None:
    for rank in run_ranks(ranks, resume_each, str(tmp_path), ON_TWO if ranks == 2 else ON_FOUR, timeout=300):
        for name, (straight, loaded) in rank.items():
            assert straight == loaded, name


def tensors_of(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by the names of torch_dist, in float32; master weights as "master.…"."""
    opened = reading.read_checkpoint(minloop.latest_checkpoint(directory) or Path())
    tensors: dict[str, torch.Tensor] = {}
    for index in opened.metadata.storage_data:
        entry: Any = opened.metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, BytesStorageMetadata):
            continue
        full = tensors.setdefault(index.fqn, torch.full(entry.size, torch.nan))
        part = reading.read_part(opened, index)
        place = zip(index.offset or (), part.shape, strict=True)
        full[tuple(slice(at, at + size) for at, size in place)] = part.float()
    for name in [*tensors]:
        for prefix in ("optimizer.state.param.", "optimizer.state.fp32_param."):
            if name.startswith(prefix):
                tensors["master." + name.removeprefix(prefix)] = tensors.pop(name)
        if not name.startswith("optimizer."):  # those of Megatron FSDP are the master weights
            tensors[name] = tensors[name].bfloat16().float()
    return tensors


def test_a_chain_of_kinds_leads_back(tmp_path: Path) -> None:
    chain: list[tuple[int, dict[str, Any]]] = [
        (2, {"ddp": TORCH}),
        (2, {"ddp": ZERO1 | {"bucket_size": 3000}}),
        (1, {"ddp": megatron()}),
        (2, {"ddp": megatron("optim")}),
        (1, {"ddp": {}}),
        (2, {"ddp": megatron(), "tensor_model_parallel_size": 2, **SP}),
        (2, {"ddp": TORCH, "tensor_model_parallel_size": 2, **SP}),
        (2, {"ddp": TORCH}),
    ]
    run_ranks(2, train_and_save, str(tmp_path / "0"), chain[0][1] | BF16)
    first = tensors_of(tmp_path / "0")
    assert sum(name.startswith("master.") for name in first) == sum(".exp_avg_sq." in name for name in first) > 15
    for number, (ranks, options) in enumerate(chain[1:], start=1):
        run_ranks(ranks, load_and_save, str(tmp_path / str(number - 1)), str(tmp_path / str(number)), options | BF16)
        found = tensors_of(tmp_path / str(number))
        assert found.keys() == first.keys()
        assert not [name for name, tensor in first.items() if not torch.equal(tensor, found[name])], number
    steps = [reading.read_checkpoint(tmp_path / str(n) / "iter_0000003").common["optimizer"] for n in range(len(chain))]
    assert [saved_steps(step) for step in steps] == [{3.0}] * len(chain)


def saved_steps(content: Any) -> set[float]:
    """The values of all "step" and "common_step" in it."""
    if isinstance(content, dict):
        own = {float(value) for key, value in content.items() if key in ("step", "common_step")}
        return own.union(*map(saved_steps, content.values()))
    return set[float]().union(*map(saved_steps, content)) if isinstance(content, list) else set()


def save_and_read_with(directory: str, ddp: dict[str, Any]) -> list[str]:
    """Names of what mcore's own functions (or torch's), and DCP, read otherwise than it is in the state saved."""
    state = small_state(ddp=ddp, **(GATED if ddp == TORCH else BF16))
    train(state, text_loader(state), 2)
    path = minloop.save_checkpoint(directory, state)
    chunk: Any = state.chunks[0]
    (inner,) = inner_optimizers(state.optimizer)
    if ddp == TORCH:
        model: Any = unwrapped(chunk)
        content = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, inner.optimizer)}
    else:
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        optimizer = state.optimizer.sharded_state_dict({}, metadata=metadata)
        halves = handle_swiglu_in_state_dict(chunk.module, chunk.state_dict_for_save_checkpoint(), optimizer)
        content = dict(zip(("model", "optimizer"), halves, strict=True))
        preprocess_state_dict_for_uneven_dtensor(content)
    tensors = {name: x for name, x in flatten_state_dict(content).items() if hasattr(x, "to_local") and x.numel()}
    own = {name: tensor.detach().to_local().clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.detach().to_local().fill_(torch.nan)
    load(tensors, checkpoint_id=str(path))
    wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor.detach().to_local(), own[name])]
    saved = reading.read_metadata(path).state_dict_metadata
    missing = [name for name in saved if name.startswith(("model.", "optimizer.")) and name not in tensors]
    minloop.shutdown_distributed()
    return [*wrong, *missing, *([] if len(tensors) > 40 else ["few tensors"])]


@pytest.mark.parametrize("ddp", [megatron(), TORCH], ids=["fsdp_dtensor", "torch_dcp"])
def test_the_formats_own_readers_read_it(tmp_path: Path, ddp: dict[str, Any]) -> None:
    assert run_ranks(2, save_and_read_with, str(tmp_path), ddp) == [[], []]
    assert minloop.describe_checkpoint(tmp_path).format == ("torch_dcp" if ddp is TORCH else "fsdp_dtensor")


class LikeTransformerEngines(torch.nn.Linear):
    """A layer with extra state of two experts, which a checkpoint holds under a key for each."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.states: list[Any] = []
        self.register_load_state_dict_pre_hook(self.merge)

    def merge(self, _: Any, states: dict[str, Any], prefix: str, *__: Any) -> None:
        states[f"{prefix}_extra_state"] = [states.pop(f"{prefix}_extra_state"), states.pop(f"{prefix}_extra_state1")]

    def set_extra_state(self, state: Any) -> None:
        self.states = state


def test_extra_states_of_experts_are_put_together() -> None:
    layer, buffer = LikeTransformerEngines(), torch.nn.BatchNorm1d(1)
    weight = layer.weight.detach().clone()
    first, second, mean = torch.ones(1), torch.ones(2), torch.ones(1)
    loaded = {"0._extra_state": first, "0._extra_state1": second, "1.running_mean": mean}
    put_the_rest(torch.nn.Sequential(layer, buffer), loaded)
    assert [state is own for state, own in zip(layer.states, (first, second), strict=True)] == [True, True]
    assert torch.equal(layer.weight, weight)
    assert buffer.running_mean is not None
    assert torch.equal(buffer.running_mean, mean)


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_be_killed(directory: str) -> None:
    state = small_state(ddp=megatron(), **BF16)
    minloop.save_checkpoint(directory, state)
    train(state, text_loader(state), 1)
    with mock.patch.object(save, "commit", be_killed):
        minloop.save_checkpoint(directory, state)


def load_weights_alone(directory: str) -> list[str]:
    """Weights that DDP does not have after loading them, from a checkpoint and from what was exported of it."""
    state = small_state(seed=5, **BF16)
    minloop.load_checkpoint(directory, state, weights_only=True)
    exported = load_file(minloop.export_weights(directory, f"{directory}/exported", dtype=torch.bfloat16))
    loaded = {name: weight.clone() for name, weight in minloop.named_full_parameters(state)}
    minloop.shutdown_distributed()
    parts = {
        (name, number): part
        for name, tensor in exported.items()
        for number, part in enumerate(tensor if ".layers." in name else [tensor])
    }
    return [name for name in loaded if not any(torch.equal(loaded[name].cpu(), part) for part in parts.values())]


def test_a_save_that_is_killed_leaves_the_former(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, save_and_be_killed, str(tmp_path))
    assert minloop.latest_checkpoint(tmp_path) == tmp_path / "iter_0000000"
    assert not minloop.verify_checkpoint(tmp_path / "iter_0000000")
    assert run_ranks(1, load_weights_alone, str(tmp_path)) == [[]]
    metadata = tmp_path / "iter_0000000" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"sharded_backend": "torch_dist"}))
    assert "model.module.output_layer.weight" in minloop.describe_checkpoint(metadata.parent).weights


def with_a_frozen_layer(config: Any, groups: Any, **sizes: Any) -> Any:
    chunks = minloop.build_gpt_model(config, groups, **sizes)
    for name, parameter in chunks[0].named_parameters():
        parameter.requires_grad_(".layers.0." not in name)
    return chunks


def freeze_and_thaw(directory: str) -> list[bool]:
    """Whether what was saved with a frozen layer resumes so, and what is said where the layer is trained."""
    train_and_save(directory, {"ddp": megatron(), "build": with_a_frozen_layer, **BF16})
    load_and_save(directory, f"{directory}/again", {"ddp": TORCH, "build": with_a_frozen_layer, **BF16})
    ours, again = tensors_of(directory), tensors_of(f"{directory}/again")
    refused: list[bool] = []
    for ddp in (TORCH, ZERO1):
        state = small_state(ddp=ddp, **BF16)
        with pytest.raises(ValueError, match=r"lacks .* all of the optimizer"):
            minloop.load_checkpoint(f"{directory}/again", state)
        refused.append(True)
        minloop.shutdown_distributed()
    return [torch.equal(ours[name].nan_to_num(7.0), again[name].nan_to_num(7.0)) for name in ours] + refused


def test_layers_frozen_at_the_save_are_not_taken_for_trained_ones(tmp_path: Path) -> None:
    (same,) = run_ranks(1, freeze_and_thaw, str(tmp_path))
    assert all(same)
    assert len(same) > 60


def freeze_and_go_on(directory: str, ddp: dict[str, Any], model: dict[str, Any]) -> list[bool]:
    """Whether a state with a frozen layer goes on from its checkpoint, and is not taken for one that is trained."""
    state = small_state(num_layers=2, ddp=ddp, build=with_a_frozen_layer, **model)
    loader = text_loader(state)
    train(state, loader, 1)
    minloop.save_checkpoint(directory, state, loader)
    expected = torch.tensor(train(state, loader, 1))
    minloop.shutdown_distributed()
    gone_on: list[bool] = []
    for other in (ddp, ZERO1):
        state = small_state(num_layers=2, seed=2, ddp=other, build=with_a_frozen_layer, **model)
        loader = text_loader(state)
        minloop.load_checkpoint(directory, state, loader)
        gone_on.append(torch.allclose(torch.tensor(train(state, loader, 1)), expected, rtol=1e-6))
        minloop.shutdown_distributed()
    state = small_state(num_layers=2, ddp=ddp, **model)
    with pytest.raises(ValueError, match=r"lacks .* all of the optimizer"):
        minloop.load_checkpoint(directory, state)
    minloop.shutdown_distributed()
    return gone_on


def freeze_each(directory: str) -> list[bool]:
    gated: dict[str, Any] = {"gated_linear_unit": True, **BF16}
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), (ZERO1, {}), ({}, gated)]
    return [same for number, kind in enumerate(kinds) for same in freeze_and_go_on(f"{directory}/{number}", *kind)]


def test_layers_frozen_without_fsdp_leave_holes(tmp_path: Path) -> None:
    for same in run_ranks(2, freeze_each, str(tmp_path)):
        assert same == [True] * 6
    assert minloop.verify_checkpoint(tmp_path / "0" / "iter_0000001") == []


def load_what_does_not_fit(source: str) -> list[str]:
    said: list[str] = []
    for hidden_size, expected in ((64, "another architecture"), (32, "lacks .* tensors")):
        state = small_state(ddp=TORCH, hidden_size=hidden_size)
        with pytest.raises(ValueError, match=expected) as raised:
            minloop.load_checkpoint(source, state)
        said.append(str(raised.value))
        minloop.shutdown_distributed()
    return said


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, train_and_save, str(tmp_path), {"optimizer": {"optimizer": "sgd"}}, 1)
    architecture, optimizer = run_ranks(1, load_what_does_not_fit, str(tmp_path))[0]
    assert "hidden_size: 32 saved, 64 here" in architecture
    assert "all of the optimizer; load_checkpoint(weights_only=True) begins with a new one" in optimizer
    path = tmp_path / "iter_0000001"
    metadata = path / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"sharded_backend": "torch_dcp"}))
    with pytest.raises(minloop.CheckpointError, match="holds no table of its names"):
        minloop.describe_checkpoint(path)
