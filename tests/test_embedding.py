"""What a host that owns the loop builds on: steps in parts, per-token results, weights streamed, memory given back."""

import gc
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.resharding import refit
from ranks import run_ranks
from small import (
    MICRO_BATCH_SIZE,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    Text,
    shared_state,
    small_config,
    small_state,
    text_loader,
    train,
)

import minloop

ZERO1 = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO1, "overlap_grad_reduce": True, "overlap_param_gather": True}


def squared_loss(data: Iterator[minloop.Batch], model: torch.nn.Module) -> Any:
    """A host's own loss: a weight for each token, and a report of its own."""
    output, _ = minloop.gpt_forward_step(data, model)

    def loss(output: torch.Tensor) -> Any:
        total, count = output.float().square().sum(), torch.tensor(float(output.numel()))
        return total, count, {"squared": torch.stack([total.detach(), count])}

    return output, loss


def _trained(
    state: minloop.TrainState, calls: list[int], known: bool, forward_step: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, norms and weights of three steps, each of `calls` microbatches at a time; at once if it is empty.

    And the losses of routers.
    """
    loader, results, routers = text_loader(state), list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(3):
        if not calls:
            metrics = minloop.train_step(state, loader, num_microbatches=4, forward_step=forward_step)
        else:
            batches = [next(loader) for _ in range(sum(calls))]
            tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum(dtype=torch.float64)
            torch.distributed.all_reduce(tokens, group=state.groups.dp)
            minloop.begin_step(state, num_tokens=tokens if known else None)
            for call in calls:
                part, batches = batches[:call], batches[call:]
                minloop.forward_backward(state, part, num_microbatches=call, forward_step=forward_step)
            metrics = minloop.finish_step(state)
        assert metrics.grad_norm is not None
        results += [metrics.loss, metrics.num_tokens, metrics.grad_norm, torch.tensor(metrics.num_samples)]
        routers += list(metrics.losses.values())[1:]
    with minloop.gathered_parameters(state.chunks):
        weights = [parameter.detach().clone() for chunk in state.chunks for parameter in chunk.parameters()]
    return [*results, torch.tensor(state.consumed_samples), *weights], routers


def _compare_steps(options: dict[str, Any]) -> None:
    for known, forward_step in ((True, minloop.gpt_forward_step), (False, squared_loss)):
        whole = _trained(small_state(**options), [], known, forward_step)
        minloop.shutdown_distributed()
        for calls in ([4], [2, 2]):
            parts = _trained(small_state(**options), calls, known, forward_step)
            minloop.shutdown_distributed()
            assert len(whole[0]) == len(parts[0])
            assert all(map(torch.equal, whole[0], parts[0])), (calls, known)
            torch.testing.assert_close(whole[1], parts[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "options",
    [
        {"ddp": ZERO1, "tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
        {"ddp": OVERLAP},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"calculate_per_token_loss": False},
        {
            "num_moe_experts": 4,
            "expert_model_parallel_size": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": "alltoall",
        },
    ],
    ids=["TP2", "overlapped DP2", "PP2 VPP2", "means of means", "EP2"],
)
def test_a_step_in_parts_is_train_step_bit_for_bit(options: dict[str, Any]) -> None:
    run_ranks(2, _compare_steps, options)


def _misuse() -> None:
    state = small_state()
    batch = next(text_loader(state))
    with pytest.raises(RuntimeError, match="forward_backward without begin_step"):
        minloop.forward_backward(state, [batch], num_microbatches=1)
    with pytest.raises(RuntimeError, match="finish_step without begin_step"):
        minloop.finish_step(state)
    minloop.begin_step(state)
    with pytest.raises(ValueError, match="vocab_size is 256"):
        minloop.forward_backward(state, [batch | {"tokens": batch["tokens"] + 999}], num_microbatches=1)
    minloop.begin_step(state)  # an error ended the step before
    with pytest.raises(RuntimeError, match="call finish_step first"):
        minloop.begin_step(state)
    untouched = iter([batch])
    with pytest.raises(RuntimeError, match="call finish_step first"):
        minloop.train_step(state, untouched, num_microbatches=1)
    assert next(untouched) is batch
    with pytest.raises(RuntimeError, match="there are no gradients"):
        minloop.finish_step(state)
    minloop.forward_backward(state, [batch], num_microbatches=1)
    minloop.finish_step(state)
    assert state.iteration == 1
    minloop.shutdown_distributed()


def test_parts_out_of_order_are_refused() -> None:
    run_ranks(1, _misuse)


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
    undisturbed = _state_on(state.groups, small_config(), ZERO1)
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


def _batches(lengths: list[int]) -> list[minloop.Batch]:
    samples = [Text()[index] for index in range(MICRO_BATCH_SIZE * len(lengths))]
    groups = zip(samples[::2], samples[1::2], lengths, strict=True)
    return [{name: torch.stack([a[name], b[name]])[:, :length] for name in a} for a, b, length in groups]


def _log_probabilities(directory: str, first: bool, lengths: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    state = shared_state(directory, first, **options)
    results = minloop.token_logprobs(state, _batches(lengths))
    minloop.begin_step(state)  # and training goes on with sequences of these lengths
    minloop.forward_backward(state, _batches(lengths), num_microbatches=len(lengths))
    loss = minloop.finish_step(state).loss
    minloop.shutdown_distributed()
    return [*results, loss]


def test_log_probabilities_are_on_every_rank_and_those_of_one(tmp_path: Path) -> None:
    lengths = [32, 24, 16, 8]
    run = partial(_log_probabilities, str(tmp_path), lengths=lengths)
    (expected,) = run_ranks(1, run, True, options={})
    assert [list(result.shape) for result in expected[:-1]] == [[MICRO_BATCH_SIZE, length] for length in lengths]
    varying = {"variable_seq_lengths": True}
    for options in (
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, **varying},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **varying},
        {"context_parallel_size": 2},
    ):
        for results in run_ranks(2, run, False, options=options):
            for ours, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


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
    assert all(torch.equal(value, everywhere[name]) for name, value in expected.items())
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
        assert torch.equal(value, weights[0][name]), name
    minloop.check_replicas(state)
    loader = text_loader(state)
    minloop.train_step(state, loader, num_microbatches=4)  # of the loaded weights, not of older master weights
    moved = [(value - weights[0][name]).abs().max() for name, value in minloop.named_full_parameters(state)]
    assert 0 < max(moved) < 0.1
    minloop.shutdown_distributed()


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


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


def _state_on(groups: minloop.ProcessGroupCollection, config: Any, ddp: dict[str, bool] | None = None) -> Any:
    minloop.seed_ranks(1, groups, config)
    ddp_config = minloop.build_ddp_config(config, **(ddp or {}))
    chunks = minloop.build_gpt_model(config, groups, vocab_size=VOCAB_SIZE, max_sequence_length=SEQUENCE_LENGTH)
    chunks = minloop.wrap_ddp(chunks, ddp_config, groups)
    optimizer = minloop.build_optimizer(chunks, minloop.build_optimizer_config(config, ddp_config, lr=5e-3), groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def _on_some_ranks(layouts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Ranks 1 and 2 of a host's three train; rank 0 does nothing at all."""
    results: list[list[tuple[float, float]]] = []
    if torch.distributed.get_rank() > 0:
        for options in layouts:
            options = {**options}
            ddp = options.pop("ddp", None)
            config = small_config(**options)
            state = _state_on(minloop.build_groups(config, [1, 2]), config, ddp)
            results.append(train(state, text_loader(state), 3))
            minloop.check_replicas(state)
            names = [name for name, _ in minloop.named_full_parameters(state)]
            assert len(set(names)) == len(names) > 10
            assert bool(minloop.full_weights(state)) == (torch.distributed.get_rank() == 1)
            with pytest.raises(ValueError, match=r"\[0\] are not among the model's, \[1, 2\]"):
                next(minloop.named_full_parameters(state, ranks=[0, 1]))
            minloop.shutdown_distributed()
    assert torch.distributed.is_initialized()  # the host's
    torch.distributed.barrier()
    return results


def _on_all_ranks(options: dict[str, Any]) -> list[tuple[float, float]]:
    state = small_state(**options)
    results = train(state, text_loader(state), 3)
    minloop.shutdown_distributed()
    return results


def test_some_ranks_train_while_others_do_something_else() -> None:
    layouts: list[dict[str, Any]] = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "ddp": ZERO1},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2, "ddp": OVERLAP},
        {**EXPERTS, "expert_model_parallel_size": 2},
    ]
    _, *results = run_ranks(3, _on_some_ranks, layouts, init="gloo")
    for index, options in enumerate(layouts):
        assert [result[index] for result in results] == run_ranks(2, _on_all_ranks, options), options


SAVED: list[dict[str, Any]] = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}]


def _saved_on_some_ranks(directory: str) -> list[list[tuple[float, float]]]:
    """Ranks 2 and 0 of a host's three, in this order, train, save and go on; rank 1 is elsewhere until they have."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    minloop.shared_directory(f"{directory}/0")  # which rank 0 then holds, though rank 2 is to be the first that saves
    if torch.distributed.get_rank() == 1:
        store.wait(["done by rank 0", "done by rank 2"])
        return []
    results = [_saved_and_resumed(f"{directory}/{index}", **options) for index, options in enumerate(SAVED)]
    store.set(f"done by rank {torch.distributed.get_rank()}", "")
    return results


def _saved_and_resumed(directory: str, **options: Any) -> list[tuple[float, float]]:
    config = small_config(hidden_dropout=0.1, **options)
    state = _state_on(minloop.build_groups(config, [2, 0]), config, ZERO1)
    loader = text_loader(state)
    train(state, loader, 2)
    saved = minloop.save_checkpoint(directory, state, loader)
    expected = train(state, loader, 1)
    pending = minloop.start_save(directory, state, loader)
    expected += train(state, loader, 1)
    assert pending.wait() == minloop.latest_checkpoint(directory)
    assert torch.distributed.get_world_size() == 3
    assert torch.distributed.get_process_group_ranks(state.groups.intra_dist_opt) == [2, 0]
    assert torch.distributed.get_rank(state.groups.intra_dist_opt) == state.groups.intra_dist_opt.rank()
    minloop.shutdown_distributed()

    again = _state_on(minloop.build_groups(config, [2, 0]), config, ZERO1)
    loader = text_loader(again)
    assert minloop.load_checkpoint(saved, again, loader) == saved
    results = train(again, loader, 1)
    minloop.load_checkpoint(directory, again, loader)
    assert results + train(again, loader, 1) == expected
    with pytest.raises(FileNotFoundError):
        minloop.load_weights(f"{directory}/nothing", again)
    assert torch.distributed.get_world_size() == 3
    minloop.load_weights(directory, again)
    minloop.shutdown_distributed()
    return expected


def _loaded_on_all_ranks(directory: str) -> list[list[tuple[float, float]]]:
    results: list[list[tuple[float, float]]] = []
    for index, options in enumerate(SAVED):
        state = small_state(hidden_dropout=0.1, ddp=ZERO1, **options)
        loader = text_loader(state)
        minloop.load_checkpoint(f"{directory}/{index}/iter_0000002", state, loader)
        results.append(train(state, loader, 2))
        minloop.shutdown_distributed()
    return results


def test_some_ranks_save_and_resume_while_another_does_something_else(tmp_path: Path) -> None:
    last, nothing, first = run_ranks(3, _saved_on_some_ranks, str(tmp_path), init="gloo")
    assert nothing == []
    assert run_ranks(2, _loaded_on_all_ranks, str(tmp_path)) == [first, last]


def _two_layouts() -> None:
    config = small_config(tensor_model_parallel_size=2)
    alone = _state_on(minloop.init_distributed(config, seed=1), config)
    expected = train(alone, text_loader(alone), 4)
    minloop.shutdown_distributed()

    groups = minloop.init_distributed(config, seed=1)
    actor = _state_on(groups, config)
    reference_config = minloop.replace_layout(config, tensor_model_parallel_size=1)
    reference = _state_on(minloop.build_groups(reference_config), reference_config)
    assert (groups.dp.size(), reference.groups.dp.size()) == (1, 2)
    loader = text_loader(actor)
    losses = train(actor, loader, 2)
    minloop.load_full_parameters(reference, minloop.named_full_parameters(actor))
    ours, theirs = (minloop.token_logprobs(state, _batches([32, 16])) for state in (actor, reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert losses + train(actor, loader, 2) == expected
    minloop.shutdown_distributed()


def test_an_actor_and_its_reference_have_layouts_of_their_own() -> None:
    run_ranks(2, _two_layouts)


def _resharded(cases: list[tuple[dict[str, Any], dict[str, Any], Any]]) -> None:
    """An actor's weights go to two replicas of another layout: streamed to one, by mcore's resharding to the other."""
    for source, target, way in cases:
        config = small_config(**source)
        actor = _state_on(minloop.init_distributed(config, seed=1), config)
        train(actor, text_loader(actor), 1)
        one = {name: 1 for name in source if name.endswith("parallel_size")}
        other = minloop.replace_layout(config, **(one | target))
        streamed, resharded = (_state_on(minloop.build_groups(other), other) for _ in range(2))
        minloop.load_full_parameters(streamed, minloop.named_full_parameters(actor))
        refit.clear_all_caches()  # of plans, which mcore knows by the layouts alone, and of what copies
        refit.swap_model_weights(actor.chunks, resharded.chunks, way)
        ours, theirs = (list(chunk.parameters()) for state in (streamed, resharded) for chunk in state.chunks)
        assert all(map(torch.equal, ours, theirs)), (source, target)
        assert len(ours) == len(theirs) > 10
        pairs = zip(minloop.named_full_parameters(actor), minloop.named_full_parameters(resharded), strict=True)
        for (name, before), (_, after) in pairs:
            assert torch.equal(before, after), name
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
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    grouped = {**EXPERTS, "moe_grouped_gemm": True, "add_bias_linear": False, "bf16": True}
    grouped |= {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8}
    run_ranks(2, _resharded, [({**grouped, "expert_model_parallel_size": 2}, {}, "nccl")])


def _refusals() -> None:
    config = small_config(tensor_model_parallel_size=2)
    with pytest.raises(RuntimeError, match="build_groups needs a default group"):
        minloop.build_groups(config)
    minloop.init_distributed(config, seed=1)
    other = 1 - torch.distributed.get_rank()
    for ranks, match in (([other], "which called, one of them"), ([0, 1, 2], "below 2")):
        with pytest.raises(ValueError, match=match):
            minloop.build_groups(minloop.replace_layout(config, tensor_model_parallel_size=1), ranks)
    with pytest.raises(ValueError, match="world size 2 is not a multiple"):
        minloop.build_groups(minloop.replace_layout(config, tensor_model_parallel_size=4))
    with pytest.raises(ValueError, match="mtp_num_layers=1"):
        minloop.build_groups(small_config(mtp_num_layers=1))
    minloop.shutdown_distributed()


def test_groups_that_cannot_be_are_refused() -> None:
    run_ranks(2, _refusals)


def _ten_times() -> None:
    layouts: list[dict[str, Any]] = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}]
    threads: list[int] = []
    for number in range(10):
        state = small_state(**layouts[number % 3])
        other = minloop.build_groups(small_config(tensor_model_parallel_size=2))
        assert other.tp.size() == 2
        minloop.train_step(state, text_loader(state), num_microbatches=2)
        del state, other
        minloop.shutdown_distributed()
        gc.collect()
        assert not torch.distributed.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
        threads.append(psutil.Process().num_threads())
    assert threads[-1] <= max(threads[:3]), threads


def test_layouts_follow_each_other_in_one_process() -> None:
    run_ranks(2, _ten_times)
