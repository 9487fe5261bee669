"""Comparing layouts: the same is found the same, and a planted fault is found and pointed at."""

import contextlib
import importlib
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankError, run_ranks
from small import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, rounding, small_config, small_state, text_loader, train

import minloop
import minloop.data_parallel
from minloop.sameness import compare as comparison
from minloop.sameness import replicas

TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = TP | {"sequence_parallel": True}
LOCAL: dict[str, Any] = {"transformer_impl": "local"}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
    "moe_grouped_gemm": False,  # with which weights have other names
}
TOLERANCE = rounding(1e-6)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


@contextlib.contextmanager
def no_finalisation() -> Generator[None]:
    with mock.patch.object(minloop.data_parallel, "_finalize", _nothing):
        yield


@contextlib.contextmanager
def no_sum_over_sequence_parts() -> Generator[None]:
    # the package's attribute of that name is the function
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with mock.patch.object(module, "_allreduce_non_tensor_model_parallel_grads", _nothing):
        yield


def compare(
    layout: dict[str, Any], fields: dict[str, Any], fault: Any = contextlib.nullcontext
) -> list[minloop.Difference]:
    reference = small_config(**fields)
    other = minloop.replace_layout(reference, **layout)

    def build(config: minloop.TransformerConfig) -> minloop.TrainState:
        with fault() if config is other else contextlib.nullcontext():
            return small_state(config=config, optimizer={"loss_scale": 1024.0 if config.fp16 else None})

    def data(state: minloop.TrainState) -> Iterator[minloop.Batch]:
        return text_loader(state)

    with fault() if fault is no_sum_over_sequence_parts else contextlib.nullcontext():
        return minloop.compare_layouts(
            build, reference, other, data, global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE
        )


@pytest.mark.parametrize(
    ("ranks", "layout", "fields"),
    [
        (2, SP, {}),
        (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {}),
        (2, {"context_parallel_size": 2}, LOCAL),
        (4, SP | {"expert_model_parallel_size": 2}, MOE),
    ],
    ids=["TP2+SP", "PP2 VPP2", "CP2", "TP2+SP×EP2"],
)
def test_layouts_that_are_the_same(ranks: int, layout: dict[str, Any], fields: dict[str, Any]) -> None:
    results = run_ranks(ranks, compare, layout, fields)
    assert all(result == results[0] for result in results), "ranks return different comparisons"
    differences = results[0]
    assert minloop.first_difference(differences, TOLERANCE) is None
    names = [difference.what for difference in differences]
    assert names[:6] == [*(f"output of decoder.layers[{n}]" for n in range(4)), "output of token losses", "lm loss"]
    assert "gradient of embedding.word_embeddings.weight" in names
    assert "gradient of decoder.layers.self_attention.linear_proj.weight[3]" in names


def test_gradients_that_are_not_finalised() -> None:
    first = minloop.first_difference(run_ranks(2, compare, SP, {}, no_finalisation)[0], TOLERANCE)
    assert first is not None
    # With sequence parallel what is left out is the sum over the parts of the sequence.
    assert first.what.startswith("gradient of")
    assert "norm" in first.what


def test_sequence_parts_that_are_not_summed() -> None:
    differences = run_ranks(2, compare, SP, {}, no_sum_over_sequence_parts)[0]
    wrong = [difference for difference in differences if not difference.relative <= TOLERANCE]
    assert wrong
    unexplained = [d.what for d in wrong if "with sequence_parallel finalize_model_grads sums it" not in d.hint]
    assert not unexplained
    assert "gradient of decoder.final_layernorm.weight" in [difference.what for difference in wrong]


def same_data_everywhere() -> list[minloop.Difference]:
    records: list[minloop.LayoutRecord] = []
    for faulty in (False, True):
        state = small_state()
        first = mock.patch.object(type(state.groups.dp), "rank", return_value=0)
        with first if faulty else contextlib.nullcontext():
            loader = text_loader(state)
        records.append(minloop.record_layout(state, loader, num_microbatches=2))
        minloop.shutdown_distributed()
    return minloop.compare_records(*records)


def test_data_parallel_ranks_that_read_the_same() -> None:
    (difference,) = run_ranks(2, same_data_everywhere)[0]
    assert difference.what == "samples"
    assert "a sample was read 2 times, by several data parallel ranks" in difference.hint


def another_loss_mask_on_one_rank() -> list[minloop.Difference]:
    records: list[minloop.LayoutRecord] = []
    for faulty in (False, True):
        state = small_state(**TP)
        loader = text_loader(state)
        batches = [next(loader) for _ in range(4)]
        if faulty and torch.distributed.get_rank() == 1:
            batches[2] = batches[2] | {"loss_mask": torch.ones_like(batches[2]["loss_mask"])}
        records.append(minloop.record_layout(state, iter(batches), num_microbatches=4))
        minloop.shutdown_distributed()
    return minloop.compare_records(*records)


def test_ranks_of_one_data_parallel_index_that_read_differently() -> None:
    (difference,) = run_ranks(2, another_loss_mask_on_one_rank)[0]
    assert "ranks of data parallel index [0] of the other layout read different batches" in difference.hint


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_layouts_are_compared(precision: str) -> None:
    assert minloop.first_difference(run_ranks(2, compare, SP, {precision: True})[0], 0.1) is None


def test_fp16_gradients_are_gathered_without_their_scale() -> None:
    one, other = (
        run_ranks(1, gradients, {"fp16": True, "optimizer": {"loss_scale": scale}})[0] for scale in (16.0, 1024.0)
    )
    for name, gradient in one.items():
        assert (other[name] - gradient).abs().max() <= 0.02 * gradient.abs().max(), name


def gradients(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    record = minloop.record_layout(state := small_state(**fields), text_loader(state), num_microbatches=4)
    minloop.shutdown_distributed()
    return record.gradients


BIASED: dict[str, Any] = MOE | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def expert_biases(state: minloop.TrainState) -> list[torch.Tensor]:
    return [buffer for name, buffer in state.chunks[0].named_buffers() if name.endswith("expert_bias")]


def record_with_expert_bias() -> list[float]:
    state = small_state(**BIASED)
    minloop.record_layout(state, text_loader(state), num_microbatches=2)
    moved = [bias.abs().max().item() for bias in expert_biases(state)]
    expert_biases(state)[0][0] += torch.distributed.get_rank()
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.router\.expert_bias differs between data and context"):
        minloop.check_replicas(state)
    return moved


def test_recording_moves_no_expert_bias_and_replicas_of_it_are_checked() -> None:
    assert run_ranks(2, record_with_expert_bias)[0] == [0.0] * 4


def refused_records() -> None:
    state = small_state()
    with pytest.raises(RuntimeError, match="it held 1 of 4 microbatches"):
        minloop.record_layout(state, iter([next(text_loader(state))]), num_microbatches=4)
    minloop.shutdown_distributed()
    state = small_state(hidden_dropout=0.1)
    with pytest.raises(ValueError, match=r"hidden_dropout is 0\.1 and attention_dropout 0\.0"):
        minloop.record_layout(state, text_loader(state), num_microbatches=4)


def test_what_cannot_be_recorded_is_refused() -> None:
    run_ranks(1, refused_records)


def test_a_layer_that_is_run_several_times_is_recorded_each_time() -> None:
    fields = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "gpt": {"position_embedding_type": "rope"}}
    names = run_ranks(1, recorded_outputs, fields)[0]
    assert [name for name in names if name.endswith("call 2")]


def recorded_outputs(fields: dict[str, Any]) -> list[str]:
    state = small_state(**fields)
    return [*minloop.record_layout(state, text_loader(state), num_microbatches=4).outputs]


def another_weight(layout: dict[str, Any]) -> list[minloop.Difference]:
    records: list[minloop.LayoutRecord] = []
    for faulty in (False, True):
        state = small_state(**layout)
        if faulty:
            for name, parameter in state.chunks[0].named_parameters():
                if "layers.2.mlp.linear_fc1.weight" in name:
                    parameter.data.mul_(1.001)
        records.append(minloop.record_layout(state, text_loader(state), num_microbatches=4))
        minloop.shutdown_distributed()
    return minloop.compare_records(*records)


def test_the_first_layer_that_differs_is_named() -> None:
    first = minloop.first_difference(run_ranks(2, another_weight, SP)[0], TOLERANCE)
    assert first is not None
    assert first.what == "output of decoder.layers[2]"


def replicas_after_steps(
    fields: dict[str, Any], fault: Any = contextlib.nullcontext, stream_per_rank: bool = False
) -> None:
    with fault():
        state = small_state(**fields)
        if stream_per_rank:
            torch.manual_seed(torch.distributed.get_rank())
        train(state, text_loader(state), 3)
    minloop.check_replicas(state)
    minloop.shutdown_distributed()


TIED: dict[str, Any] = {"pipeline_model_parallel_size": 2, "gpt": {"share_embeddings_and_output_weights": True}}
PREDICTING: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "mtp_num_layers": 1,
    "gpt": {"position_embedding_type": "rope"},
}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (2, {}),
        (2, SP | DROPOUT),
        (2, TP | DROPOUT),
        (4, TIED | TP | DROPOUT),
        (4, {"context_parallel_size": 2, "ddp": {"use_distributed_optimizer": True}} | DROPOUT),
        (4, MOE | {"expert_model_parallel_size": 2}),
    ],
    ids=["DP2", "TP2+SP", "TP2", "TP2×PP2 tied", "CP2×DP2 ZeRO-1", "EP2×EDP2"],
)
def test_replicas_stay_together(ranks: int, fields: dict[str, Any]) -> None:
    run_ranks(ranks, replicas_after_steps, fields)


def change_one_element(fields: dict[str, Any], name: str) -> None:
    state = small_state(**fields)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        weights = dict(state.chunks[0].named_parameters())
        (found,) = [weight for key, weight in weights.items() if key.endswith(name)]
        found.data.view(-1)[0] += 1e-3
    minloop.check_replicas(state)


@pytest.mark.parametrize(
    ("ranks", "fields", "name", "message"),
    [
        (2, {}, "word_embeddings.weight", "word_embeddings.weight differs between data and context parallel ranks 0 "),
        (2, TP, "layers.0.mlp.linear_fc2.bias", "differs between tensor parallel ranks 0 and 1.*random numbers"),
        (2, TIED, "output_layer.weight", "word embedding differs between embedding ranks 0 and 1"),
        (2, PREDICTING, "word_embeddings.weight", "word embedding differs between embedding ranks 0 and 1"),
        (4, MOE | {"expert_model_parallel_size": 2}, "layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
         "differs between expert data parallel ranks 1 and 3"),
    ],
    ids=["DP2", "TP2", "PP2 tied", "PP2 MTP", "EP2×EDP2"],
)  # fmt: skip
def test_a_replica_that_differs_in_one_element(ranks: int, fields: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(ranks, change_one_element, fields, name)


def test_gradients_that_are_not_finalised_tear_replicas_apart() -> None:
    message = "data and context parallel ranks 0 and 1: gradients were not summed"
    with pytest.raises(RankError, match=message):
        run_ranks(2, replicas_after_steps, {"ddp": {"overlap_grad_reduce": False}}, no_finalisation)


def test_sequence_parts_that_are_not_summed_tear_replicas_apart() -> None:
    with pytest.raises(RankError, match=r"layer_?norm.* with sequence_parallel their gradients must be summed"):
        run_ranks(2, replicas_after_steps, SP, no_sum_over_sequence_parts)


def test_a_dropout_stream_of_its_own_per_rank_tears_replicas_apart() -> None:
    with pytest.raises(RankError, match=r"tensor parallel ranks 0 and 1: these ranks drew different random"):
        run_ranks(2, replicas_after_steps, TP | DROPOUT, stream_per_rank=True)


def test_what_one_layout_alone_has_differs() -> None:
    one = torch.ones(2)
    few, many = (
        minloop.LayoutRecord(outputs=dict.fromkeys(outputs, one), gradients=dict.fromkeys(gradients, one))
        for outputs, gradients in ((["a"], ["w"]), (["a", "b"], ["w", "x"]))
    )
    for records in ((few, many), (many, few)):
        found = {difference.what: difference.relative for difference in minloop.compare_records(*records)}
        assert found == {
            "output of a": 0.0,
            "output of b": torch.inf,
            "gradient of w": 0.0,
            "gradient of x": torch.inf,
        }


def test_weights_in_fp8_are_compared_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.arange(6.0).bfloat16()
    quantized: Any = SimpleNamespace(dequantize=lambda: plain)
    monkeypatch.setattr(replicas, "is_float8tensor", lambda weight: weight is quantized)
    assert torch.equal(replicas._checksums(quantized), replicas._checksums(plain))


def test_products_that_are_rounded_to_tf32_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = SimpleNamespace(transformer_impl="transformer_engine", params_dtype=torch.float32)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    comparison._say_what_rounds(config)
    assert not caplog.text
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    comparison._say_what_rounds(config)
    assert "set NVIDIA_TF32_OVERRIDE=0 before the program starts" in caplog.text
