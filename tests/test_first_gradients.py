"""A first microbatch that writes gradients where others add: bit for bit the step that zeroes all of them before."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run_ranks
from small import WIDE, small_state, text_loader

import minloop
from minloop.first_gradients import first_gradients

RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ZERO_1: dict[str, Any] = {"ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}}
TIED: dict[str, Any] = {"gpt": {"share_embeddings_and_output_weights": True}}
GRAPH: dict[str, Any] = {"cuda_graph_impl": "full_iteration", "attention_backend": AttnBackend.unfused}
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 64, "add_bias_linear": False}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {"bf16": True}),
    "fp32, no bias": (1, {"add_bias_linear": False}),
    "fp16": (1, {"fp16": True, "optimizer": {"initial_loss_scale": 256.0}}),
    "gradients in bf16": (1, {"bf16": True, "ddp": {"grad_reduce_in_fp32": False}}),
    "recompute": (1, {"bf16": True} | RECOMPUTE),
    "tied": (1, {"bf16": True} | TIED),
    "MoE": (1, {"bf16": True} | MOE),
    "ZeRO-1": (2, {"bf16": True} | ZERO_1),
    "TP2+SP": (2, {"bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "CUDA graph": (1, {"bf16": True} | GRAPH),
}


def spoil(state: minloop.TrainState) -> None:
    """Let all that a step overwrites be no number."""
    first = first_gradients(state.chunks)
    for weight in first.weights if first else ():
        weight.main_grad.fill_(float("nan"))


def take(state: minloop.TrainState, data: Any, count: int, forward_step: Any = minloop.gpt_forward_step) -> Any:
    spoil(state)
    metrics = minloop.train_step(state, data, num_microbatches=count, forward_step=forward_step)
    return metrics.loss.item(), None if metrics.grad_norm is None else metrics.grad_norm.item()


@contextlib.contextmanager
def built(options: dict[str, Any], overwriting: bool = True) -> Generator[minloop.TrainState]:
    with contextlib.nullcontext() if overwriting else mock.patch("minloop.data_parallel.overwrite_first_gradients"):
        fields: dict[str, Any] = WIDE | {"gradient_accumulation_fusion": True, "deterministic_mode": True} | options
        state = small_state(**fields)
    yield state
    minloop.shutdown_distributed()


def steps(options: dict[str, Any], overwriting: bool, count: int) -> list[Any]:
    with built(options, overwriting) as state:
        assert (first_gradients(state.chunks) is not None) == overwriting
        data = text_loader(state)
        return [take(state, data, count) for _ in range(6)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 3])
def test_steps_are_those_that_begin_with_zeros(name: str, count: int) -> None:
    ranks, options = CASES[name]
    ours, theirs = (run_ranks(ranks, steps, options, overwriting, count) for overwriting in (True, False))
    assert ours == theirs
    assert ours[0][-1][0] < ours[0][0][0]


def twice(data: Iterator[Any], model: Any) -> Any:
    """A microbatch that passes through the model twice."""
    batch = next(data)
    first, _ = minloop.gpt_forward_step(iter([batch]), model)
    second, loss = minloop.gpt_forward_step(iter([batch]), model)
    return first + second, loss


def fails(data: Iterator[Any], model: Any) -> Any:
    minloop.gpt_forward_step(data, model)
    raise KeyError("no such batch")


def mixed(overwriting: bool) -> list[Any]:
    """Steps of all kinds, one after the other."""
    with built({"bf16": True}, overwriting) as state:
        data = text_loader(state)
        seen = [take(state, data, 2), take(state, data, 1, twice), take(state, data, 2, twice), take(state, data, 1)]
        with mock.patch("minloop.step.token_loss", side_effect=KeyError), pytest.raises(KeyError):
            take(state, data, 2)
        with pytest.raises(KeyError):
            take(state, data, 2, fails)
        seen.append(minloop.eval_step(state, data, num_microbatches=2).loss.item())
        spoil(state)
        minloop.begin_step(state)
        for _ in range(2):
            minloop.forward_backward(state, data, num_microbatches=1)
        return [*seen, minloop.finish_step(state).loss.item(), take(state, data, 3)]


def test_steps_that_overwrite_go_with_those_that_do_not() -> None:
    ours, theirs = (run_ranks(1, mixed, overwriting)[0] for overwriting in (True, False))
    assert ours == theirs


def without_mlp(count: int) -> tuple[int, int]:
    """Of the weights whose gradients are overwritten: of how many those of a layer left out are 0, and all others."""
    with built({"bf16": True, "ddp": {"overlap_grad_reduce": False}}) as state:
        layer: Any = state.chunks[0].module.module.decoder.layers[1]
        with mock.patch.object(layer.mlp, "forward", lambda hidden, **_: (0 * hidden, None)):
            take(state, text_loader(state), count)
        skipped = {id(layer.mlp.linear_fc1.weight), id(layer.mlp.linear_fc2.weight)}
        first = first_gradients(state.chunks)
        assert first is not None
        of_skipped = [weight for weight in first.weights if id(weight) in skipped]
        assert all(bool(weight.main_grad.isfinite().all()) for weight in first.weights)
        empty = [weight for weight in first.weights if not weight.main_grad.any()]
        return len(of_skipped), len(empty)


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_without_gradients_has_gradients_of_zero(count: int) -> None:
    assert run_ranks(1, without_mlp, count)[0] == (2, 2)


def overwritten(options: dict[str, Any]) -> list[str] | None:
    """The kinds of layers that overwrite their gradients."""
    with built(options) as state:
        first = first_gradients(state.chunks)
        own = {id(weight) for weight in first.weights} if first else set[int]()
        names = [name for chunk in state.chunks for name, weight in chunk.named_parameters() if id(weight) in own]
        return sorted({name.split("layers.")[-1].lstrip("0123456789.") for name in names}) if first else None


ATTENTION = ["self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"]
DENSE = ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight", *ATTENTION]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [*DENSE[:2], "module.module.output_layer.weight", *ATTENTION]),
        (TIED, DENSE),
        (
            MOE,
            [f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2)]
            + ["module.module.output_layer.weight", *ATTENTION],
        ),
        ({"mtp_num_layers": 1, "gpt": {"position_embedding_type": "rope"}}, None),
        ({"gradient_accumulation_fusion": False}, None),
    ],
    ids=["dense", "tied", "MoE", "MTP", "not fused"],
)
def test_what_is_overwritten(options: dict[str, Any], expected: list[str] | None) -> None:
    assert run_ranks(1, overwritten, {"bf16": True} | options)[0] == expected


def test_a_pipeline_zeroes_all() -> None:
    assert run_ranks(2, overwritten, {"bf16": True, "pipeline_model_parallel_size": 2}) == [None, None]


def used_twice(kind: str, overwriting: bool) -> tuple[int, list[Any]]:
    """Of a model that uses a layer twice: how many gradients it overwrites, and its steps."""

    def build(*args: Any, **options: Any) -> list[Any]:
        chunks: list[Any] = minloop.build_gpt_model(*args, **options)
        layers = chunks[0].module.decoder.layers
        if kind == "of the user's":
            layers[1].__class__ = type("Twice", (type(layers[1]),), {"forward": twice_through})
        else:
            layers[2].mlp.linear_fc1 = layers[1].mlp.linear_fc1
        return chunks

    with built({"bf16": True, "build": build, "ddp": {"overlap_grad_reduce": False}}, overwriting) as state:
        first, data = first_gradients(state.chunks), text_loader(state)
        return len(first.weights) if first else 0, [take(state, data, count) for count in (1, 2, 1)]


def twice_through(layer: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
    of_mcore: Any = TransformerLayer.forward
    return of_mcore(layer, of_mcore(layer, hidden_states, *args, **options)[0], *args, **options)


@pytest.mark.parametrize(("kind", "weights"), [("shared", 15), ("of the user's", 0)])
def test_what_a_microbatch_uses_twice_is_zeroed(kind: str, weights: int) -> None:
    (count, ours), (_, theirs) = (run_ranks(1, used_twice, kind, overwriting)[0] for overwriting in (True, False))
    assert ours == theirs
    assert count == weights


def with_saved_tensor_hooks(overwriting: bool) -> list[Any]:
    with built({"bf16": True, "ddp": {"overlap_grad_reduce": False}}, overwriting) as state:
        data = text_loader(state)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda saved: saved):
            return [take(state, data, count) for count in (1, 2)]


def test_gradients_of_unpacked_copies_of_weights_count() -> None:
    ours, theirs = (run_ranks(1, with_saved_tensor_hooks, overwriting)[0] for overwriting in (True, False))
    assert ours == theirs


def of_a_variant() -> bool:
    """Whether anything is overwritten in a model whose attention may multiply by a weight without its layer."""

    def build(*args: Any, **options: Any) -> list[Any]:
        chunks: list[Any] = minloop.build_gpt_model(*args, **options)
        chunks[0].config.experimental_attention_variant = "dsa"
        return chunks

    with built({"bf16": True, "build": build}) as state:
        return first_gradients(state.chunks) is not None


def test_a_variant_of_attention_zeroes_all() -> None:
    assert run_ranks(1, of_a_variant) == [False]
