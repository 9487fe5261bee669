"""What a step's schedule asks of the sequences, what pipeline stages do with what they have sent, sizes by steps."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from ranks import run_ranks
from small import failure_of, small_config, small_state, text_loader, train

import minloop

SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP2: dict[str, Any] = PP2 | {"virtual_pipeline_model_parallel_size": 2}


def cut(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


def steps_of_31_tokens() -> list[str]:
    state = small_state(**SP)
    batch = next(text_loader(state))
    rounded, odd = cut(batch, 30), cut(batch, 31)
    failures = [
        failure_of(minloop.train_step, state, iter([odd]), num_microbatches=1),
        failure_of(minloop.eval_step, state, iter([odd]), num_microbatches=1),
        failure_of(minloop.token_logprobs, state, [rounded, odd]),
        failure_of(minloop.train_step, state, iter([rounded]), num_microbatches=1),
    ]
    minloop.shutdown_distributed()
    return failures


def test_a_sequence_that_its_ranks_cannot_divide_is_refused() -> None:
    *refused, whole = run_ranks(2, steps_of_31_tokens)[0]
    for failure in refused:
        assert failure.startswith(
            "ValueError: sequence_parallel=True with a sequence of 31 tokens, which tensor_model_p"
        )
        assert "(2) × context_parallel_size (1) does not divide: pad it to a multiple of 2" in failure
    assert whole == "no error"


def step_with_transformer_engines_loss() -> str:
    state = small_state(transformer_impl="local", cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    failure = failure_of(minloop.train_step, state, text_loader(state), num_microbatches=1)
    minloop.shutdown_distributed()
    return failure


@pytest.mark.skipif(torch.cuda.is_available() and HAVE_TE, reason="Transformer Engine's loss can run")
def test_a_loss_of_transformer_engines_is_refused_without_it() -> None:
    (failure,) = run_ranks(1, step_with_transformer_engines_loss)
    assert re.match(
        "ValueError: cross_entropy_fusion_impl='te' with transformer_impl='local', but .*'native'$", failure
    )


def trained(fields: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    state = small_state(**fields)
    loader = text_loader(state)
    history: list[Any] = train(state, loader, 2)
    history.append(minloop.eval_step(state, loader, num_microbatches=4))
    history += train(state, loader, 1)
    weights = {name: value.detach().clone() for chunk in state.chunks for name, value in chunk.named_parameters()}
    minloop.shutdown_distributed()
    return history, weights


def differing(fields: dict[str, Any]) -> list[str]:
    """What comes out otherwise where stages keep what they have sent."""
    (history, weights), (expected, others) = trained(fields), trained(fields | {"deallocate_pipeline_outputs": False})
    assert small_config(**fields).deallocate_pipeline_outputs
    changed = [name for name, value in weights.items() if not torch.equal(value, others[name])]
    return changed + [repr(pair) for pair in zip(history, expected, strict=True) if repr(pair[0]) != repr(pair[1])]


@pytest.mark.parametrize("fields", [PP2, VPP2], ids=["PP2", "PP2 VPP2"])
def test_stages_that_free_what_they_sent_train_bit_for_bit_the_same(fields: dict[str, Any]) -> None:
    assert run_ranks(2, differing, fields) == [[], []]


def sizes_and_losses(fields: dict[str, Any], view: bool) -> tuple[list[int], float]:
    """How many numbers a stage's outputs still hold after a step whose forward step may return views of them."""
    state, outputs = small_state(**fields), list[torch.Tensor]()

    def forward_step(data: Any, model: Any) -> Any:
        output, loss_function = minloop.gpt_forward_step(data, model)
        outputs.append(output)
        return output.view(output.shape) if view else output, loss_function

    metrics = minloop.train_step(state, text_loader(state), num_microbatches=4, forward_step=forward_step)
    minloop.shutdown_distributed()
    return [output.numel() for output in outputs], metrics.loss.item()


def test_what_was_sent_is_freed_and_may_be_a_view() -> None:
    kept = PP2 | {"deallocate_pipeline_outputs": False}
    (sizes, loss), (held, expected), (_, viewed) = (
        run_ranks(2, sizes_and_losses, fields, view)[0] for fields, view in ((PP2, False), (kept, False), (PP2, True))
    )
    assert sizes == [1] * 4
    assert min(held) > 1
    assert loss == expected == viewed


def test_batch_sizes_by_steps_need_nothing_global() -> None:
    text = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (block,) = (block for block in blocks if "StepBatchsizeNumMicroBatchesCalculator" in block)
    groups = SimpleNamespace(dp=SimpleNamespace(rank=lambda: 0))
    for consumed, size in ((0, 16), (99, 16), (100, 32), (999, 32), (1000, 64)):
        names: dict[str, Any] = {"groups": groups, "state": SimpleNamespace(consumed_samples=consumed)}
        exec(block, names | {"StepBatchsizeNumMicroBatchesCalculator": StepBatchsizeNumMicroBatchesCalculator}, names)
        assert (names["sizes"].get_current_global_batch_size(), names["sizes"].get()) == (size, size // 4)
