"""Experts: each router trains the same model in all layouts it can; losses and loads are reported; any mask counts."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from ranks import RankError, run_ranks
from small import SEQUENCE_LENGTH, Text, rounding, shared_state, small_config, small_state, text_loader, train

import minloop
from minloop.layers.installed import let_experts_have_biases
from minloop.moe import other_training

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
SP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "EP2": (2, EP2),
    "EP4 ZeRO-1": (4, {"expert_model_parallel_size": 4, "ddp": {"use_distributed_optimizer": True}}),
    "TP2+SP": (2, SP),
    "TP2+SP×EP2": (4, SP | EP2),
    "TP2+SP×EP2, ETP1": (2, SP | EP2 | {"expert_tensor_parallel_size": 1}),
    "ETP2": (2, {"expert_tensor_parallel_size": 2}),
    "CP2×EP2": (2, EP2 | {"context_parallel_size": 2}),
    "PP2×EP2": (4, EP2 | {"pipeline_model_parallel_size": 2}),
}
TOLERANCE = rounding(1e-5)
PLACES = ["anywhere", pytest.param("gpu", marks=pytest.mark.gpu)]


class Weighted(Text):
    """Samples whose tokens count with weights: some with none at all, some only in the middle of the sequence."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        weights = torch.linspace(0.25, 1.5, SEQUENCE_LENGTH)
        quarter = SEQUENCE_LENGTH // 4
        if index % 8 < 2:
            weights.zero_()
        elif index % 8 < 4:
            weights[:quarter] = weights[-quarter:] = 0.0
        return sample | {"loss_mask": weights}


def run(
    directory: str, options: dict[str, Any], steps: int = 5, micro_batch_size: int = 2, weighted: bool = False
) -> list[dict[str, Any]]:
    """Train from the weights in `directory`, which are saved first if there are none; return what steps report."""
    state = small_state(seed=1, **(EXPERTS | options))
    if minloop.latest_checkpoint(directory):
        minloop.load_checkpoint(directory, state)
    else:
        minloop.save_checkpoint(directory, state)
    data = Weighted() if weighted else Text()
    loader = minloop.build_loader(data, state.groups, micro_batch_size=micro_batch_size)
    count = minloop.num_microbatches(8, micro_batch_size, state.groups)
    history: list[dict[str, Any]] = []
    for _ in range(steps):
        with minloop.expert_load(state.chunks, state.groups) as load:
            metrics = minloop.train_step(state, loader, num_microbatches=count)
        assert metrics.grad_norm is not None
        losses = {name: loss.item() for name, loss in metrics.losses.items()}
        numbers = {"grad norm": metrics.grad_norm.item(), "tokens": metrics.num_tokens.item()}
        history.append(losses | numbers | {"load": load().tolist()})
    minloop.shutdown_distributed()
    return history


def worst(history: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    """The largest relative difference of any number; loads must be equal."""
    assert [step["load"] for step in history] == [step["load"] for step in reference]
    assert [list(step) for step in history] == [list(step) for step in reference]
    numbers = [name for name in reference[0] if name != "load"]
    return max(abs(a[n] / b[n] - 1) for a, b in zip(history, reference, strict=True) for n in numbers)


ROUTERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two auxiliary losses, z-loss, gated shared experts": (
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.01, 0.01],
            "moe_z_loss_coeff": 1e-3,
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
        },
        ["EP4 ZeRO-1", "TP2+SP×EP2", "CP2×EP2", "PP2×EP2"],
    ),
    "global auxiliary loss": (
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01},
        ["TP2+SP", "CP2×EP2"],
    ),
    "sigmoid, bias, groups, fp64": (
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_dtype": "fp64",
        },
        ["TP2+SP×EP2, ETP1", "PP2×EP2"],
    ),
    "sqrtsoftplus, allgather, fp32, shared experts": (
        {
            "moe_router_score_function": "sqrtsoftplus",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": 32,
        },
        ["TP2+SP×EP2"],
    ),
    "top-1, pre-softmax, SwiGLU": (
        {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        },
        ["ETP2", "TP2+SP×EP2"],
    ),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, ["EP2"]),
    "quantile balancing": ({"moe_router_load_balancing_type": "quantile_balancing"}, ["TP2+SP×EP2"]),
    "capacity": ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, ["PP2×EP2"]),
    "capacity by position": ({"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"}, ["EP2"]),
    "every other layer, biases": ({"moe_layer_freq": [0, 1, 0, 1], "add_bias_linear": True}, ["EP2"]),
    "a stage without experts": ({"moe_layer_freq": [0, 0, 1, 1], "moe_z_loss_coeff": 1e-3}, ["PP2×EP2"]),
    "multi-token prediction": (
        {
            "mtp_num_layers": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "gpt": {"position_embedding_type": "rope"},
        },
        ["CP2×EP2", "PP2×EP2"],
    ),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_layouts_train_and_report_the_same(tmp_path: Path, router: str) -> None:
    options, layouts = ROUTERS[router]
    if any(layout.startswith("CP") for layout in layouts):  # which in fp32 mcore's layers have alone
        options = options | {"transformer_impl": "local"}
    (reference,) = run_ranks(1, run, str(tmp_path), options)
    assert reference[-1]["lm loss"] < 0.9 * reference[0]["lm loss"]
    for layout in layouts:
        ranks, fields = LAYOUTS[layout]
        histories = run_ranks(ranks, run, str(tmp_path), options | fields)
        assert all(history == histories[0] for history in histories), f"{layout}: ranks report different numbers"
        assert worst(histories[0], reference) <= TOLERANCE, layout


def test_losses_carry_megatrons_names() -> None:
    kinds = ["aux_loss", "seq_aux_loss", "global_aux_loss"]
    names = ["lm loss", "load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss"]
    options = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": [0.01] * 3, "moe_z_loss_coeff": 1e-3}
    for training, evaluation in run_ranks(1, names_of_losses, options | {"mtp_num_layers": 1}):
        assert training == [*names, "z_loss", "mtp_1 loss"]
        assert evaluation == ["lm loss"]


def names_of_losses(options: dict[str, Any]) -> tuple[list[str], list[str]]:
    state = small_state(**(EXPERTS | options))
    loader = text_loader(state)
    train = minloop.train_step(state, loader, num_microbatches=2)
    evaluation = minloop.eval_step(state, loader, num_microbatches=2)
    minloop.shutdown_distributed()
    return list(train.losses), list(evaluation.losses)


CAPACITY: dict[str, Any] = {"moe_expert_capacity_factor": 1.0}
SINKHORN: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn"}
GLOBAL: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("fields", "sizes", "messages"),
    [
        (CAPACITY, {"tp": 2}, [r"moe_expert_capacity_factor=1.0 with tensor_model_parallel_size \(2\)"]),
        (CAPACITY, {"dp": 2}, []),
        (SINKHORN, {"cp": 2}, [r"'sinkhorn' .* context_parallel_size \(2\)"]),
        (GLOBAL, {"dp": 2}, ["'global_aux_loss' with 2 data parallel ranks"]),
        (GLOBAL, {"tp": 2, "cp": 2}, []),
        ({"moe_input_jitter_eps": 0.1}, {}, []),
        ({"moe_router_force_load_balancing": True}, {}, ["moe_router_force_load_balancing=True: tokens are dealt out"]),
        ({"moe_router_force_biased": 1.0}, {}, ["moe_router_force_biased=1.0: tokens are dealt out"]),
        (CAPACITY | {"moe_input_jitter_eps": 0.1}, {"tp": 2, "dp": 2}, ["moe_expert_cap", "moe_input_jitter_eps=0.1"]),
    ],
)
def test_what_is_another_training_is_said(fields: dict[str, Any], sizes: dict[str, int], messages: list[str]) -> None:
    tp, cp, dp = (sizes.get(name, 1) for name in ("tp", "cp", "dp"))
    worlds = {"tp": tp, "cp": cp, "tp_cp": tp * cp, "tp_dp_cp": tp * cp * dp}
    groups: Any = SimpleNamespace(**{name: SimpleNamespace(size=lambda n=n: n) for name, n in worlds.items()})
    said = list(other_training(small_config(**(EXPERTS | fields)), groups))
    assert len(said) == len(messages)
    assert all(re.search(message, line) for message, line in zip(messages, said, strict=True))


def noisy_losses() -> tuple[list[float], list[str]]:
    """Losses of two evaluations and two steps at learning rate 0 on one batch; and what the training state said."""
    with mock.patch("minloop.moe.say_once") as say_once:
        state = small_state(**EXPERTS, moe_input_jitter_eps=0.1, lr=0.0)
    batch = [next(text_loader(state))]
    steps = [minloop.eval_step(state, batch, num_microbatches=1) for _ in range(2)]
    steps += [minloop.train_step(state, iter(batch), num_microbatches=1) for _ in range(2)]
    minloop.shutdown_distributed()
    return [step.loss.item() for step in steps], [call.args[0] for call in say_once.call_args_list]


def test_routers_inputs_are_jittered_in_training_only() -> None:
    for losses, said in run_ranks(2, noisy_losses):
        assert losses[0] == losses[1]
        assert len(set(losses)) == 3
        assert len(said) == 1
        assert said[0].startswith("moe_input_jitter_eps=0.1")


def balanced_losses() -> tuple[dict[str, float], torch.Tensor]:
    """What a step reports whose routers give every expert the same weight, and the experts' load."""
    options: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    options |= {"moe_z_loss_coeff": 1.0, "lr": 0.0}
    state = small_state(**EXPERTS | options)
    for name, parameter in state.chunks[0].named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(parameter)
    with minloop.expert_load(state.chunks, state.groups) as load:
        metrics = minloop.train_step(state, text_loader(state), num_microbatches=4)
        minloop.eval_step(state, text_loader(state), num_microbatches=1)
    tokens = load()
    minloop.shutdown_distributed()
    return {name: loss.item() for name, loss in metrics.losses.items()}, tokens


def test_reported_losses_and_loads_are_those_of_the_definition() -> None:
    """With equal probabilities E · Σ f P is 1 for whatever choice, and the square of the log-sum-exp is (ln 4)²."""
    ((losses, load),) = run_ranks(1, balanced_losses)
    assert losses["load_balancing_loss"] == pytest.approx(1.0, rel=rounding(1e-6))
    assert losses["z_loss"] == pytest.approx(1.9218121, rel=rounding(1e-6))
    assert load.shape == (4, 4)
    assert load.sum(dim=1).tolist() == [2 * (8 + 2) * SEQUENCE_LENGTH] * 4  # two experts for each token of both


def test_the_global_loss_weighs_the_same_for_any_number_of_data_parallel_ranks(tmp_path: Path) -> None:
    options = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.05, "lr": 1e-3}
    (reference,) = run_ranks(1, run, str(tmp_path), options, 3, 8)
    for ranks in (2, 4):
        history = run_ranks(ranks, run, str(tmp_path), options, 3, 8 // ranks)[0]
        assert worst(history, reference) <= TOLERANCE


@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "mean of microbatches"])
def test_any_loss_mask_counts_exactly(tmp_path: Path, per_token: bool) -> None:
    """Weights that are no integers; microbatches, data and context parallel ranks without a single token."""
    options = {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "calculate_per_token_loss": per_token,
    }
    (reference,) = run_ranks(1, run, str(tmp_path), options, 4, weighted=True)
    limit = rounding(2e-6)
    weights = sum(float(Weighted()[index]["loss_mask"].sum()) for index in range(8))
    assert reference[0]["tokens"] == pytest.approx(weights, rel=1e-6)
    assert weights % 1 > 0.1
    for layout in ("EP4 ZeRO-1", "PP2×EP2") + ("CP2×EP2",) * per_token:
        ranks, fields = LAYOUTS[layout]
        assert worst(run_ranks(ranks, run, str(tmp_path), options | fields, 4, weighted=True)[0], reference) < limit
    if per_token:
        (in_one,) = run_ranks(1, run, str(tmp_path), options, 4, 8, weighted=True)
        assert worst(in_one, reference) < limit


def starved(directory: str, fields: dict[str, Any], *, first: bool = False) -> list[float]:
    """Losses of steps in which routers choose the first two experts alone, whatever comes."""
    biased: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    options: dict[str, Any] = EXPERTS | biased | fields
    state = shared_state(directory, first, **options)
    for name, buffer in state.chunks[0].named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    losses = [loss for loss, _ in train(state, text_loader(state), 3)]
    minloop.shutdown_distributed()
    return losses


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("place", PLACES)
def test_a_ranks_experts_may_have_no_token(tmp_path: Path, place: str, dispatcher: str) -> None:
    options: dict[str, Any] = {"moe_token_dispatcher_type": dispatcher, "bf16": place == "gpu"}
    (alone,) = run_ranks(1, starved, str(tmp_path), options, first=True)
    both = run_ranks(2, starved, str(tmp_path), options | EP2)
    assert alone[-1] < alone[0]
    for losses in both:
        assert losses == pytest.approx(alone, rel=1e-2 if place == "gpu" else rounding(1e-5))


class View(torch.autograd.Function):
    """What it returns is a view, as of Transformer Engine's linear layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone().view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def biased_losses(copied: bool | None, fields: dict[str, Any]) -> list[float]:
    """Losses of steps with experts with biases, whose products are views unless `copied` is None."""
    options: dict[str, Any] = EXPERTS | {"add_bias_linear": True} | fields
    state = small_state(**options)
    if copied is not None:
        layers: Any = (m.local_experts for m in state.chunks[0].modules() if isinstance(m, SequentialMLP))
        for expert in itertools.chain.from_iterable(layers):
            expert.linear_fc2.register_forward_hook(lambda _, __, pair: (View.apply(pair[0]), pair[1]))
        if copied:
            let_experts_have_biases(state.chunks[0])
    losses = [loss for loss, _ in train(state, text_loader(state), 3)]
    minloop.shutdown_distributed()
    return losses


@pytest.mark.parametrize("place", PLACES)
def test_experts_may_have_biases(place: str) -> None:
    fields = {"transformer_impl": "local"} if place == "anywhere" else {}
    ((first, *_, last),) = plain = run_ranks(1, biased_losses, None, fields)
    assert last < first
    if place == "anywhere":
        assert run_ranks(1, biased_losses, True, fields) == plain
        with pytest.raises(RankError, match="is a view and is being modified inplace"):
            run_ranks(1, biased_losses, False, fields)


def biases(directory: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert biases after three steps, and those that another state loads from the checkpoint."""
    biased: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    options = EXPERTS | EP2 | biased
    found: list[torch.Tensor] = []
    for seed in (1, 2):
        state = small_state(seed=seed, **options)
        if seed == 1:
            for _ in range(3):
                minloop.train_step(state, text_loader(state), num_microbatches=2)
            minloop.save_checkpoint(directory, state)
        else:
            minloop.load_checkpoint(directory, state)
        found.append(torch.stack([b for n, b in state.chunks[0].named_buffers() if n.endswith("expert_bias")]))
        minloop.shutdown_distributed()
    return found[0], found[1]


def test_expert_biases_are_updated_on_all_ranks_alike_and_saved(tmp_path: Path) -> None:
    (trained, loaded), (trained_1, loaded_1) = run_ranks(2, biases, str(tmp_path))
    assert trained.shape == (4, 4)
    assert trained.abs().max() > 0
    assert all(torch.equal(trained, other) for other in (loaded, trained_1, loaded_1))


def alternating(options: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Losses of states of one process that take turns."""
    reported: list[list[dict[str, float]]] = []
    states = [small_state(**(EXPERTS | fields)) for fields in options]
    for state in states:
        minloop.record_layout(state, text_loader(state), num_microbatches=1)
    loaders = [text_loader(state) for state in states]
    for _ in range(2):
        steps = [minloop.train_step(s, loader, num_microbatches=2) for s, loader in zip(states, loaders, strict=True)]
        reported.append([{name: loss.item() for name, loss in step.losses.items()} for step in steps])
    minloop.shutdown_distributed()
    return reported


def test_two_states_in_one_process_do_not_mix() -> None:
    short = {"num_layers": 1, "moe_z_loss_coeff": 1e-3, "mtp_num_layers": 1}
    long = {"num_layers": 3, "moe_z_loss_coeff": 1e-3, "mtp_num_layers": 2}
    (together,) = run_ranks(1, alternating, [short, long])
    for index, options in enumerate((short, long)):
        (alone,) = run_ranks(1, alternating, [options])
        assert [step[0] for step in alone] == [step[index] for step in together]


def test_recomputed_layers_are_counted_once(tmp_path: Path) -> None:
    options = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (reference,) = run_ranks(1, run, str(tmp_path), options, 2)
    (recomputed,) = run_ranks(1, run, str(tmp_path), options | recompute, 2)
    assert recomputed == reference


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_model_parallel_size": 2}, r"tensor_model_parallel_size \(2\) needs sequence_parallel=True"),
        (SP | {"add_bias_linear": True}, "needs expert_tensor_parallel_size=1, which is 2"),
        ({"moe_router_topk": 1}, r"softmax over one expert is constant.* set moe_router_pre_softmax=True"),
        ({"moe_router_topk": 5}, r"moe_router_topk \(5\) must be from 1 to num_moe_experts \(4\)"),
        ({"moe_router_num_groups": 2}, r"moe_router_num_groups \(2\) and moe_router_group_topk \(None\) go together"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, r"moe_router_group_topk \(1\).* nor hold fewer"),
        ({"moe_router_load_balancing_type": "auxloss"}, "'auxloss' is none of aux_loss, seq_aux_loss"),
        ({"moe_router_load_balancing_type": ["aux_loss"]}, r"\['aux_loss'\] and moe_aux_loss_coeff 0.0 must be"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.01, 0.0]},
            "'sinkhorn' cannot be one of several",
        ),
        ({"moe_aux_loss_coeff": 0.01}, "moe_router_load_balancing_type='none', which has no such loss"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm=True needs Transformer Engine"),
        ({"moe_latent_size": 16}, "moe_latent_size=16 needs Transformer Engine"),
        ({"moe_router_fusion": True}, "moe_router_fusion=True needs Transformer Engine"),
        ({"moe_permute_fusion": True}, "moe_permute_fusion=True needs Transformer Engine"),
        ({"moe_token_dispatcher_type": "flex"}, "needs the package deep_ep, which is not installed: pip install git"),
        (
            {"moe_shared_expert_intermediate_size": 32, "add_bias_linear": True},
            "mcore's shared experts have no biases",
        ),
    ],
)
def test_what_cannot_train_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(**(EXPERTS | fields), transformer_impl="local")
