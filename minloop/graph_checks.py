"""Checks of CUDA graphs: a graph repeats what the GPU did, and nothing that Python decides from step to step."""

from typing import Any


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
