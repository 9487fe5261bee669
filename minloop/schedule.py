"""Forward and backward over the microbatches of a step: mcore's schedules, by launches or as one CUDA graph."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, make_viewless_tensor

from minloop.alive import left_midway
from minloop.architecture import unwrapped
from minloop.data import to_device
from minloop.first_gradients import overwriting
from minloop.graph_checks import check_graph_sequence
from minloop.hybrid_context_parallel import deal_out
from minloop.kernel_checks import check_loss_kernel
from minloop.losses import LossFunction, Report, exact_token_count
from minloop.microbatches import Microbatches
from minloop.placement import PlacedBatch, model_attribute, place_batch
from minloop.state import TrainState

ForwardStep = Callable[..., tuple[Any, LossFunction]]


def forward_backward(
    state: TrainState,
    batches: Microbatches,
    forward_step: ForwardStep,
    *,
    forward_only: bool,
    plain: bool = False,
) -> list[Report]:
    """Run mcore's schedule over the microbatches; gradients are then those of the mean over the tokens that count.

    Args:
        plain: the forward step counts the tokens by the batches' ``loss_mask``: their number is known beforehand, and
            losses are divided by it, not all gradients when they are there. It passes every microbatch through the
            model once: the first may write gradients that `clear_gradients` spared.
    Returns:
        The reports of the microbatches; empty but on the last pipeline stage.
    """
    check_count(state.config, batches.count)
    if state.config.overlap_moe_expert_parallel_comm and not forward_only:
        _check_plans(state, forward_step)
    config, taken = state.config, batches.take()
    trains = plain and not forward_only
    # fp16 has no room for gradients that small; its loss scale would have to be larger by the number of tokens.
    ahead = trains and config.calculate_per_token_loss and not config.fp16

    def run(taken: Sequence[Any]) -> list[Report]:
        tokens = _tokens_ahead(taken, state.groups) if ahead else None
        with (
            exact_token_count(config, forward_step, tokens) as counting_step,
            overwriting(state.chunks, counting_step) if trains else nullcontext(counting_step) as step,
            state.auxiliary_losses.recording(),
        ):
            return run_schedule(state, batches, taken, step, forward_only)

    if config.cuda_graph_impl != "full_iteration" or forward_only or not torch.cuda.is_available():
        return run(taken)
    check_graph_sequence(config, batches.seq_length)
    _check_lengths(config, batches.seq_length, taken)
    model = state.chunks[0]
    is_gpt = isinstance(get_attr_wrapped_model(model, "pre_process", return_model_obj=True), LanguageModule)
    place = partial(place_batch, model=model) if is_gpt else partial(to_device, device=torch.cuda.current_device())
    placed = [place(batch) for batch in taken]
    return state.graphs.run(run, forward_step, placed, config.cuda_graph_warmup_steps)


def _check_plans(state: TrainState, forward_step: ForwardStep) -> None:
    """Raise ValueError unless the forward step and the model can give mcore's combined schedule their plans."""
    model: Any = unwrapped(state.chunks[0])
    if not hasattr(model, "build_schedule_plan"):
        raise ValueError(
            f"overlap_moe_expert_parallel_comm=True with a {type(model).__name__}, which has no build_schedule_plan: "
            "set it to False"
        )
    if "return_schedule_plan" not in inspect.signature(forward_step).parameters:
        raise ValueError(
            "overlap_moe_expert_parallel_comm=True with a forward_step that takes no return_schedule_plan: let it "
            "return model.build_schedule_plan(...) for model(...) where that is True, or set the field to False"
        )


def check_count(config: TransformerConfig, count: int) -> None:
    """Raise ValueError unless virtual pipeline stages can work through `count` microbatches."""
    pp = config.pipeline_model_parallel_size
    vpp, group = config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage or pp
    if vpp is not None and not (group <= count and count % group in (0, *range(pp, group))):
        raise ValueError(
            f"num_microbatches ({count}) cannot be divided into groups of microbatch_group_size_per_vp_stage "
            f"({group}), the last of at least pipeline_model_parallel_size ({pp}), as "
            f"virtual_pipeline_model_parallel_size ({vpp}) needs: change global_batch_size, micro_batch_size or the "
            "group size"
        )


def _check_lengths(config: TransformerConfig, seq_length: int, batches: Sequence[Any]) -> None:
    """Raise ValueError if there are sequences that sequence parallel ranks cannot divide.

    Microbatches may be of other lengths than the first one. The samples of hybrid context parallelism are looked at
    where they are dealt out, and a placed batch before it was cut.
    """
    if not config.sequence_parallel or config.hybrid_context_parallel or isinstance(batches[0], PlacedBatch):
        return
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    rows = [batch["tokens"].shape[-1] for batch in batches if isinstance(batch, dict) and "tokens" in batch]
    for length in rows if rows and rows[0] == seq_length else [seq_length]:  # unless a model counts otherwise
        if length % (tp * cp):
            raise ValueError(
                f"sequence_parallel=True with a sequence of {length} tokens, which tensor_model_parallel_size ({tp}) × "
                f"context_parallel_size ({cp}) does not divide: pad it to a multiple of {tp * cp}, with 0 in loss_mask"
            )


def least_count(config: TransformerConfig) -> int:
    """A number of microbatches whose multiples every schedule takes: interleaved ones want whole groups."""
    if config.virtual_pipeline_model_parallel_size is None:
        return 1
    return config.microbatch_group_size_per_vp_stage or config.pipeline_model_parallel_size


def _tokens_ahead(batches: Sequence[Any], groups: ProcessGroupCollection) -> torch.Tensor:
    """The tokens of the global batch that count, 0-d float64. A placed batch is this context parallel rank's part."""
    if any("loss_mask" not in batch for batch in batches):
        raise ValueError("the batch lacks loss_mask: every pipeline stage needs it, see minloop.Batch")
    tokens = torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in batches]).sum()
    tokens = tokens.to(torch.cuda.current_device())
    dist.all_reduce(tokens, group=groups.dp_cp if isinstance(batches[0], PlacedBatch) else groups.dp)
    return tokens


def run_schedule(
    state: TrainState, shape: Microbatches, batches: Sequence[Any], forward_step: ForwardStep, forward_only: bool
) -> list[Report]:
    """Run mcore's schedule over `batches`; returns the reports of the last pipeline stage, on others an empty list."""
    config, pp, several = state.config, state.groups.pp.size(), len(state.chunks) > 1
    check_loss_kernel(config)
    _check_lengths(config, shape.seq_length, batches)
    schedule: Any = get_forward_backward_func(pp_size=pp, vp_size=config.virtual_pipeline_model_parallel_size)
    data: Any = [iter(batches) for _ in state.chunks] if several else iter(batches)
    if config.hybrid_context_parallel:
        data, own = deal_out(batches, config, state.groups, model_attribute(state.chunks[0], "vocab_size"))
        forward_step = partial(_with_data, forward_step, own)
    with left_midway(state.groups):
        return schedule(
            forward_step_func=partial(_without_view, forward_step) if pp > 1 else forward_step,
            data_iterator=data,
            model=state.chunks if several else state.chunks[0],
            num_microbatches=shape.count,
            seq_length=shape.seq_length,
            micro_batch_size=shape.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(state.groups.pp, config) if pp > 1 else None,
            pg_collection=state.groups,
        )


def _without_view(forward_step: ForwardStep, *args: Any, **options: Any) -> tuple[Any, LossFunction]:
    """mcore frees what a stage has sent (`deallocate_pipeline_outputs`), but not views, as your own model's may be."""
    output, loss_function = forward_step(*args, **options)
    if isinstance(output, torch.Tensor):
        output: Any = make_viewless_tensor(output, requires_grad=output.requires_grad, keep_graph=True)
    return output, loss_function


def _with_data(forward_step: ForwardStep, own: Iterator[Any], _: Any, model: Any) -> tuple[Any, LossFunction]:
    """mcore's schedule of hybrid context parallelism has data on the first tensor parallel rank only."""
    return forward_step(own, model)
