"""Checks across fields and configs: what mcore would refuse later, cryptically or not at all, is refused by name."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig

from minloop.combined_checks import check_combined_schedule
from minloop.context_parallel_checks import check_context_parallel
from minloop.determinism import check_deterministic_config
from minloop.engine import broken_engine
from minloop.expert_checks import check_experts
from minloop.fsdp_checks import (
    check_megatron_fsdp,
    check_meta_device,
    check_not_fsdp,
    check_torch_fsdp,
    is_torch_fsdp,
)
from minloop.graph_checks import check_cuda_graphs
from minloop.ignored_checks import check_ignored
from minloop.kernel_checks import check_kernels
from minloop.memory_checks import check_activation_memory
from minloop.precision_checks import check_fp8_param, check_precision
from minloop.spelling import check_spellings
from minloop.tensor_parallel_checks import check_tensor_parallel

HOOKS = (
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "timers",
)
"""Fields of `TransformerConfig` that belong to one training state, not to a description of a model."""

SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)

STAGE_FIELDS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_vp_stage",
    "mtp_standalone",
)
"""How layers are laid out over pipeline stages: meaningless once `pipeline_model_parallel_size` changes."""

UNKNOWN = {
    "apply_residual_connection_post_layernorm": False,  # nothing in mcore reads it
    "gtp_weight_remat_size": 1,  # ranks of which the data parallel groups do not know
    "expert_gtp_weight_remat_size": 1,
}
"""Fields of `TransformerConfig` with the one value that trains."""


def use_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and there is a GPU for it."""
    return HAVE_TE and torch.cuda.is_available()


def wrong_apex() -> str:
    """What to say if an `apex` is installed that is not NVIDIA's; empty otherwise. It is looked at, not imported."""
    spec = find_spec("apex")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders or any((folder / "multi_tensor_apply").exists() for folder in folders):
        return ""
    return (
        f"the package apex in {folders[0]} is not NVIDIA's: PyPI's apex is another project. mcore goes on without it; "
        "pip uninstall apex, and build NVIDIA's from its source if you want its kernels"
    )


def check_config(config: Any) -> None:
    """Refuse what mcore would refuse later, cryptically or not at all.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not getattr(config, name):
            raise ValueError(f"{name} is not set: give build_config({name}=...)")
    for name in SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: it must be at least 1")
    check_spellings(config)
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: it must be from 0 up to, not including, 1")
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(config.params_dtype)
    if half is not None and not getattr(config, half):
        raise ValueError(
            f"params_dtype is {config.params_dtype} but {half} is False: set {half}=True, and no params_dtype"
        )
    if config.multi_latent_attention and not hasattr(config, "kv_lora_rank"):
        raise ValueError(
            "multi_latent_attention=True needs fields that only MLATransformerConfig has: build that class"
        )
    if config.fp16 and config.bf16:
        raise ValueError("fp16=True and bf16=True: choose one")
    if config.transformer_impl == "inference_optimized":
        raise ValueError("transformer_impl='inference_optimized' cannot train: use 'transformer_engine' or 'local'")
    if config.transformer_impl == "transformer_engine" and not use_transformer_engine():
        lacks = (broken_engine() or "Transformer Engine is not installed") if not HAVE_TE else "there is no GPU"
        raise ValueError(f"transformer_impl='transformer_engine' but {lacks}: use transformer_impl='local'")
    check_kernels(config)
    check_precision(config)
    check_deterministic_config(config)
    check_tensor_parallel(config)
    _check_pipeline(config)
    _check_schedule(config)
    check_experts(config)
    check_context_parallel(config)
    _check_lengths(config)
    check_activation_memory(config)
    _check_unknown(config)
    check_cuda_graphs(config)
    check_meta_device(config)


def _check_schedule(config: Any) -> None:
    check_combined_schedule(config)
    group, pp = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if config.virtual_pipeline_model_parallel_size is not None and group is not None and group < pp:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage ({group}) is less than pipeline_model_parallel_size ({pp}): set it to "
            "that or more, or to None"
        )


def _check_pipeline(config: Any) -> None:
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if pp > 1 and config.pipeline_dtype is None:
        raise ValueError(
            f"pipeline_model_parallel_size ({pp}) > 1 needs pipeline_dtype, the dtype of the activations sent between "
            "stages: set pipeline_dtype to params_dtype, or leave both to build_config"
        )
    if pp > 1 and config.mtp_num_layers and config.mtp_detach_heads:
        raise ValueError(
            f"mtp_detach_heads=True with pipeline_model_parallel_size ({pp}), with which mcore hangs in a first step: "
            "set mtp_detach_heads=False or pipeline_model_parallel_size=1"
        )
    if vpp is not None and pp == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size > 1, which is 1: set "
            "virtual_pipeline_model_parallel_size=None or use more pipeline stages"
        )
    # A hybrid model's pattern says which layers go where.
    by_hand = any(getattr(config, name) for name in STAGE_FIELDS[1:6]) or (config.is_hybrid_model and vpp is None)
    if not by_hand and config.num_layers % (pp * (vpp or 1)):
        raise ValueError(
            f"num_layers ({config.num_layers}) is not divisible by pipeline_model_parallel_size ({pp}) × "
            f"virtual_pipeline_model_parallel_size ({vpp or 1}): change them, or say which layers go where with "
            "num_layers_in_first/last_pipeline_stage or pipeline_model_parallel_layout"
        )
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError("overlap_p2p_comm=True and batch_p2p_comm=True exclude each other: set batch_p2p_comm=False")
    # With two stages both neighbours are the same rank, and batched sends cannot be told apart: it trains wrongly, in
    # silence. On gloo batched point-to-point is not ordered for more stages either.
    unordered = pp == 2 or not torch.cuda.is_available()
    if vpp is not None and unordered and not config.overlap_p2p_comm:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size ({vpp}) with pipeline_model_parallel_size ({pp}) and "
            "overlap_p2p_comm=False mixes up microbatches: set overlap_p2p_comm=True and batch_p2p_comm=False"
        )


def _check_unknown(config: Any) -> None:
    """Fields that mcore 0.19 takes, and that do nothing, or something for which nothing here is made."""
    check_ignored(config)
    for name, usual in UNKNOWN.items():
        if getattr(config, name, usual) != usual:
            raise ValueError(f"{name} is {getattr(config, name)}, which does not train as it says: leave it at {usual}")


def _check_lengths(config: Any) -> None:
    for name in ("cp_comm_type", "moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"):
        value = getattr(config, name, None)
        if isinstance(value, list) and len(value) != config.num_layers:
            raise ValueError(
                f"{name} has {len(value)} entries for num_layers ({config.num_layers}): give one per layer, or one "
                "value for all"
            )


def check_ddp_config(config: TransformerConfig, ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse a `DistributedDataParallelConfig` that mcore would accept and then not honour (see `build_ddp_config`)."""
    if is_torch_fsdp(ddp_config):
        check_torch_fsdp(config, ddp_config)
    elif ddp_config.use_megatron_fsdp:
        check_megatron_fsdp(config, ddp_config)
    else:
        check_not_fsdp(ddp_config)
    check_meta_device(config, ddp_config)
    check_fp8_param(config, ddp_config)
    if ddp_config.nccl_ub and not torch.cuda.is_available():  # mcore would compile its allocator first
        raise ValueError("nccl_ub=True registers NCCL's buffers, and there is no GPU: set it to False")
    if ddp_config.delay_wgrad_compute != config.delay_wgrad_compute and not is_torch_fsdp(ddp_config):
        raise ValueError(
            f"delay_wgrad_compute is {ddp_config.delay_wgrad_compute} in the DistributedDataParallelConfig, but "
            f"{config.delay_wgrad_compute} in the TransformerConfig: give both the same value"
        )
    if (
        not ddp_config.use_megatron_fsdp
        and ddp_config.overlap_param_gather
        and not (ddp_config.use_distributed_optimizer and ddp_config.overlap_grad_reduce)
    ):
        raise ValueError(
            "overlap_param_gather=True needs use_distributed_optimizer=True and overlap_grad_reduce=True, which are "
            f"{ddp_config.use_distributed_optimizer} and {ddp_config.overlap_grad_reduce}"
        )
    if ddp_config.check_for_nan_in_grad and config.cuda_graph_impl == "full_iteration":
        raise ValueError(
            "check_for_nan_in_grad=True with cuda_graph_impl='full_iteration': the check waits for the GPU, which a "
            "graph cannot; set one of them to False or 'none'"
        )
    if ddp_config.num_distributed_optimizer_instances > 1 and not ddp_config.use_distributed_optimizer:
        raise ValueError("num_distributed_optimizer_instances > 1 needs use_distributed_optimizer=True")
    if ddp_config.average_in_collective and config.calculate_per_token_loss:
        raise ValueError(
            "average_in_collective=True averages over ranks, calculate_per_token_loss=True over tokens: set one of "
            "them to False"
        )
