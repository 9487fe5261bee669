"""Checks of mcore's combined schedule, which runs one microbatch's forward pass beside another's backward pass."""

from typing import Any

FIELDS = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


def check_combined_schedule(config: Any) -> None:
    """Refuse what mcore 0.19's combined schedule cannot train.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
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
