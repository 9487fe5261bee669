"""Mixture of experts: losses of routers and predicted tokens reported, tokens per expert counted, layers mended.

In which layouts experts train the model that one rank trains, for the same micro batch size (batches are then cut into
the same microbatches, whatever the layout):

    every layout          routers "none", "aux_loss", "seq_aux_loss" and "quantile_balancing", each score function,
                          groups of experts, expert bias, z-loss, shared experts, both dispatchers, ETP ≠ TP
    "sinkhorn", capacity  all but TP with SP, and CP: mcore balances and drops among the tokens that one rank holds
    "global_aux_loss"     those with as many microbatches per rank, that is with the same data parallel size: mcore
                          weighs each microbatch by the load of those that its step has seen so far; or any layouts
                          with one microbatch per rank, for the same global batch, whatever the micro batch sizes
    moe_input_jitter_eps  none: as with dropout, ranks draw other numbers for the same tokens

Of the last three, a training state that does so says it once.
"aux_loss", "sinkhorn", "quantile_balancing", "global_aux_loss" and capacity are defined on a microbatch, so that
another micro batch size is another training; "seq_aux_loss" and the z-loss are not. Choosing experts is not continuous:
where two of them tie within rounding, a token goes one way in one layout and another way in another, and gradients part
by about 1e-3 in that step. An auxiliary loss of 0.1 makes such ties often, one of 0.01 seldom.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_model_config

from minloop.messages import say_once

AUXILIARY_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Entries of `moe_router_load_balancing_type`, and the names under which Megatron-LM reports their losses."""


@dataclass
class AuxiliaryLosses:
    """What mcore records of a training step beside the loss: mcore keeps it per process, here it is per training state.

    Attributes:
        moe: the losses of the routers, by name and layer.
        mtp: the losses of multi-token prediction, by depth.
    """

    moe: moe_logging.MoEMetricsTracker = field(default_factory=moe_logging.MoEMetricsTracker)
    mtp: dict[str, Any] = field(default_factory=dict[str, Any])

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """While inside, mcore records here, from zero."""
        moe, mtp = moe_logging.get_moe_metrics_tracker(), MTPLossLoggingHelper.tracker
        moe_logging.set_moe_metrics_tracker(self.moe)
        MTPLossLoggingHelper.tracker = self.mtp
        self.moe.clear()
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        try:
            yield
        finally:
            moe_logging.set_moe_metrics_tracker(moe)
            MTPLossLoggingHelper.tracker = mtp

    def reduce(
        self, config: TransformerConfig, groups: ProcessGroupCollection, num_microbatches: int
    ) -> dict[str, torch.Tensor]:
        """Return the means over the global batch by Megatron-LM's names, on every rank; all ranks call it.

        A router's loss is without its coefficient, the mean over microbatches and over the layers with experts:
        "load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss". The loss of each depth
        of multi-token prediction, "mtp_1 loss" and so on, is the mean over microbatches of their means over tokens.
        mcore computes them in training only: after an evaluation all are 0.

        Returns:
            0-d float64 tensors; none for a dense model without multi-token prediction.
        """
        losses: dict[str, torch.Tensor] = {}
        if names := _router_losses(config):
            losses |= zip(names, self._of_routers(names, config, groups) / num_microbatches, strict=True)
        if depth := config.mtp_num_layers:
            means = self._of_predictions(depth, groups) / num_microbatches
            losses |= {f"mtp_{number} loss": mean for number, mean in enumerate(means, start=1)}
        return losses

    def _of_routers(
        self, names: Sequence[str], config: TransformerConfig, groups: ProcessGroupCollection
    ) -> torch.Tensor:
        """The means over ranks and layers, [names]."""
        layers = config.num_layers + (config.mtp_num_layers or 0)
        sums = torch.zeros(len(names), layers, dtype=torch.float64, device=torch.cuda.current_device())
        for row, name in zip(sums, names, strict=True):
            if (entry := self.moe.metrics.get(name)) is not None:
                row += entry.values / _copies(name, groups)
        dist.all_reduce(sums, group=groups.tp_dp_cp)
        dist.all_reduce(sums, group=groups.pp)
        return sums.sum(dim=1) / (sums != 0).sum(dim=1).clamp(min=1)  # layers without experts record nothing

    def _of_predictions(self, depth: int, groups: ProcessGroupCollection) -> torch.Tensor:
        """The means over ranks, [depth]; only the last pipeline stage records them."""
        sums = torch.zeros(depth, dtype=torch.float64, device=torch.cuda.current_device())
        if "loss_values" in self.mtp:
            sums += self.mtp["loss_values"]
        dist.all_reduce(sums, group=groups.dp_cp)
        dist.all_reduce(sums, group=groups.pp)
        return sums / groups.dp_cp.size()


def _router_losses(config: TransformerConfig) -> list[str]:
    """Names of the losses that the routers of a model record."""
    if not config.num_moe_experts:
        return []
    kinds: Any = config.moe_router_load_balancing_type
    coefficients: Any = config.moe_aux_loss_coeff
    pairs = [(kinds, coefficients)] if isinstance(kinds, str) else zip(kinds, coefficients, strict=True)
    names = [AUXILIARY_LOSSES[kind] for kind, coefficient in pairs if kind in AUXILIARY_LOSSES and coefficient]
    return names + (["z_loss"] if config.moe_z_loss_coeff is not None else [])


def _copies(name: str, groups: ProcessGroupCollection) -> int:
    """Of how many values of ranks a router's loss is the mean; over other ranks it is a sum of parts."""
    if name == "z_loss":
        return groups.tp_dp_cp.size()
    return 1 if name == "global_load_balancing_loss" else _data_parallel_size(groups)


def _data_parallel_size(groups: ProcessGroupCollection) -> int:
    return groups.tp_dp_cp.size() // groups.tp_cp.size()


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[TopKRouter]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))


def other_training(config: TransformerConfig, groups: ProcessGroupCollection) -> Iterator[str]:
    """Yield what to say of experts that train otherwise in this layout than on one rank, see this file's head."""
    if not config.num_moe_experts:
        return
    tp, cp, dp = groups.tp.size(), groups.cp.size(), _data_parallel_size(groups)
    kinds: Any = config.moe_router_load_balancing_type
    if tp * cp > 1 and (kinds == "sinkhorn" or config.moe_expert_capacity_factor is not None):
        yield (
            f"moe_router_load_balancing_type={kinds!r} and moe_expert_capacity_factor="
            f"{config.moe_expert_capacity_factor} with tensor_model_parallel_size ({tp}) and context_parallel_size "
            f"({cp}): mcore balances and drops among the tokens of one rank, so that other sizes are another training"
        )
    if dp > 1 and "global_aux_loss" in kinds:
        yield (
            f"moe_router_load_balancing_type={kinds!r} with {dp} data parallel ranks: mcore weighs a microbatch by the "
            "load of those before it in its step, so that another number of microbatches per rank is another training"
        )
    forced = {name: getattr(config, name) for name in ("moe_router_force_load_balancing", "moe_router_force_biased")}
    yield from (f"{name}={value}: tokens are dealt out at random" for name, value in forced.items() if value)
    if config.moe_input_jitter_eps is not None and groups.tp_dp_cp.size() > 1:
        eps = f"moe_input_jitter_eps={config.moe_input_jitter_eps}"
        yield f"{eps}: ranks draw their own numbers, so that another layout is another training, as it is with dropout"


def mend_experts(chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Mend, on these models, what keeps mcore 0.19 from training their experts, or from doing so in every layout.

    "global_aux_loss": mcore divides by the tokens of all data parallel ranks, and the gradient once more by the ranks:
    its coefficient is here multiplied by their number.

    `moe_input_jitter_eps`: mcore adds its noise in evaluation too; here in training only.

    Biases of experts on one rank, no expert parallelism: mcore adds them in place to what an autograd function returned
    as it came, which torch refuses. The layers are here told that no communication is theirs to do, as is so.
    Dispatchers keep probabilities, whose graph keeps the model unseen by the garbage collector: here they forget them.
    """
    for said in other_training(get_model_config(chunks[0]), groups):
        say_once(said)
    for router in _routers(chunks):
        if router.get_aux_loss_coeff("global_aux_loss"):
            vars(router)["get_aux_loss_coeff"] = partial(_coefficient, router, _data_parallel_size(groups))
        if router.config.moe_input_jitter_eps is not None:
            vars(router)["apply_input_jitter"] = partial(_jitter, router)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, RowParallelLinear) and module.is_expert:
                module.explicit_expert_comm = True
            elif isinstance(module, MoELayer):
                module.register_forward_hook(_forget_graph)


def _forget_graph(layer: MoELayer, _args: Any, _output: Any) -> None:
    kept = vars(layer.token_dispatcher)
    kept |= {name: None for name, value in kept.items() if isinstance(value, torch.Tensor) and value.grad_fn}


def _coefficient(router: TopKRouter, data_parallel_size: int, kind: str) -> float:
    coefficient = type(router).get_aux_loss_coeff(router, kind)
    return coefficient * data_parallel_size if kind == "global_aux_loss" else coefficient


def _jitter(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
    return type(router).apply_input_jitter(router, hidden) if router.training else hidden


@contextlib.contextmanager
def expert_load(
    chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> Generator[Callable[[], torch.Tensor]]:
    """Count, while inside, the tokens that each expert of each layer gets; what is not counted costs nothing.

        with minloop.expert_load(state.chunks, state.groups) as load:
            minloop.train_step(state, loader, num_microbatches=4)
        tokens = load()  # every rank calls it

    Yields:
        A function that returns the counts so far, over all ranks and microbatches and on every rank: [l, e] int64, for
        the model's l layers (those of multi-token prediction last; rows of zeros for layers without experts) and e
        experts, in the model's order whatever the layout. What a capacity dropped is not in it, padding up to one is.
        A step that a `FaultGuard` computes again counts once, and one that it skips or refuses does not.
    """
    config = get_model_config(chunks[0])
    layers, experts = config.num_layers + (config.mtp_num_layers or 0), config.num_moe_experts or 0
    zeros: Any = partial(torch.zeros, dtype=torch.int64, device=torch.cuda.current_device())
    counts: dict[Any, torch.Tensor] = {router: zeros(experts) for router in _routers(chunks)}

    def count(router: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if torch.is_grad_enabled() or not router.training:  # recomputed layers run twice, once without gradients
            counts[router] += output[1].sum(dim=0)

    def read() -> torch.Tensor:
        tokens = zeros(layers, experts)
        for router, own in counts.items():  # which number layers from 1
            tokens[router.layer_number - 1 + (config.num_layers if router.is_mtp_layer else 0)] += own
        dist.all_reduce(tokens, group=groups.tp_dp_cp if config.sequence_parallel else groups.dp_cp)
        dist.all_reduce(tokens, group=groups.pp)
        return tokens

    with contextlib.ExitStack() as undo:
        for router, own in counts.items():
            name = f"load_{id(own)}"
            router.register_buffer(name, own, persistent=False)  # which a guard puts back with all that a step changed
            undo.callback(delattr, router, name)
            undo.enter_context(router.register_forward_hook(count))
        yield read
