"""Layouts beside others: on some ranks of a host, two in one process, one after the other; groups that cannot be."""

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hosted import EXPERTS, OVERLAP, ZERO1, batches_of, state_on
from megatron.core import parallel_state
from ranks import run_ranks
from small import small_config, small_state, text_loader, train

import minloop


def _on_some_ranks(layouts: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Ranks 1 and 2 of a host's three train; rank 0 does nothing at all."""
    results: list[list[tuple[float, float]]] = []
    if torch.distributed.get_rank() > 0:
        for options in layouts:
            options = {**options}
            ddp = options.pop("ddp", None)
            config = small_config(**options)
            state = state_on(minloop.build_groups(config, [1, 2]), config, ddp)
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
    _, *results = run_ranks(3, _on_some_ranks, layouts, init="any")
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
    state = state_on(minloop.build_groups(config, [2, 0]), config, ZERO1)
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

    again = state_on(minloop.build_groups(config, [2, 0]), config, ZERO1)
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
    last, nothing, first = run_ranks(3, _saved_on_some_ranks, str(tmp_path), init="any")
    assert nothing == []
    assert run_ranks(2, _loaded_on_all_ranks, str(tmp_path)) == [first, last]


def _two_layouts() -> None:
    config = small_config(tensor_model_parallel_size=2)
    alone = state_on(minloop.init_distributed(config, seed=1), config)
    expected = train(alone, text_loader(alone), 4)
    minloop.shutdown_distributed()

    groups = minloop.init_distributed(config, seed=1)
    actor = state_on(groups, config)
    reference_config = minloop.replace_layout(config, tensor_model_parallel_size=1)
    reference = state_on(minloop.build_groups(reference_config), reference_config)
    assert (groups.dp.size(), reference.groups.dp.size()) == (1, 2)
    loader = text_loader(actor)
    losses = train(actor, loader, 2)
    minloop.load_full_parameters(reference, minloop.named_full_parameters(actor))
    ours, theirs = (minloop.token_logprobs(state, batches_of([32, 16])) for state in (actor, reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert losses + train(actor, loader, 2) == expected
    minloop.shutdown_distributed()


def test_an_actor_and_its_reference_have_layouts_of_their_own() -> None:
    run_ranks(2, _two_layouts)


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
    experts: dict[str, Any] = EXPERTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    experts |= {"add_bias_linear": False}
    made = minloop.build_groups(small_config(**experts, expert_tensor_parallel_size=1))
    with pytest.raises(ValueError, match="expert_tensor_parallel_size is 2 in the config, but the groups were made"):
        minloop.build_gpt_model(small_config(**experts), made, vocab_size=256, max_sequence_length=32)
    whole: Any = torch.distributed.group.WORLD
    whole.bound_device_id = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="the default group was made with device_id"):
        minloop.build_groups(config)
    whole.bound_device_id = None
    minloop.shutdown_distributed()


def test_groups_that_cannot_be_are_refused() -> None:
    run_ranks(2, _refusals)


def _without_seeds() -> None:
    sizes: dict[str, Any] = {"vocab_size": 256, "max_sequence_length": 32}
    config = small_config(tensor_model_parallel_size=2, num_layers=1)
    groups = minloop.build_groups(config)
    with pytest.raises(RuntimeError, match=r"no random streams .*: call seed_ranks\(seed, groups, config\) before"):
        minloop.build_gpt_model(config, groups, **sizes)
    drawn_otherwise: list[dict[str, Any]] = [{"use_cpu_initialization": True}, {"perform_initialization": False}]
    for field in drawn_otherwise:
        minloop.build_gpt_model(small_config(tensor_model_parallel_size=2, num_layers=1, **field), groups, **sizes)
    minloop.seed_ranks(1, groups, config)
    minloop.build_gpt_model(config, groups, **sizes)
    minloop.shutdown_distributed()


def test_a_model_that_draws_weights_needs_seeds() -> None:
    run_ranks(2, _without_seeds, init="any")


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
    assert threads[-1] <= max(threads[:6]), threads  # once each layout came twice: CUDA begins one late


def test_layouts_follow_each_other_in_one_process() -> None:
    run_ranks(2, _ten_times)
