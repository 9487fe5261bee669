"""Forward and backward over the microbatches of a step: mcore's schedules, by launches or as one CUDA graph."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_attr_wrapped_model

from minloop.data import to_device
from minloop.losses import LossFunction, Report, exact_token_count
from minloop.microbatches import Microbatches
from minloop.placement import place_batch
from minloop.state import TrainState

ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, LossFunction]]


def forward_backward(
    state: TrainState, batches: Microbatches, forward_step: ForwardStep, *, forward_only: bool
) -> list[Report]:
    """Run mcore's schedule; returns the reports of the microbatches, empty but on the last pipeline stage."""
    config, groups, pp = state.config, state.groups, state.groups.pp.size()
    vpp, group = config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage or pp
    if vpp is not None and not (group <= batches.count and batches.count % group in (0, *range(pp, group))):
        raise ValueError(
            f"num_microbatches ({batches.count}) cannot be divided into groups of microbatch_group_size_per_vp_stage "
            f"({group}), the last of at least pipeline_model_parallel_size ({pp}), as "
            f"virtual_pipeline_model_parallel_size ({vpp}) needs: change global_batch_size, micro_batch_size or the "
            "group size"
        )

    def run(iterators: list[Iterator[Any]]) -> list[Report]:
        schedule: Any = get_forward_backward_func(pp_size=pp, vp_size=vpp)
        with exact_token_count(config, forward_step) as counting_step:
            return schedule(
                forward_step_func=counting_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=state.chunks if len(state.chunks) > 1 else state.chunks[0],
                num_microbatches=batches.count,
                seq_length=batches.seq_length,
                micro_batch_size=batches.micro_batch_size,
                forward_only=forward_only,
                p2p_communicator=P2PCommunicator(groups.pp, config) if pp > 1 else None,
                pg_collection=groups,
            )

    if config.cuda_graph_impl != "full_iteration" or forward_only or not torch.cuda.is_available():
        return run(batches.iterators(len(state.chunks)))
    model = state.chunks[0]
    is_gpt = isinstance(get_attr_wrapped_model(model, "pre_process", return_model_obj=True), LanguageModule)
    place = partial(place_batch, model=model) if is_gpt else partial(to_device, device=torch.cuda.current_device())
    placed = [place(batch) for batch in batches.iterators(1)[0]]
    return state.graphs.run(run, forward_step, placed, len(state.chunks), config.cuda_graph_warmup_steps)
