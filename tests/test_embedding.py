"""What a host does with a training state between steps: weights streamed, memory given back, at no wrong time."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hosted import EXPERTS, OVERLAP, ZERO1, state_on
from megatron.core.resharding import refit
from ranks import run_ranks
from small import WIDE, shared_state, small_config, small_state, text_loader, train

import minloop


def _entries(state: minloop.TrainState, directory: Path, batch: minloop.Batch) -> dict[str, Callable[[], Any]]:
    """What reads or writes a state, by name."""
    return {
        "train": lambda: minloop.train_step(state, iter([batch]), num_microbatches=1),
        "begin": lambda: minloop.begin_step(state),
        "record": lambda: minloop.record_layout(state, iter([batch]), num_microbatches=1),
        "save": lambda: minloop.save_checkpoint(directory / "refused", state),
        "save weights": lambda: minloop.save_checkpoint(directory / "refused", state, weights_only=True),
        "start": lambda: minloop.start_save(directory / "refused", state),
        "load": lambda: minloop.load_checkpoint(directory, state),
        "load weights": lambda: minloop.load_weights(directory, state),
        "load full": lambda: minloop.load_full_parameters(state, []),
        "offload": lambda: minloop.offload(state),
        "evaluate": lambda: minloop.eval_step(state, [batch], num_microbatches=1),
        "log-probabilities": lambda: minloop.token_logprobs(state, [batch]),
        "check": lambda: minloop.check_replicas(state),
        "full": lambda: minloop.full_weights(state),
        "stream": lambda: next(minloop.named_full_parameters(state)),
    }


def _refuse(entries: dict[str, Callable[[], Any]], match: str, allowed: Collection[str] = ()) -> None:
    for name, entry in entries.items():
        if name not in allowed:
            with pytest.raises(RuntimeError, match=match):
                entry()


def _at_the_wrong_time(directory: str) -> None:
    state = small_state(ddp=ZERO1)
    undisturbed = state_on(state.groups, small_config(), ZERO1)
    minloop.load_full_parameters(undisturbed, minloop.named_full_parameters(state))
    loaders = [text_loader(one) for one in (state, undisturbed)]
    batch = next(text_loader(state))
    assert state.chunks[0].use_forward_hook
    minloop.save_checkpoint(directory, state)
    entries = _entries(state, Path(directory), batch)

    def step_alike() -> None:
        minloop.train_step(state, loaders[0], num_microbatches=2)
        minloop.train_step(undisturbed, loaders[1], num_microbatches=2)

    step_alike()
    stream = minloop.named_full_parameters(state)
    next(stream)
    _refuse(entries, "a stream of this model's weights is open")
    stream.close()
    step_alike()
    minloop.offload(state)
    _refuse(entries, r"in host memory: call onload\(state\) first", {"offload"})
    minloop.onload(state)
    step_alike()

    for one in (state, undisturbed):
        minloop.begin_step(one)
        minloop.forward_backward(one, [batch], num_microbatches=1)
    reads = {"evaluate", "log-probabilities", "check", "full", "stream"}
    _refuse(entries, "call finish_step first", reads)
    with minloop.gathered_parameters(state.chunks), pytest.raises(RuntimeError, match="weights is open"):
        minloop.finish_step(state)
    for one in (state, undisturbed):
        minloop.finish_step(one)

    chunk = state.chunks[0]
    with mock.patch.object(chunk, "start_param_sync", side_effect=RuntimeError("lost")):
        _refuse(entries, "lost", {"train", "begin", "record", "offload"})
    chunk.remove_forward_pre_hook_handles.popitem()[1].remove()  # mcore stops half-way
    with pytest.raises(KeyError):
        minloop.full_weights(state)
    assert len(chunk.remove_forward_pre_hook_handles) == len(list(chunk.module.modules()))
    step_alike()
    ours, theirs = (minloop.named_full_parameters(one) for one in (state, undisturbed))
    assert all(torch.equal(value, other) for (_, value), (_, other) in zip(ours, theirs, strict=True))
    assert not (Path(directory) / "refused").exists()
    minloop.shutdown_distributed()


def test_what_comes_at_the_wrong_time_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    run_ranks(2, _at_the_wrong_time, str(tmp_path))


def _owned_twice() -> None:
    state = small_state()
    parts: tuple[Any, ...] = (state.chunks, state.optimizer, None, state.config, state.groups)
    refused = "already carries {}: another TrainState or a host owns this model".format
    bound = "finalize_model_grads_func, grad_scale_func, no_sync_func"
    with pytest.raises(RuntimeError, match=refused(bound)):
        minloop.TrainState(*parts)
    vars(state.config).update(dict.fromkeys(bound.split(", ")))
    state.config.no_sync_func = torch.no_grad  # the host's
    with pytest.raises(RuntimeError, match=refused("no_sync_func")):
        minloop.TrainState(*parts)
    state.config.no_sync_func = None
    again = minloop.TrainState(*parts)
    minloop.train_step(again, text_loader(again), num_microbatches=1)
    minloop.shutdown_distributed()


def test_a_model_that_another_owns_is_refused() -> None:
    run_ranks(1, _owned_twice)


def _written(directory: str, options: dict[str, Any], experts: bool) -> dict[str, torch.Tensor]:
    state = shared_state(directory, True, **options)
    expected = minloop.full_weights(state)
    names = list(expected)
    torch.distributed.broadcast_object_list(received := [names])
    everywhere = dict(minloop.named_full_parameters(state))
    assert sorted(everywhere) == sorted(received[0])
    asked = dict(minloop.named_full_parameters(state, ranks=[1], dtype=torch.bfloat16))
    assert asked.keys() == (everywhere.keys() if torch.distributed.get_rank() == 1 else set())
    assert all(torch.equal(asked[name], everywhere[name].bfloat16()) for name in asked)
    assert all(torch.equal(value, everywhere[name].cpu()) for name, value in expected.items())
    assert experts == any("experts" in name for name in everywhere)
    minloop.shutdown_distributed()
    return everywhere


def _read_back(weights: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> None:
    state = small_state(seed=99, **options)
    first = next(iter(weights[0]))
    with pytest.raises(ValueError, match="no weight nowhere"):
        minloop.load_full_parameters(state, [("nowhere", torch.zeros(1))])
    with pytest.raises(ValueError, match="where it comes from"):
        minloop.load_full_parameters(state, [(first, torch.zeros(1, 1, 1))])
    with pytest.raises(ValueError, match=r"weights were not given, such as"):
        minloop.load_full_parameters(state, [(first, weights[0][first])])
    minloop.load_full_parameters(state, weights[torch.distributed.get_rank()])
    for name, value in minloop.named_full_parameters(state):
        assert torch.equal(value.cpu(), weights[0][name].cpu()), name
    minloop.check_replicas(state)
    loader = text_loader(state)
    minloop.train_step(state, loader, num_microbatches=4)  # of the loaded weights, not of older master weights
    moved = [(value.cpu() - weights[0][name]).abs().max() for name, value in minloop.named_full_parameters(state)]
    assert 0 < max(moved) < 0.1
    minloop.shutdown_distributed()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"tensor_model_parallel_size": 2, "ddp": OVERLAP}, {"pipeline_model_parallel_size": 2, "bf16": True}),
        ({**EXPERTS, "expert_model_parallel_size": 2}, {**EXPERTS, "pipeline_model_parallel_size": 2, "ddp": ZERO1}),
    ],
    ids=["TP2 to PP2", "EP2 to PP2"],
)
def test_full_weights_are_streamed_out_and_in(tmp_path: Path, source: Any, target: Any) -> None:
    weights = run_ranks(2, _written, str(tmp_path), source, "num_moe_experts" in source)
    if "bf16" in target:
        weights = [{name: value.bfloat16() for name, value in one.items()} for one in weights]
    run_ranks(2, _read_back, weights, target)


def _off_and_on(options: dict[str, Any]) -> None:
    results: list[list[torch.Tensor]] = []
    for moving in (False, True):
        state = small_state(**options)
        loader = text_loader(state)
        for _ in range(2):
            minloop.train_step(state, loader, num_microbatches=2)
        if moving:
            with pytest.raises(ValueError, match="kinds='weights' is one string"):
                minloop.offload(state, "weights")
            registered = mock.patch.object(state.chunks[0].ddp_config, "nccl_ub", True)
            with registered, pytest.raises(ValueError, match="nccl_ub=True: NCCL keeps"):
                minloop.offload(state)
            minloop.offload(state, ["gradients", "optimizer"])
            loss = minloop.eval_step(state, [next(loader)], num_microbatches=1).loss  # the weights are there
            weight = next(state.chunks[0].parameters())
            before = weight.detach().clone()
            with pytest.raises(RuntimeError, match=r"gradients, optimizer of this training state are in host memory"):
                minloop.train_step(state, loader, num_microbatches=1)  # takes nothing from the loader
            minloop.offload(state)
            assert weight.untyped_storage().nbytes() == 0
            assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in state.chunks[0].buffers)
            with pytest.raises(RuntimeError, match="weights of this training state are in host memory"):
                minloop.eval_step(state, loader, num_microbatches=1)
            minloop.onload(state, ["weights"])
            assert torch.equal(before, weight)
            minloop.onload(state)
            assert not state.offloaded
        else:
            loss = minloop.eval_step(state, [next(loader)], num_microbatches=1).loss
        results.append([loss, *(buffer.grad_data.clone() for buffer in state.chunks[0].buffers)])
        for _ in range(2):
            results[-1].append(minloop.train_step(state, loader, num_microbatches=2).loss)
        results[-1] += [p.detach().clone() for chunk in state.chunks for p in chunk.parameters()]
        minloop.shutdown_distributed()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True, "ddp": OVERLAP}, {"ddp": ZERO1, "tensor_model_parallel_size": 2}]
)
def test_a_state_is_moved_to_host_memory_and_back_bit_for_bit(options: dict[str, Any]) -> None:
    run_ranks(2, _off_and_on, options)


def _resharded(cases: list[tuple[dict[str, Any], dict[str, Any], Any]]) -> None:
    """An actor's weights go to two replicas of another layout: streamed to one, by mcore's resharding to the other."""
    for source, target, way in cases:
        config = small_config(**source)
        actor = state_on(minloop.init_distributed(config, seed=1), config)
        train(actor, text_loader(actor), 1)
        one = {name: 1 for name in source if name.endswith("parallel_size")}
        other = minloop.replace_layout(config, **(one | target))
        streamed, resharded = (state_on(minloop.build_groups(other), other) for _ in range(2))
        minloop.load_full_parameters(streamed, minloop.named_full_parameters(actor))
        refit.clear_all_caches()  # of plans, which mcore knows by the layouts alone, and of what copies
        refit.swap_model_weights(actor.chunks, resharded.chunks, way)
        ours, theirs = (list(chunk.parameters()) for state in (streamed, resharded) for chunk in state.chunks)
        assert all(map(torch.equal, ours, theirs)), (source, target)
        assert len(ours) == len(theirs) > 10
        before, after = (dict(minloop.named_full_parameters(state)) for state in (actor, resharded))
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        minloop.shutdown_distributed()


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
RESHARDED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({**TP2, "sequence_parallel": True, "gated_linear_unit": True, "bf16": True}, {"sequence_parallel": False}, "gloo"),
    ({**PP2, "num_query_groups": 2}, TP2, "nccl"),
    ({**EXPERTS, "add_bias_linear": False}, {**TP2, "sequence_parallel": True}, "gloo"),
]


def test_weights_are_streamed_between_layouts_as_mcore_reshards_them() -> None:
    run_ranks(2, _resharded, RESHARDED)


@pytest.mark.gpu
def test_grouped_experts_are_streamed_between_layouts_as_mcore_reshards_them() -> None:
    pytest.importorskip("transformer_engine", reason="grouped layers are its")
    grouped = {**EXPERTS, "moe_grouped_gemm": True, "add_bias_linear": False, "bf16": True}
    grouped |= WIDE
    run_ranks(2, _resharded, [({**grouped, "expert_model_parallel_size": 2}, {}, "nccl")])
