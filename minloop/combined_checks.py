"""Checks of pipelines: how layers are laid out over stages, how these communicate, and mcore's combined schedule.

The latter runs one microbatch's forward pass beside another's backward pass.
"""

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import torch.distributed
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

FIELDS = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release")
DIVISIONS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
)
"""Fields by which mcore divides the layers over stages."""


def virtual_stages(config: Any) -> int:
    """Virtual pipeline stages, given by number or by the stages of a layout.

    Args:
        config: fields of a `TransformerConfig`, before mcore has derived any.
    Raises:
        ValueError: a layout that does not fit the model.
    """
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return config.virtual_pipeline_model_parallel_size or 1
    try:
        stages = PipelineParallelLayerLayout(layout, config.pipeline_model_parallel_size)
        stages.validate_layer_layout(config.num_layers, config.mtp_num_layers)
    except AssertionError as error:  # mcore's, which would name no field
        raise ValueError(
            f"pipeline_model_parallel_layout={layout!r} with pipeline_model_parallel_size "
            f"({config.pipeline_model_parallel_size}), num_layers ({config.num_layers}) and mtp_num_layers "
            f"({config.mtp_num_layers}): {error}"
        ) from error
    return stages.virtual_pipeline_model_parallel_size


@contextlib.contextmanager
def stages_named(fields: Mapping[str, Any]) -> Generator[None]:
    """While inside, name the fields where mcore refuses how layers are divided, of which it says only what is left."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        given = [f"{name}={fields[name]!r}" for name in DIVISIONS if fields.get(name)]
        if not given or not any(word in str(error) for word in ("layers", "layout")):
            raise
        raise ValueError(
            f"{', '.join(given)} with num_layers ({fields['num_layers']}) and pipeline_model_parallel_size "
            f"({fields.get('pipeline_model_parallel_size', 1)}): {error}. Give a first and a last stage what leaves "
            "the same number of layers for all others, every number a multiple of virtual_pipeline_model_parallel_size "
            "(embedding and loss count as a layer each where they are accounted for), or a "
            "pipeline_model_parallel_layout alone"
        ) from error


def check_combined_schedule(config: Any) -> None:
    """Refuse what mcore 0.19's combined schedule cannot train, and communication that its others do not have.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    _check_communication(config)
    overlap, *others = FIELDS
    if not getattr(config, overlap):
        for name in others:
            if getattr(config, name):
                raise ValueError(f"{name}=True is a part of {overlap}=True, which is False: set both, or neither")
        return
    if config.delay_wgrad_compute and config.transformer_impl == "local":
        raise ValueError(
            "delay_wgrad_compute=True needs Transformer Engine's layers, but transformer_impl is 'local', whose weight "
            "gradients do not wait: set it to False"
        )
    pipelined = config.pipeline_model_parallel_size > 1
    has_chunks = config.virtual_pipeline_model_parallel_size or config.pipeline_model_parallel_layout
    needed: dict[str, tuple[bool, str]] = {
        "expert_model_parallel_size": (
            config.expert_model_parallel_size > 1,
            "it hides the communication between experts on several ranks; set it to 2 or more",
        ),
        "moe_token_dispatcher_type": (
            config.moe_token_dispatcher_type in ("alltoall", "flex"),
            "set it to 'alltoall'",
        ),
        "virtual_pipeline_model_parallel_size": (not pipelined or bool(has_chunks), "set it to 2 or more"),
        "recompute_granularity": (config.recompute_granularity != "full", "set it to None or 'selective'"),
        "recompute_modules": ("moe" not in (config.recompute_modules or ()), "leave 'moe' out"),
        "bf16": (config.bf16 or config.fp16, "set bf16=True"),
        "moe_shared_expert_overlap": (not config.moe_shared_expert_overlap, "set it to False"),
        "mtp_num_layers": ((config.mtp_num_layers or 0) <= 1, "set it to 1 or None"),
        "hybrid_context_parallel": (not config.hybrid_context_parallel, "set it to False"),
        "cuda_graph_impl": (config.cuda_graph_impl == "none", "set it to 'none'"),
    }
    for name, (holds, remedy) in needed.items():
        if not holds:
            raise ValueError(f"{overlap}=True with {name}={getattr(config, name)!r}: {remedy}, or set {overlap}=False")


def _check_communication(config: Any) -> None:
    if config.use_ring_exchange_p2p and not hasattr(torch.distributed, "ring_exchange"):
        raise ValueError("use_ring_exchange_p2p=True, but this torch.distributed has no ring_exchange: set it to False")
    layout, vpp = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size
    if (vpp or 1) > 1 or not isinstance(layout, PipelineParallelLayerLayout | None):
        return  # a layout that mcore has not read yet may make virtual stages
    for name in ("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True needs virtual_pipeline_model_parallel_size > 1, which is {vpp}: only interleaved stages "
                f"compute while they send; set {name}=False"
            )
