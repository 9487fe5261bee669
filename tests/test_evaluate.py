"""Evaluation over several sets: its numbers are those of the definition, and it leaves no trace in training."""

import math
from typing import Any

import pytest
from ranks import run_ranks
from small import MICRO_BATCH_SIZE, Text, small_state, text_loader, train

import minloop

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def loaders(state: minloop.TrainState) -> dict[str, Any]:
    """Two sets, of other lengths and other batch sizes."""
    return {
        "text": text_loader(state),
        "more text": minloop.build_loader(Text(40), state.groups, micro_batch_size=1, shuffle=True, num_workers=1),
    }


def trained(evaluations: int) -> tuple[list[tuple[float, float]], list[dict[str, minloop.Evaluation]]]:
    state = small_state(ddp=SHARDED, hidden_dropout=0.1, attention_dropout=0.1)
    loader, sets, history = text_loader(state), loaders(state), list[tuple[float, float]]()
    results: list[dict[str, minloop.Evaluation]] = []
    for _ in range(3):
        history += train(state, loader, 1)
        results += [minloop.evaluate(state, sets, num_microbatches=2, eval_iters=2) for _ in range(evaluations)]
    minloop.shutdown_distributed()
    return history, results


def test_training_with_evaluation_is_training_without_it():
    for (plain, _), (beside, results) in zip(run_ranks(2, trained, 0), run_ranks(2, trained, 2), strict=True):
        assert plain == beside
        assert results[0] == results[1], "an evaluation began where another had ended"
        losses = [result["text"].loss for result in results[::2]]
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 3


def against_eval_steps() -> None:
    """The mean is over all tokens, of which every microbatch has another number."""
    state = small_state(pipeline_model_parallel_size=2)
    results = minloop.evaluate(
        state, loaders(state), num_microbatches=2, eval_iters={"text": 3, "more text": 1}, bytes_per_token={"text": 2.5,
        "more text": 4}
    )  # fmt: skip
    loader = text_loader(state)
    steps = [minloop.eval_step(state, loader, num_microbatches=2) for _ in range(3)]
    tokens = sum(step.num_tokens.item() for step in steps)
    result = results["text"]
    assert result.num_tokens == tokens
    assert result.num_samples == 3 * 2 * MICRO_BATCH_SIZE
    assert result.loss == pytest.approx(sum(s.loss.item() * s.num_tokens.item() for s in steps) / tokens, rel=1e-12)
    assert result.losses == {"lm loss": result.loss}
    assert result.perplexity == math.exp(result.loss)
    assert result.bits_per_byte == pytest.approx(math.log2(result.perplexity) / 2.5)
    assert results["more text"].num_samples == 2
    record = minloop.evaluation_record(state, results)
    assert record["lm loss validation-text"] == result.loss
    assert record["lm loss validation-more text ppl"] == results["more text"].perplexity

    sets: Any = {"text": text_loader(state)}
    with pytest.raises(ValueError, match="eval_iters has a, but not 'text'"):
        minloop.evaluate(state, sets, num_microbatches=2, eval_iters={"a": 1})
    wrong: list[dict[str, Any]] = [{"eval_iters": 0}, {"bytes_per_token": 0}]
    for options in wrong:
        with pytest.raises(ValueError, match=r"(eval_iters|bytes_per_token) \(0\) of 'text' must be positive"):
            minloop.evaluate(state, sets, num_microbatches=2, **options)
    short = minloop.build_loader(Text(4), state.groups, micro_batch_size=MICRO_BATCH_SIZE, wrap=False)
    with pytest.raises(RuntimeError, match="the data ended") as error:
        minloop.evaluate(state, {"short": short}, num_microbatches=2, eval_iters=2)
    assert error.value.__notes__ == ["It is the set 'short' that was evaluated."]
    assert short.consumed_samples == 0, "it was not put back"
    with pytest.raises(TypeError, match="list begins anew"):
        minloop.evaluate(state, {"text": [1]}, num_microbatches=2)  # pyright: ignore[reportArgumentType]  # as meant
    with pytest.raises(RuntimeError, match="the data ended"):
        minloop.evaluate(state, {"text": iter([next(text_loader(state))])}, num_microbatches=2)
    with pytest.raises(RuntimeError, match=r"ended at iteration 1: it held 1 of the 2 .* wrap=True"):
        minloop.train_step(state, iter([next(text_loader(state))]), num_microbatches=2)
    minloop.shutdown_distributed()


def test_the_numbers_are_those_of_all_tokens():
    run_ranks(2, against_eval_steps)
