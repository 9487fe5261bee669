"""What a host that owns the loop calls: steps in parts are whole steps, log-probabilities are those of one rank."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hosted import OVERLAP, ZERO1, batches_of
from ranks import run_ranks
from small import MICRO_BATCH_SIZE, rounding, shared_state, small_state, text_loader

import minloop


def squared_loss(data: Iterator[minloop.Batch], model: torch.nn.Module) -> Any:
    """A host's own loss: a weight for each token, and a report of its own."""
    output, _ = minloop.gpt_forward_step(data, model)

    def loss(output: torch.Tensor) -> Any:
        total = output.float().square().sum()
        count = torch.full_like(total, output.numel())
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
            tokens = (
                torch.stack([batch["loss_mask"].sum() for batch in batches])
                .sum(dtype=torch.float64)
                .to(torch.cuda.current_device())
            )
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


def first_microbatches() -> int:
    """How often a step in three parts, and the first part of another, tell layers that a step begins."""
    state = small_state()
    with mock.patch.object(type(state.chunks[0]), "set_is_first_microbatch") as told:
        for parts in (3, 1):
            minloop.begin_step(state)
            for _ in range(parts):
                minloop.forward_backward(state, text_loader(state), num_microbatches=2)
            minloop.finish_step(state)
    minloop.shutdown_distributed()
    return told.call_count


def test_a_step_has_one_first_microbatch() -> None:
    assert run_ranks(1, first_microbatches) == [2], "in FP8 the later parts' gradients would replace the earlier ones'"


def test_parts_out_of_order_are_refused() -> None:
    run_ranks(1, _misuse)


def _log_probabilities(directory: str, first: bool, lengths: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    state = shared_state(directory, first, **options)
    results = minloop.token_logprobs(state, batches_of(lengths))
    minloop.begin_step(state)  # and training goes on with sequences of these lengths
    minloop.forward_backward(state, batches_of(lengths), num_microbatches=len(lengths))
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
                torch.testing.assert_close(ours, theirs, rtol=rounding(1e-5), atol=1e-5)
