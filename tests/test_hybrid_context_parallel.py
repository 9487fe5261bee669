"""Hybrid context parallelism: samples of all lengths, each on as many ranks as it wants, train as packs do on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from ranks import run_ranks
from small import shared_state, small_config, small_state

import minloop
from minloop.hybrid_context_parallel import _AlignedScheduler  # pyright: ignore[reportPrivateUsage]
from minloop.init_checks import check_world_size

LENGTHS = [16, 32, 64, 64, 16, 16, 48, 16, 128, 16, 32, 80, 16, 16, 16, 64, 112, 16] * 3
PACKS = 4  # of 128 tokens, in a global batch
ROPE: dict[str, Any] = {"gpt": {"position_embedding_type": "rope"}}
LOCAL = {"transformer_impl": "local"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARDED: dict[str, Any] = {"ddp": {"use_distributed_optimizer": True}}


def packs(multiple: int = 16) -> Any:
    generator = torch.Generator().manual_seed(1)
    samples = [
        {name: torch.randint(0, 256, (length,), generator=generator) for name in ("tokens", "labels")}
        | {"loss_mask": (torch.rand(length, generator=generator) > 0.2).float()}
        for length in LENGTHS
    ]
    return minloop.pack_samples(samples, sequence_length=128, multiple=multiple)


def hybrid(most: int, **fields: Any) -> dict[str, Any]:
    """In fp32, for which Transformer Engine has no such attention, unless the fields say otherwise."""
    return ROPE | LOCAL | {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": most} | fields


def history(directory: str, cases: list[dict[str, Any]], save: bool = False) -> list[list[tuple[float, ...]]]:
    """Of each case (loss, gradient norm, tokens) of three steps, and the loss of an evaluation."""
    found: list[list[tuple[float, ...]]] = []
    for fields in cases:
        state = shared_state(directory, save, **fields)
        loader = minloop.build_loader(packs(), state.groups, micro_batch_size=1)
        options: Any = {"num_microbatches": PACKS // state.groups.dp.size()}
        options["forward_step"] = minloop.packed_forward_step
        steps: list[tuple[float, ...]] = []
        for _ in range(3):
            metrics = minloop.train_step(state, loader, **options)
            assert metrics.grad_norm is not None
            steps.append((metrics.loss.item(), metrics.grad_norm.item(), metrics.num_tokens.item()))
        found.append([*steps, (minloop.eval_step(state, loader, **options).loss.item(),)])
        minloop.check_replicas(state)
        minloop.shutdown_distributed()
    return found


def differences(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> float:
    """The largest relative one."""
    pairs = zip(sum(found, ()), sum(expected, ()), strict=True)
    return max(abs(own - theirs) / abs(theirs) for own, theirs in pairs)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [hybrid(64), hybrid(64, **SHARDED)]),
        (4, [hybrid(32), hybrid(32, cp_comm_type="all_gather", **RECOMPUTED),
             hybrid(64, tensor_model_parallel_size=2, sequence_parallel=True)]),
    ],
    ids=["two", "four"],
)  # fmt: skip
def test_samples_train_alike_on_as_many_ranks_as_they_want(
    tmp_path: Path, ranks: int, cases: list[dict[str, Any]]
) -> None:
    ((expected,),) = run_ranks(1, history, str(tmp_path), [ROPE | LOCAL], save=True)
    results = run_ranks(ranks, history, str(tmp_path), cases)
    assert results == [results[0]] * ranks
    for found in results[0]:
        assert differences(found, expected) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_TE, reason="needs Transformer Engine")
def test_samples_train_alike_with_transformer_engine(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 256,
    }
    ((expected,),) = run_ranks(1, history, str(tmp_path), [ROPE | sizes], save=True)
    cases = [hybrid(64, **sizes), hybrid(64, cp_comm_type="all_gather", **sizes)]
    for found in run_ranks(2, history, str(tmp_path), cases)[0]:
        assert differences(found, expected) < 0.02


def sizes_of_groups() -> list[list[int]]:
    """How many ranks share each sample of a step on this rank."""
    state = small_state(**hybrid(32))
    seen: list[int] = []

    def forward_step(data: Any, model: Any) -> Any:
        sample = next(data)
        seen.append(int(sample["local_cp_size"]))
        return minloop.packed_forward_step(iter([sample]), model)

    loader = minloop.build_loader(packs(), state.groups, micro_batch_size=1)
    minloop.train_step(state, loader, num_microbatches=3, forward_step=forward_step)
    minloop.shutdown_distributed()
    return [seen]


def test_long_samples_are_shared_and_short_ones_are_not() -> None:
    sizes = {size for ((seen),) in run_ranks(4, sizes_of_groups) for size in seen}
    assert sizes >= {1, 2, 4}


def test_every_sample_is_on_ranks_that_have_a_group() -> None:
    """Lengths with which mcore's scheduler puts one on the third to the sixth of eight ranks."""

    class Eight:
        def size(self) -> int:
            return 8

    group: Any = Eight()
    lengths = [256, 256, 128, 128, 100, 128, 200, 100, 100, 16]
    _, rounds = _AlignedScheduler(64, group).get_groups_and_subsamples([*enumerate(lengths)], None)
    places = [
        [rank for rank, numbers in enumerate(ranks) if number in numbers]
        for ranks in rounds
        for number in {number for numbers in ranks for number in numbers}
    ]
    assert len(places) == len(lengths)
    for ranks in places:
        assert ranks == [*range(ranks[0], ranks[0] + len(ranks))]
        assert ranks[0] % len(ranks) == 0


def hybrid_config(**fields: Any) -> minloop.TransformerConfig:
    options: dict[str, Any] = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 32}
    return small_config(**(options | fields))


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_other_numbers_of_ranks_than_powers_of_two_are_refused(ranks: int) -> None:
    config = hybrid_config(**LOCAL)
    with pytest.raises(ValueError, match=f"hybrid_context_parallel=True with {ranks} data parallel ranks"):
        check_world_size(config, ranks)


def refusals() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_seqlen_per_dp_cp_rank": None}, "hybrid_context_parallel=True needs max_seqlen_per_dp_cp_rank"),
        ({"context_parallel_size": 2}, "with context_parallel_size=2: set that to 1"),
        ({"pipeline_model_parallel_size": 2}, "with pipeline_model_parallel_size=2"),
        ({"calculate_per_token_loss": False}, "with calculate_per_token_loss=False"),
        ({"cp_comm_type": "a2a"}, "with cp_comm_type='a2a': set that to None or 'p2p' or 'all_gather'"),
    ]
    for fields, match in cases:
        with pytest.raises(ValueError, match=match):
            hybrid_config(**fields)
    state = small_state(**hybrid(32))
    step: Any = {"num_microbatches": 1, "forward_step": minloop.packed_forward_step}

    def loader(multiple: int) -> Any:
        return minloop.build_loader(packs(multiple), state.groups, micro_batch_size=1)

    with pytest.raises(ValueError, match=r"a sample of 128 tokens is more than max_seqlen_per_dp_cp_rank \(32\)"):
        minloop.train_step(state, loader(16), num_microbatches=4, forward_step=minloop.packed_forward_step)
    with pytest.raises(ValueError, match="would ignore: attention would cross documents"):
        minloop.train_step(state, loader(16), num_microbatches=1)
    plain = ({name: value for name, value in batch.items() if name != "cu_seqlens"} for batch in loader(16))
    with pytest.raises(ValueError, match="it deals out the samples of packs"):
        minloop.train_step(state, plain, **step)
    with pytest.raises(ValueError, match="token_logprobs with hybrid_context_parallel=True"):
        minloop.token_logprobs(state, [next(loader(16))])
    with pytest.raises(ValueError, match="forward_logits with hybrid_context_parallel=True"):
        minloop.forward_logits(state, torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match="record_layout with hybrid_context_parallel=True"):
        minloop.record_layout(state, loader(16), **step)
    minloop.shutdown_distributed()


def test_what_cannot_be_dealt_out_is_refused() -> None:
    run_ranks(2, refusals)
