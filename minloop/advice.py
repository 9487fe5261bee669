"""What no config holds: environment variables that decide how fast a GPU trains, and what minloop chose, said once."""

import logging
import os
from collections.abc import Mapping

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig

from minloop.fsdp_checks import is_torch_fsdp
from minloop.graph_checks import SHORTEST
from minloop.layers.expert_products import joins_experts
from minloop.messages import say_once
from minloop.precision_checks import fp8_advice

BLACKWELL = (10, 0)
CHOICES = (
    "transformer_impl",
    "bias_activation_fusion",
    "use_te_activation_func",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "overlap_p2p_comm",
    "cuda_graph_impl",
)
"""Fields of `TransformerConfig` that decide how fast a GPU trains: `cuda_graph_impl`, which is yours to set, and those
in which `build_config` may differ from mcore's defaults."""


def environment_advice(
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    *,
    data_parallel_size: int,
    capability: tuple[int, int],
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return what to set before a program starts, for this layout on a GPU of this compute capability; never sets it.

    Sources: Megatron-LM's and Transformer Engine's documentation of these variables.

    Args:
        data_parallel_size: ranks that share a data parallel group.
        capability: as of ``torch.cuda.get_device_capability()``, (9, 0) for an H200.
    """
    connections = _connections_advice(config, ddp_config, capability, environment.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    advice = [connections] if connections else []
    with_te = config.transformer_impl == "transformer_engine"
    if with_te and data_parallel_size > 1 and ddp_config.overlap_grad_reduce:
        margins = [f"NVTE_{way}_LAYERNORM_SM_MARGIN" for way in ("FWD", "BWD")]
        if lacking := [f"{name}=16" for name in margins if name not in environment]:
            advice.append(
                f"overlap_grad_reduce=True with {data_parallel_size} data parallel ranks: start with "
                f"{' '.join(lacking)}, or norms that fill the GPU hold up the communication"
            )
    one_by_one = with_te and config.moe_grouped_gemm and config.bf16 and not (config.fp8 or joins_experts(config))
    if one_by_one and capability == (9, 0) and environment.get("NVTE_USE_CUTLASS_GROUPED_GEMM") != "1":
        advice.append(
            "moe_grouped_gemm=True with products that Transformer Engine makes (see minloop.layers.expert_products): "
            "start with NVTE_USE_CUTLASS_GROUPED_GEMM=1, or it launches one for every expert"
        )
    if not with_te:
        why = "transformer_impl='local' was asked for" if HAVE_TE else "Transformer Engine is not installed"
        advice.append(f"{why}: mcore's local layers train at a fraction of the speed of Transformer Engine's")
    return advice


def _connections_advice(
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    capability: tuple[int, int],
    connections: str | None,
) -> str:
    """What is wrong with CUDA_DEVICE_MAX_CONNECTIONS; FSDP's needs come first, as 1 costs it most, then those of EP."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if ddp_config.use_megatron_fsdp or is_torch_fsdp(ddp_config):
        if connections == "1":
            kind = "use_megatron_fsdp=True" if ddp_config.use_megatron_fsdp else "torch FSDP2"
            return (
                f"{kind}: leave CUDA_DEVICE_MAX_CONNECTIONS unset, on any GPU: with 1, weights are not gathered while "
                "the layers before them compute"
            )
    elif config.overlap_moe_expert_parallel_comm:
        if connections == "1":
            return (
                "overlap_moe_expert_parallel_comm=True: start with a larger CUDA_DEVICE_MAX_CONNECTIONS than 1, such "
                "as 32, or communication waits for the products that are to hide it"
            )
    elif max(tp, cp) > 1 and capability < BLACKWELL and connections != "1":
        return (
            f"tensor_model_parallel_size ({tp}) or context_parallel_size ({cp}) > 1: start with "
            "CUDA_DEVICE_MAX_CONNECTIONS=1, or communication is not launched before the products that hide it"
        )
    return ""


def say_choices(config: TransformerConfig, ddp_config: DistributedDataParallelConfig, data_parallel_size: int) -> None:
    """On a GPU, warn of what costs speed, and log at level INFO what was chosen; each once, on the first rank.

    Without one, warn that there are no CUDA graphs.
    """
    if not torch.cuda.is_available():
        if config.cuda_graph_impl != "none":
            say_once(
                f"cuda_graph_impl={config.cuda_graph_impl!r}, but there is no GPU: steps run without graphs, also what "
                f"a GPU would refuse to capture, such as cuDNN's attention of fewer than {SHORTEST} tokens"
            )
        return
    capability = torch.cuda.get_device_capability()
    advice = environment_advice(config, ddp_config, data_parallel_size=data_parallel_size, capability=capability)
    for line in advice + fp8_advice(config):
        say_once(line)
    chosen = [f"{name}={getattr(config, name)}" for name in CHOICES]
    chosen += [f"{name}={getattr(ddp_config, name)}" for name in ("overlap_grad_reduce", "overlap_param_gather")]
    say_once(f"training with {', '.join(chosen)}", level=logging.INFO)
