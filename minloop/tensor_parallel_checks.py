"""Checks of tensor parallelism."""

from typing import Any


def check_tensor_parallel(config: Any) -> None:
    """Refuse a width that does not divide over the ranks, and what mcore divides wrongly or not at all.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    tp, heads = config.tensor_model_parallel_size, config.num_attention_heads
    groups = config.num_query_groups or heads
    if heads % tp:
        raise ValueError(f"num_attention_heads ({heads}) is not divisible by tensor_model_parallel_size ({tp})")
    if heads % groups:
        raise ValueError(f"num_attention_heads ({heads}) is not divisible by num_query_groups ({groups})")
    if groups % tp and tp % groups:
        raise ValueError(
            f"num_query_groups ({groups}) is neither a multiple nor a divisor of tensor_model_parallel_size ({tp})"
        )
    if not config.kv_channels and config.hidden_size % heads:
        raise ValueError(
            f"hidden_size ({config.hidden_size}) is not divisible by num_attention_heads ({heads}); or set kv_channels"
        )
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    if ffn % tp:
        raise ValueError(f"ffn_hidden_size ({ffn}) is not divisible by tensor_model_parallel_size ({tp})")
    if config.multi_latent_attention and tp > 1 and not config.sequence_parallel and config.transformer_impl != "local":
        raise ValueError(
            f"multi_latent_attention=True with tensor_model_parallel_size ({tp}): on Transformer Engine's layers mcore "
            "sums the gradients of its shared projections over the ranks only with sequence_parallel=True: set it"
        )
    if config.sequence_parallel and tp == 1:
        raise ValueError(
            "sequence_parallel=True needs tensor_model_parallel_size > 1: it splits the sequence over the tensor "
            "parallel ranks; set sequence_parallel=False or a larger tensor_model_parallel_size"
        )
    if config.tp_comm_overlap:
        _check_overlap(config)


def _check_overlap(config: Any) -> None:
    """Where mcore and Transformer Engine would fail in the first forward, or not overlap at all."""
    for name, value, needed in (
        ("tensor_model_parallel_size", config.tensor_model_parallel_size > 1, "more than 1"),
        ("sequence_parallel", config.sequence_parallel, "True"),
        ("transformer_impl", config.transformer_impl == "transformer_engine", "'transformer_engine' and a GPU"),
        ("params_dtype", config.params_dtype.itemsize == 2, "a half precision (bf16=True)"),
        # at the first projection without a buffer of its own mcore switches it off for all layers (TELinear)
        ("multi_latent_attention", not config.multi_latent_attention, "False"),
    ):
        if not value:
            raise ValueError(
                f"tp_comm_overlap=True with {name}={getattr(config, name)}: it needs {needed}; set "
                "tp_comm_overlap=False"
            )
