"""The schedule: its rates are those of Megatron-LM, it resumes, and what contradicts itself is refused."""

import contextlib
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig
from ranks import run_ranks
from small import small_state

import minloop

ITERATIONS = {"train_iters": 16, "lr_warmup_iters": 4}
SAMPLES = {"train_samples": 130, "lr_warmup_samples": 30, "lr_decay_samples": 125}
SHORT = {"lr_wsd_decay_iters": 6}
# Every case runs for 20 steps of 8 samples, beyond the end of its decay.
CASES: dict[str, dict[str, Any]] = {
    "constant": {"lr_decay_style": "constant", **ITERATIONS},
    "linear": {"lr_decay_style": "linear", **ITERATIONS, "lr_warmup_init": 1e-5},
    "cosine": {"lr_decay_style": "cosine", "train_iters": 20, "lr_decay_iters": 13, "lr_warmup_fraction": 0.3},
    "inverse-square-root": {"lr_decay_style": "inverse-square-root", **ITERATIONS},
    **{f"WSD {s}": {"lr_decay_style": "WSD", "lr_wsd_decay_style": s, **ITERATIONS, **SHORT}
       for s in ("linear", "cosine", "exponential", "minus_sqrt")},
    "samples": {"lr_decay_style": "cosine", **SAMPLES},
    "weight decay": {"lr_decay_style": "linear", "weight_decay_incr_style": "cosine", "start_weight_decay": 0.01,
                     "end_weight_decay": 0.1, **ITERATIONS},
}  # fmt: skip


def megatron_lm(cases: list[list[str]]) -> list[list[list[float]]]:
    """Learning rates and weight decays of 20 steps by Megatron-LM's arguments and scheduler, for each case's words."""
    minloop.cpu_backend()
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, global_vars, training

    found: list[list[list[float]]] = []
    for words in cases:
        sys.argv = ["pretrain_gpt.py", *words]
        arguments.parse_and_validate_args()
        optimizer: Any = SimpleNamespace(param_groups=[{}])
        found.append(rates(optimizer, training.get_optimizer_param_scheduler(optimizer), 20))
        global_vars.destroy_global_vars()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
    return found


def build(case: dict[str, Any]) -> tuple[Any, Any]:
    config = OptimizerConfig(lr=3e-3, min_lr=1e-4, weight_decay=0.05)
    optimizer: Any = SimpleNamespace(param_groups=[{}], config=config)
    return optimizer, minloop.build_scheduler(optimizer, global_batch_size=8, **case)


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
    history: list[list[float]] = []
    for _ in range(steps):
        history.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]])
        scheduler.step(increment=8)
    return history


def test_the_rates_are_megatron_lms():
    model = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 8 --global-batch-size 8 --transformer-impl local --vocab-size 256 --mock-data
        --tokenizer-type NullTokenizer --lr 3e-3 --min-lr 1e-4 --weight-decay 0.05 --distributed-backend gloo""".split()
    words = [
        model + [*itertools.chain(*([f"--{name.replace('_', '-')}", str(value)] for name, value in case.items()))]
        for case in CASES.values()
    ]
    (theirs,) = run_ranks(1, megatron_lm, words)
    for case, expected in zip(CASES, theirs, strict=True):
        assert rates(*build(CASES[case]), 20) == expected, case
        assert len(set(map(tuple, expected))) > 3


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_schedule_goes_on(case: str):
    straight = rates(*build(CASES[case]), 20)
    optimizer, scheduler = build(CASES[case])
    assert rates(optimizer, scheduler, 9) == straight[:9]
    resumed, fresh = build(CASES[case])
    fresh.load_state_dict(scheduler.state_dict())
    assert rates(resumed, fresh, 11) == straight[9:]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({}, "train_iters and train_samples are None"),
        ({"train_iters": 9, "train_samples": 72}, r"train_iters \(9\) and train_samples \(72\)"),
        ({"train_iters": 9, "global_batch_size": None}, r"train_iters \(9\) without global_batch_size"),
        (
            {"train_iters": 9, "lr_warmup_iters": 9},
            r"warm-up \(72 samples, .*shorter than the decay \(72 samples,",
        ),
        ({"train_iters": 9, "lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, "give one of them"),
        ({"train_iters": 9, "lr_warmup_iters": 0, "lr_warmup_fraction": 0.1}, "give one of them"),
        ({"train_iters": 9, "lr_decay_iters": 0}, r"lr_decay_iters \(0\) must be at least 1"),
        ({"train_iters": 9, "lr_decay_style": "WSD", "lr_wsd_decay_samples": -8}, r"samples \(-8\) must be at least 1"),
        ({"train_iters": 9, "lr_decay_style": "square"}, "'square' is none of constant, linear"),
        ({"train_iters": 9, "lr_decay_style": "WSD"}, "needs lr_wsd_decay_iters"),
        ({"train_iters": 9, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 10}, "longer than the whole"),
        ({"train_iters": 9, "lr_warmup_init": 1.0}, r"lr_warmup_init \(1.0\) must be between 0 and"),
        ({"train_iters": 9, "weight_decay_incr_style": "linear"}, "needs start_weight_decay"),
        ({"train_iters": 9, "end_weight_decay": 0.1}, "'constant' with start_weight_decay"),
    ],
)
def test_a_contradiction_is_refused(case: dict[str, Any], message: str):
    optimizer, _ = build(ITERATIONS)
    defaults: dict[str, Any] = {"global_batch_size": 8}
    with pytest.raises(ValueError, match=message):
        minloop.build_scheduler(optimizer, **defaults | case)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"decoupled_lr": 1e-5}, r"OptimizerConfig.min_lr \(0.0001\) must be between 0 and .*decoupled_lr \(1e-05\)"),
        (
            {"decoupled_lr": 1e-3, "decoupled_min_lr": 2e-3},
            r"decoupled_min_lr \(0.002\) must be .* set a smaller decoupled",
        ),
        ({"decoupled_lr": 1e-5, "decoupled_min_lr": 0.0}, None),
        ({"decoupled_lr": 1e-3}, None),
    ],
)
def test_a_rate_of_their_own_for_embeddings_does_not_rise(rates: dict[str, float], message: str | None) -> None:
    optimizer, _ = build(ITERATIONS)
    for name, value in rates.items():
        setattr(optimizer.config, name, value)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        minloop.build_scheduler(optimizer, train_samples=9)


def decayed() -> list[tuple[bool, float]]:
    state = small_state(optimizer={"weight_decay": 0.1}, scheduler=ITERATIONS)
    groups = state.optimizer.param_groups
    minloop.shutdown_distributed()
    return [(parameter.dim() == 1, group["weight_decay"]) for group in groups for parameter in group["params"]]


def test_norms_and_biases_do_not_decay():
    (pairs,) = run_ranks(1, decayed)
    assert set(pairs) == {(True, 0.0), (False, 0.1)}
