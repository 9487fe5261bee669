"""`tp_comm_overlap`: tensor parallel communication behind the products, by Transformer Engine's userbuffers."""

from importlib import import_module
from typing import Any

from megatron.core.transformer import TransformerConfig

from minloop.distributed import created

_MODULE = "transformer_engine.pytorch.module.base"


def init_tp_overlap(
    config: TransformerConfig,
    *,
    seq_length: int,
    micro_batch_size: int,
    ub_cfgs: dict[str, Any] | None = None,
    bootstrap_backend: str = "nccl",
) -> None:
    """Reserve the buffers through which `tp_comm_overlap` communicates; after `init_distributed`, before the model.

    They are of one size: every microbatch has `micro_batch_size` sequences of `seq_length` tokens. All tensor parallel
    ranks must be on one machine with NVLink. `shutdown_distributed` gives the buffers back. Where the machine grants no
    NVLink multicast, start with UB_SKIPMC=1.

    Args:
        seq_length: tokens of a full sequence, before context parallel divides it.
        ub_cfgs: how each product is overlapped, see Transformer Engine's `initialize_ub`; by default as it chooses.
        bootstrap_backend: "nccl", "gloo" or "mpi", by which the ranks first find each other's buffers.
    Raises:
        ValueError: the config lacks `tp_comm_overlap`, or what it needs.
        RuntimeError: there are buffers already.
    """
    if not config.tp_comm_overlap:
        raise ValueError("tp_comm_overlap=False: give build_config(tp_comm_overlap=True), or leave init_tp_overlap out")
    base: Any = import_module(_MODULE)
    if base._ub_communicators is not None:
        raise RuntimeError("tp_comm_overlap has its buffers already: call shutdown_distributed before another layout")
    modes = base.UserBufferQuantizationMode
    wanted = [modes.FP8 if config.fp8 else modes.NONE]
    if config.fp8 and config.first_last_layers_bf16:
        wanted.append(modes.NONE)
    base.initialize_ub(
        shape=[seq_length * micro_batch_size // config.context_parallel_size, config.hidden_size],
        tp_size=config.tensor_model_parallel_size,
        quantization_modes=wanted,
        dtype=config.params_dtype,
        ub_cfgs=ub_cfgs or {},
        bootstrap_backend=bootstrap_backend,
    )
    created.callback(base.destroy_ub)


def require_tp_overlap(config: TransformerConfig) -> None:
    """Raise RuntimeError if the model of this config would look for buffers that nobody reserved."""
    if config.tp_comm_overlap and import_module(_MODULE)._ub_communicators is None:
        raise RuntimeError(
            "tp_comm_overlap=True, but there are no buffers: call init_tp_overlap(config, seq_length=..., "
            "micro_batch_size=...) between init_distributed and the model"
        )
