"""Megatron FSDP and torch FSDP2: they train as DDP does, or are refused by name."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from ranks import run_ranks
from sameness_cases import MOE, RECIPE, SP
from small import MICRO_BATCH_SIZE, WIDE, rounding, small_config, small_state, text_loader, train

import minloop
from minloop import fsdp_checks
from minloop.optimizer import check_optimizer_config

STEPS, TOLERANCE = 20, rounding(2e-6)


def megatron(strategy: str = "optim_grads_params", **fields: Any) -> dict[str, Any]:
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy} | fields


TORCH: dict[str, Any] = {"reshard_after_forward": True}
REPLICAS: dict[str, Any] = {"num_distributed_optimizer_instances": 2}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "expert_model_parallel_size": 2}
EP2: dict[str, Any] = MOE | {"expert_model_parallel_size": 2}
HYBRID: dict[str, Any] = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 32, "transformer_impl": "local"}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, **SP}

ON_TWO: dict[str, tuple[dict[str, Any], int]] = {
    "no_shard": (megatron("no_shard"), 2),
    "optim": (megatron("optim"), 1),
    "optim, no overlap": (megatron("optim", overlap_grad_reduce=False), 2),
    "optim_grads": (megatron("optim_grads"), 1),
    "optim_grads_params": (megatron(), 4),
    "optim_grads_params, 4 microbatches": (megatron(), 1),
    "double buffer": (megatron(fsdp_double_buffer=True), 2),
    "FSDP2": (TORCH, 1),
    "FSDP2, weights stay": ({"reshard_after_forward": False}, 4),
}
"""(DDP config, micro batch size)"""

BESIDE: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    1: {"one rank, 4 microbatches": (megatron(), {})},
    2: {"EP2 without replicas, 4 microbatches": (megatron(), EP2 | {"size": 1})},
    4: {
        "TP2": (megatron(), TP2),
        "TP2, FSDP2": (TORCH, TP2),
        "EP2": (megatron(), EP2),
        "HSDP": (megatron(**REPLICAS), {}),
        "HSDP, optimizer states over all": (megatron(outer_dp_sharding_strategy="optim", **REPLICAS), {}),
        "HSDP, optim": (megatron("optim", **REPLICAS), {}),
    },
}
"""By number of ranks: (DDP config, other options)"""


def token_forward(data: Any, model: torch.nn.Module) -> Any:
    """A forward step of one's own, whose number of tokens nobody knows beforehand."""
    return minloop.gpt_forward_step(data, model)


def observe(size: int = MICRO_BATCH_SIZE, steps: int = STEPS, **options: Any) -> dict[str, torch.Tensor]:
    """Losses and gradient norms, [steps, 2]; validation losses after each of three steps; the first step's changes."""
    state = small_state(**(RECIPE | options))
    loader, validation = text_loader(state, size), iter(text_loader(state, size))
    count = minloop.num_microbatches(8, size, state.groups)
    seen: dict[str, Any] = {"history": [], "validation": []}
    readable = not options.get("ddp", {}).get("fsdp_double_buffer")
    before, changes = minloop.full_weights(state) if readable else {}, list[torch.Tensor]()
    for step in range(steps):
        if step == steps - 1:
            metrics = minloop.train_step(state, loader, num_microbatches=count, forward_step=token_forward)
        else:
            metrics = minloop.train_step(state, loader, num_microbatches=count)
        assert metrics.grad_norm is not None
        seen["history"].append([metrics.loss.item(), metrics.grad_norm.item()])
        if step == 0 and readable:
            after = minloop.full_weights(state)
            changes = [(after[name] - before[name]).flatten() for name in sorted(after)]
        if step < 3:
            seen["validation"].append(minloop.eval_step(state, validation, num_microbatches=count).loss.item())
    if options.get("ddp") and readable:
        check_weights_travel(state)
    minloop.shutdown_distributed()
    assert not get_global_memory_buffer().buffer  # of layers, with fsdp_double_buffer
    seen = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.items()}
    return seen | ({"change": torch.cat(changes)} if changes else {})


def check_weights_travel(state: minloop.TrainState) -> None:
    """Weights leave and enter a fully sharded model in full, and shards and master weights follow."""
    minloop.check_replicas(state)
    doubled = [(name, 2 * weight) for name, weight in minloop.named_full_parameters(state)]
    minloop.load_full_parameters(state, doubled)
    loaded = {name: weight.clone() for name, weight in minloop.named_full_parameters(state)}
    assert all(torch.equal(loaded[name], weight) for name, weight in doubled)
    # an update keeps what was loaded, which it would not if the master weights were the old ones
    for group in state.optimizer.param_groups:
        group["lr"] = 0.0
    train(state, text_loader(state), 1)
    after = {name: weight.clone() for name, weight in minloop.named_full_parameters(state)}
    assert all(torch.equal(after[name], weight) for name, weight in doubled)


def differences(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative ones: the largest of all losses and norms, and that of the whole vector of changes."""
    return {
        name: ((value - reference[name]).abs() / reference[name]).max().item()
        if name != "change"
        else ((value - reference[name]).norm() / reference[name].norm()).item()
        for name, value in found.items()
    }


def all_on_two() -> dict[str, dict[str, float]]:
    references = {size: observe(size) for size in (1, 2, 4)}
    found = {f"DDP, {size}": differences(reference, references[2]) for size, reference in references.items()}
    found = {name: {"history": difference["history"]} for name, difference in found.items()}
    return found | {name: differences(observe(size, ddp=ddp), references[size]) for name, (ddp, size) in ON_TWO.items()}


def test_every_kind_trains_as_ddp_does() -> None:
    for name, difference in run_ranks(2, all_on_two)[0].items():
        worst = max(difference, key=lambda key: difference[key])
        print(f"{name}: {worst} by {difference[worst]:.1e}")
        assert difference[worst] < TOLERANCE, name


def thin_and_whole(ddp: dict[str, Any], **model: Any) -> tuple[list[Any], list[Any]]:
    """(loss, gradient norm) of each step with layers that a rank built in part, and with whole ones."""
    histories: list[Any] = []
    for thin in (True, False):
        state = small_state(ddp=ddp, init_model_with_meta_device=thin, **(RECIPE | model))
        histories.append(train(state, text_loader(state), 4))
        minloop.shutdown_distributed()
    return histories[0], histories[1]


def all_thin() -> list[tuple[list[Any], list[Any]]]:
    config = small_config(init_model_with_meta_device=True)
    groups = minloop.init_distributed(config, seed=1)
    (chunk,) = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=32)
    for name, parameter in chunk.named_parameters():
        assert parameter.is_meta == (".layers." in name), name
    minloop.shutdown_distributed()
    double_buffer = megatron(fsdp_double_buffer=True)
    kinds = (megatron("optim"), megatron("optim_grads"), double_buffer, TORCH)
    bf16: dict[str, Any] = {"bf16": True}
    return [thin_and_whole(ddp) for ddp in kinds] + [
        thin_and_whole(megatron(), **EP2, **bf16),
        thin_and_whole(TORCH, **MOE),
    ]


def test_layers_built_in_parts_are_the_same_weights() -> None:
    for thin, whole in run_ranks(2, all_thin)[0]:
        assert thin == whole
        assert thin[-1] != thin[0]


def load_weights_into(directory: str) -> list[bool]:
    """Whether each kind, built with other weights, has those of a checkpoint of DDP after loading them, and keeps them.

    An update of learning rate 0 writes the master weights over the model's.
    """
    source = small_state()
    minloop.save_checkpoint(directory, source)
    expected, same = minloop.full_weights(source), list[bool]()
    minloop.shutdown_distributed()
    for ddp in (megatron("no_shard"), megatron("optim"), megatron(), TORCH):
        state = small_state(seed=2, ddp=ddp, lr=0.0)
        minloop.load_checkpoint(directory, state, weights_only=True)
        train(state, text_loader(state), 1)
        weights = minloop.full_weights(state)
        same.append(all(torch.equal(weights[name], weight) for name, weight in expected.items()))
        minloop.shutdown_distributed()
    return same


def test_weights_of_a_checkpoint_enter_every_kind(tmp_path: Path) -> None:
    assert run_ranks(2, load_weights_into, str(tmp_path))[0] == [True] * 4


def all_beside(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, float]]:
    references: dict[str, Any] = {}
    found: dict[str, dict[str, float]] = {}
    for name, (ddp, options) in cases.items():
        key = str(options)
        references[key] = references.get(key) or observe(steps=5, **options)
        found[name] = differences(observe(steps=5, ddp=ddp, **options), references[key])
    return found


@pytest.mark.parametrize("ranks", BESIDE)
def test_beside_other_parallelism_and_within_replicas(ranks: int) -> None:
    for name, difference in run_ranks(ranks, all_beside, BESIDE[ranks])[0].items():
        worst = max(difference, key=lambda key: difference[key])
        print(f"{name}: {worst} by {difference[worst]:.1e}")
        assert difference[worst] < TOLERANCE, name


def refusals() -> list[str]:
    """What a fully sharded state, and `wrap_fsdp`, say to what they cannot do."""
    said: list[str] = []

    def expect(error: type[Exception], function: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(error) as raised:
            function(*args, **options)
        said.append(str(raised.value))

    state = small_state(ddp=TORCH)
    expect(ValueError, minloop.full_gradients, state)
    expect(ValueError, minloop.begin_step, state)
    expect(ValueError, minloop.offload, state)
    expect(ValueError, minloop.onload, state)
    expect(ValueError, minloop.record_layout, state, text_loader(state), num_microbatches=1)
    minloop.shutdown_distributed()
    config = small_config(gradient_accumulation_fusion=False)
    expect(
        ValueError,
        minloop.compare_layouts,
        lambda config: small_state(config=config, ddp=megatron()),
        config,
        config,
        text_loader,
        global_batch_size=8,
        micro_batch_size=2,
    )
    expect(ValueError, small_state, ddp=TORCH, gpt={"share_embeddings_and_output_weights": True})
    offload = {
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
        "optimizer_offload_fraction": 1.0,
    }
    expect(ValueError, small_state, ddp=megatron(), optimizer=offload)
    minloop.shutdown_distributed()
    half = small_config(bf16=True)
    ddp_config = minloop.build_ddp_config(half, use_distributed_optimizer=True)
    optimizer_config = minloop.build_optimizer_config(half, ddp_config, lr=1.0, **offload)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        expect(ValueError, check_optimizer_config, optimizer_config, half, ddp_config)
    expect(ValueError, small_state, ddp=megatron(), optimizer={"optimizer": "sgd"})
    minloop.shutdown_distributed()
    groups = minloop.init_distributed(config, seed=1)
    model = minloop.build_gpt_model(config, groups, vocab_size=256, max_sequence_length=32)
    expect(ValueError, minloop.wrap_fsdp, model, minloop.build_ddp_config(config), groups)
    expect(ValueError, minloop.wrap_ddp, model, minloop.build_ddp_config(config, **TORCH), groups)
    expect(ValueError, minloop.wrap_ddp, model, minloop.build_ddp_config(config, **megatron()), groups)
    options: dict[str, Any] = {"fsdp_unit_modules": [torch.nn.Conv1d]}
    expect(ValueError, minloop.wrap_fsdp, model, minloop.build_ddp_config(config, **megatron()), groups, **options)
    minloop.shutdown_distributed()
    return said


def test_what_a_state_cannot_do_is_refused() -> None:
    (said,) = run_ranks(1, refusals)
    for message, start in zip(
        said,
        (
            "full_gradients",
            "begin_step",
            "offload: use wrap_ddp: it does not know torch FSDP2",
            "onload: use wrap_ddp",
            "record_layout: train both from one checkpoint",
            "compare_layouts: train both from one checkpoint",
            "torch FSDP2 with share_embeddings_and_output_weights=True",
            "optimizer_cpu_offload=True with wrap_fsdp",
            "optimizer_cpu_offload=True where there is no GPU",
            "OptimizerConfig.optimizer 'sgd' with use_distributed_optimizer=True",
            "use_megatron_fsdp is False",
            "a TorchFullyShardedDataParallelConfig asks for torch FSDP2: use wrap_fsdp",
            "use_megatron_fsdp=True asks for Megatron FSDP: use wrap_fsdp",
            "GPTModel has no module of fsdp_unit_modules",
        ),
        strict=True,
    ):
        assert message.startswith(start)


@pytest.mark.parametrize(
    ("model", "ddp", "message"),
    [
        (HYBRID, megatron(), "Megatron FSDP with hybrid_context_parallel=True"),
        ({"pipeline_model_parallel_size": 2}, megatron(), r"Megatron FSDP with pipeline_model_parallel_size \(2\)"),
        ({}, megatron(use_distributed_optimizer=False), "trains nothing, in silence"),
        ({}, megatron("zero3"), "'zero3' is none of no_shard, optim"),
        ({}, megatron(overlap_grad_reduce=False), "needs overlap_grad_reduce=True"),
        ({}, megatron("optim", overlap_grad_reduce=False, **REPLICAS), "needs overlap_grad_reduce=True"),
        ({}, megatron(overlap_param_gather=False), "needs overlap_param_gather=True"),
        ({}, megatron(outer_dp_sharding_strategy="optim"), "needs num_distributed_optimizer_instances > 1"),
        ({}, megatron(megatron_fsdp_main_params_dtype=None), "would round every update"),
        ({"fp16": True}, megatron(), "Megatron FSDP with fp16=True"),
        (EXPERTS, megatron("no_shard"), "clip by the norm of its own experts' gradients"),
        ({}, megatron(average_in_collective=True), "average_in_collective=True"),
        ({"pipeline_model_parallel_size": 2}, TORCH, r"torch FSDP2 with pipeline_model_parallel_size \(2\)"),
        (EXPERTS, TORCH, "torch FSDP2 with expert_model_parallel_size"),
        ({}, TORCH | {"use_distributed_optimizer": True}, "torch FSDP2 with use_distributed_optimizer=True"),
        ({"gradient_accumulation_fusion": True}, TORCH, "torch FSDP2 with gradient_accumulation_fusion=True"),
        ({"fp16": True}, TORCH, "torch FSDP2 with fp16=True"),
        ({}, TORCH | {"data_parallel_sharding_strategy": "optim"}, "torch FSDP2 with data_parallel_sharding_strategy"),
        ({"init_model_with_meta_device": True}, {}, "it is for wrap_fsdp with shards"),
        ({"init_model_with_meta_device": True}, megatron("no_shard"), "it is for wrap_fsdp with shards"),
        ({}, {"data_parallel_sharding_strategy": "optim"}, "use wrap_fsdp with use_megatron_fsdp=True"),
    ],
)
def test_mixes_are_refused_before_anything_is_built(model: dict[str, Any], ddp: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"gradient_accumulation_fusion": False, **model}
    with pytest.raises(ValueError, match=message):
        minloop.build_ddp_config(small_config(**fields), **ddp)


@pytest.mark.parametrize(
    ("model", "ddp", "message"),
    [
        ({"gradient_accumulation_fusion": True}, megatron(), "needs Transformer Engine, which is not installed"),
        ({}, megatron(nccl_ub=True), "nccl_ub=True registers NCCL's buffers, and there is no GPU"),
        ({}, {"nccl_ub": True}, "nccl_ub=True registers NCCL's buffers, and there is no GPU"),
    ],
)
def test_what_the_machine_lacks_is_refused(
    model: dict[str, Any], ddp: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_checks, "HAVE_TE", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        minloop.build_ddp_config(small_config(**model), **ddp)


def reduced_dtypes(ddp: dict[str, Any]) -> set[torch.dtype]:
    seen: set[torch.dtype] = set()
    reduce = dist.reduce_scatter_tensor

    def spy(output: torch.Tensor, **options: Any) -> Any:
        seen.add(output.dtype)
        return reduce(output, **options)

    state = small_state(num_layers=1, bf16=True, ddp=ddp)
    with mock.patch.object(dist, "reduce_scatter_tensor", spy):
        train(state, text_loader(state), 1)
    minloop.shutdown_distributed()
    return seen


def dtypes_of_torch_fsdp() -> tuple[set[torch.dtype], set[torch.dtype]]:
    return reduced_dtypes(TORCH), reduced_dtypes(TORCH | {"grad_reduce_in_fp32": False})


def test_torch_fsdp_reduces_in_fp32_unless_told_otherwise() -> None:
    assert run_ranks(2, dtypes_of_torch_fsdp)[0] == ({torch.float32}, {torch.bfloat16})


@pytest.mark.gpu
@pytest.mark.parametrize("ddp", [megatron(), TORCH], ids=["Megatron FSDP", "FSDP2"])
def test_on_gpus(ddp: dict[str, Any]) -> None:
    reference, found = (run_ranks(2, observe, ddp=kind, **WIDE)[0] for kind in ({}, ddp))
    assert differences(found, reference)["history"] < 1e-4
    assert found["history"][-1, 0] < found["history"][0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("ddp", [megatron(), TORCH], ids=["Megatron FSDP", "FSDP2"])
def test_layers_built_in_parts_on_gpus(ddp: dict[str, Any]) -> None:
    model: dict[str, Any] = WIDE | {"bf16": True}
    thin, whole = run_ranks(2, thin_and_whole, ddp=ddp, **model)[0]
    assert [loss for loss, _ in thin] == pytest.approx([loss for loss, _ in whole], rel=1e-4)
    assert thin[-1] != thin[0]


def norms_without_clipping() -> list[float | None]:
    norms: list[float | None] = []
    for ddp in ({}, megatron()):
        state = small_state(ddp=ddp, optimizer={"clip_grad": 0.0})
        norm = minloop.train_step(state, text_loader(state), num_microbatches=1).grad_norm
        norms.append(None if norm is None else norm.item())
        minloop.shutdown_distributed()
    return norms


def test_a_norm_that_nobody_computed_is_none() -> None:
    ((known, unknown),) = run_ranks(1, norms_without_clipping)
    assert known
    assert unknown is None
