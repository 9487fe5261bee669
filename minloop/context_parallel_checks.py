"""Checks of context parallelism: how a sequence may be divided, and what its ranks may send each other."""

import math
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention


def check_context_parallel(config: Any) -> None:
    """Refuse ways to divide sequences over ranks that mcore does not have, or that train another model.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if config.context_parallel_size > 1 and not config.calculate_per_token_loss:
        raise ValueError(
            f"context_parallel_size ({config.context_parallel_size}) needs calculate_per_token_loss=True: otherwise "
            "all ranks' parts of a sequence weigh the same, however many of their tokens count: another model"
        )
    if config.hybrid_context_parallel:
        _check_hybrid(config)
    cp, hierarchy = config.context_parallel_size, config.hierarchical_context_parallel_sizes
    if hierarchy and math.prod(hierarchy) != cp:
        raise ValueError(
            f"hierarchical_context_parallel_sizes {hierarchy} multiply to {math.prod(hierarchy)}, "
            f"not to context_parallel_size ({cp})"
        )
    types = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    for kind in types if cp > 1 else ():
        if kind not in (None, "p2p", "a2a", "all_gather", "a2a+p2p"):
            raise ValueError(f"cp_comm_type={kind!r}: use 'p2p', 'a2a', 'all_gather' or 'a2a+p2p'")
        if kind == "a2a+p2p" and len(hierarchy or ()) != 2:
            raise ValueError(
                f"cp_comm_type='a2a+p2p' with hierarchical_context_parallel_sizes={hierarchy}: set them to [ranks of "
                f"an all-to-all, ranks of a ring], which multiply to context_parallel_size ({cp})"
            )
        ranks, tp = {"a2a": cp, "a2a+p2p": (hierarchy or [1])[0]}.get(kind or "", 1), config.tensor_model_parallel_size
        if config.num_attention_heads % (ranks * tp):
            raise ValueError(
                f"num_attention_heads ({config.num_attention_heads}) is not divisible by tensor_model_parallel_size "
                f"({tp}) × the {ranks} ranks to which cp_comm_type={kind!r} deals heads out: use 'p2p' or "
                "'all_gather', or 'a2a+p2p' with a smaller first of hierarchical_context_parallel_sizes"
            )
    if (cp > 1 or config.hybrid_context_parallel) and config.transformer_impl == "transformer_engine":
        _check_transformer_engine(config)


def _check_hybrid(config: Any) -> None:
    """Refuse what cannot go with samples that ranks take different numbers of, or whose ranks the layers do not ask."""
    if not config.max_seqlen_per_dp_cp_rank:
        raise ValueError(
            "hybrid_context_parallel=True needs max_seqlen_per_dp_cp_rank, the most tokens of a sample on one rank, by "
            "which it is decided how many ranks share it"
        )
    usual: dict[str, tuple[Any, ...]] = {
        "context_parallel_size": (1,),  # chosen for each sample
        "pipeline_model_parallel_size": (1,),
        "cp_comm_type": (None, "p2p", "all_gather"),
        "calculate_per_token_loss": (True,),
        "num_moe_experts": (None, 0),
        "mtp_num_layers": (None, 0),
        "multi_latent_attention": (False,),
        "is_hybrid_model": (False,),
        "cuda_graph_impl": ("none",),
        "fp8": (None, False),
        "fp4": (None, False),
    }
    for name, values in usual.items():
        if getattr(config, name) not in values:
            raise ValueError(
                f"hybrid_context_parallel=True with {name}={getattr(config, name)!r}: set that to "
                f"{' or '.join(map(repr, values))}, or hybrid_context_parallel=False"
            )


def _check_transformer_engine(config: Any) -> None:
    """Refuse attention that Transformer Engine would find no kernel for in mid-forward, without a word about fields.

    Its attention/dot_product_attention: utils.py, "Filter: Context parallelism", and context_parallel.py,
    `attn_forward_func_with_cp`.
    """
    cp, hierarchy = config.context_parallel_size, config.hierarchical_context_parallel_sizes
    where = "hybrid_context_parallel=True" if config.hybrid_context_parallel else f"context_parallel_size ({cp})"
    where += " on Transformer Engine's layers"
    local = "or transformer_impl='local'"
    if config.params_dtype == torch.float32:
        raise ValueError(
            f"{where} with params_dtype=torch.float32, in which it has no such attention: set bf16=True, {local}"
        )
    given = config.cp_comm_type
    groups = config.num_attention_heads if config.multi_latent_attention else config.num_query_groups
    own = max((groups or config.num_attention_heads) // config.tensor_model_parallel_size, 1)
    for number, kind in enumerate(given if isinstance(given, list) else [given] * config.num_layers, start=1):
        named = f"{where} with cp_comm_type={kind!r}"
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
        if windowed and tuple(config.window_size) not in ((-1, 0), (-1, -1)) and kind not in ("a2a", "all_gather"):
            raise ValueError(
                f"{named} and window_size={config.window_size}: set cp_comm_type='a2a' or 'all_gather', {local}"
            )
        if config.softmax_type != "vanilla" and kind != "a2a":
            raise ValueError(f"{named} and softmax_type={config.softmax_type!r}: set cp_comm_type='a2a', {local}")
        if own % (ranks := {"a2a": cp, "a2a+p2p": (hierarchy or [1])[0]}.get(kind or "", 1)):
            raise ValueError(
                f"{named}, which deals heads out to {ranks} ranks, and {own} heads of keys on each (num_query_groups / "
                f"tensor_model_parallel_size, 1 at least): set cp_comm_type='p2p' or 'all_gather', {local}"
            )
