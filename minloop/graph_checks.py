"""Checks of CUDA graphs: a graph repeats what the GPU did, and nothing that Python decides from step to step."""

from typing import Any

from megatron.core.transformer.enums import AttnBackend

SHORTEST = 128
"""Tokens of a sequence from which on cuDNN's attention can be replayed: graphs with 32 or 64 read memory that is not
theirs (cuDNN 9 on H200, through Transformer Engine and through torch), those with 128 train bit for bit as launches."""


def check_cuda_graphs(config: Any) -> None:
    """Refuse CUDA graphs that would replay something stale, or wait for the GPU while they are captured.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if config.cuda_graph_impl == "none":
        return
    if config.cuda_graph_impl != "full_iteration":
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r}: graphs of single layers are captured by a training loop made "
            "for them; use 'full_iteration', forward and backward of a whole step in one graph, or 'none'"
        )
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ValueError(
                f"cuda_graph_impl='full_iteration' with {name}={size}: such a step has not been replayed yet; set "
                "cuda_graph_impl='none', or use tensor or data parallelism"
            )
    reasons = {
        "fp16": "its loss scale changes from step to step: use bf16=True",
        "num_moe_experts": "the number of tokens of an expert is read by Python",
        "mtp_num_layers": "its losses are recorded by Python",
    }
    for name, reason in reasons.items():
        if getattr(config, name):
            raise ValueError(
                f"cuda_graph_impl='full_iteration' with {name}={getattr(config, name)}: {reason}; or set "
                "cuda_graph_impl='none'"
            )
    if not config.use_te_rng_tracker and (config.hidden_dropout or config.attention_dropout):
        raise ValueError(
            f"cuda_graph_impl='full_iteration' with hidden_dropout {config.hidden_dropout}, attention_dropout "
            f"{config.attention_dropout} and use_te_rng_tracker=False: every step would drop the same; set "
            "use_te_rng_tracker=True, which needs Transformer Engine, or no dropout"
        )


def check_graph_sequence(config: Any, seq_length: int) -> None:
    """Refuse to capture cuDNN's attention of sequences that are too short for it.

    Args:
        seq_length: tokens.
    Raises:
        ValueError: naming the length, the field and the remedy.
    """
    if seq_length < SHORTEST and config.attention_backend in (AttnBackend.auto, AttnBackend.fused):
        raise ValueError(
            f"cuda_graph_impl='full_iteration' with sequences of {seq_length} tokens and "
            f"attention_backend={config.attention_backend}: cuDNN's attention of fewer than {SHORTEST} fails when "
            "it is replayed; set attention_backend=AttnBackend.unfused, or cuda_graph_impl='none'"
        )
