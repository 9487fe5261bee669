"""Checks of FP8 and FP4: what Transformer Engine would refuse in mid-forward, or what would train in another precision.

Of Transformer Engine's cache of FP8 weights a loop need know nothing: mcore's schedules say before the first microbatch
of a step, and of an evaluation, that weights have changed (`set_is_first_microbatch` of the DDP wrapper).
"""

from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from minloop.fsdp_checks import is_torch_fsdp
from minloop.kernel_checks import product_sizes

FIRST_CHIP = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "custom": (8, 9)}
"""Compute capability with which a recipe begins, transformer_engine/pytorch/quantization.py: 8.9 is Ada, 9.0 Hopper,
10.0 Blackwell."""

FP4_MULTIPLE = 32
"""Of what cuBLAS multiplies in FP4: 16 bytes of numbers of half a byte (mcore's fp4_utils, `get_fp4_align_size`). To
quantise, Transformer Engine wants multiples of 16 (`NVFP4_BLOCK_SCALING_SIZE`)."""

SMALL_HIDDEN_SIZE = 2048
"""Below it quantising has cost more time on an H100 or H200 than FP8 products save; see `fp8_advice`."""


def check_precision(config: Any) -> None:
    """Refuse FP8 and FP4 settings that cannot train here; what the chip lacks only once CUDA is initialised.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    # to ask an uninitialised CUDA would open a context on device 0, whichever this rank's is
    capability = torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None
    for name, kind in (("fp8", "hybrid"), ("fp4", "e2m1")):
        value = getattr(config, name)
        if getattr(config, f"{name}_param") and not value:
            raise ValueError(
                f"{name}_param=True keeps weights for {name.upper()} products, but {name} is None: set {name}={kind!r}"
            )
        if value and not config.bf16:
            raise ValueError(
                f"{name}={value!r} with bf16={config.bf16} and fp16={config.fp16}: {name.upper()} is the precision of "
                "products inside a bf16 model; set bf16=True"
            )
    if config.fp4:
        _check_fp4(config, capability)
    if not config.fp8:
        return
    if config.transformer_impl != "transformer_engine":
        raise ValueError(
            f"fp8={config.fp8!r} with transformer_impl={config.transformer_impl!r}, whose products stay in bf16: FP8 "
            "needs Transformer Engine (pip install transformer-engine[pytorch]) and a GPU; set "
            "transformer_impl='transformer_engine', or fp8=None"
        )
    if capability is not None:
        check_fp8_chip(config, capability)
        check_fp8_attention(config, capability)
    _check_recipe(config)
    check_fp8_sizes(config)


def check_fp8_chip(config: Any, capability: tuple[int, int]) -> None:
    """Raise ValueError if a GPU of this compute capability has no products of `fp8_recipe`."""
    recipe = config.fp8_recipe
    major, minor = FIRST_CHIP[recipe]
    if capability < (major, minor):
        others = [f"{name!r}" for name, first in FIRST_CHIP.items() if first <= capability and name != "custom"]
        remedy = f"set fp8_recipe to one of {', '.join(others)}" if others else "set fp8=None"
        raise ValueError(
            f"fp8_recipe={recipe!r} needs a GPU of compute capability {major}.{minor} or more, this one has "
            f"{capability[0]}.{capability[1]}: {remedy}"
        )


def check_fp8_attention(config: Any, capability: tuple[int, int]) -> None:
    """Raise ValueError if a GPU of this compute capability has no backward pass of attention in FP8 for such heads.

    cuDNN's takes heads of 128 channels alone before Blackwell (10.0), and of at most 128 there; Transformer Engine
    (common/fused_attn/fused_attn.cpp) then finds no backend, in mid-forward, without a word about channels.
    """
    fields = ("fp8_dot_product_attention", "fp8_multi_head_attention")  # of which the latter means the former, too
    asked = [name for name in fields if getattr(config, name)]
    heads = [("kv_channels, by default hidden_size / num_attention_heads", config.kv_channels)]
    if config.multi_latent_attention:
        heads = [("qk_head_dim + qk_pos_emb_head_dim", config.qk_head_dim + config.qk_pos_emb_head_dim)]
        heads.append(("v_head_dim", config.v_head_dim))
    for name, size in heads:
        if asked and (size > 128 or (size < 128 and capability < (10, 0))):
            raise ValueError(
                f"{' and '.join(asked)}=True with heads of {size} channels ({name}), with which cuDNN cannot train in "
                f"FP8 on a GPU of compute capability {capability[0]}.{capability[1]}: make it 128 channels a head, or "
                f"set {' and '.join(asked)}=False"
            )


def _check_fp4(config: Any, capability: tuple[int, int] | None) -> None:
    if config.transformer_impl != "transformer_engine" or (capability is not None and capability < (10, 0)):
        raise ValueError(
            f"fp4={config.fp4!r} with transformer_impl={config.transformer_impl!r} on a GPU of compute capability "
            f"{capability}: it needs Transformer Engine and 10.0 or more (Blackwell); set fp4=None, or use fp8"
        )
    check_fp4_sizes(config)


def _check_recipe(config: Any) -> None:
    recipe = config.fp8_recipe
    if recipe == "custom" and not config.fp8_quantizer_factory:
        raise ValueError("fp8_recipe='custom' needs fp8_quantizer_factory, the import path of a function that makes it")
    if recipe == "delayed" and config.first_last_layers_bf16:
        raise ValueError(
            "first_last_layers_bf16=True with fp8_recipe='delayed', whose scales are made for all layers at once: set "
            "fp8_recipe='tensorwise', or first_last_layers_bf16=False"
        )
    if not config.fp8_wgrad and recipe != "delayed":
        raise ValueError(f"fp8_wgrad=False with fp8_recipe={recipe!r}, which ignores it: leave it at True")


def check_fp8_sizes(config: Any) -> None:
    """Refuse weights whose rows or columns, on one rank, are no multiples of what FP8 products need."""
    _check_sizes(config, "fp8", fp8_utils.get_fp8_align_size(config.fp8_recipe))


def check_fp4_sizes(config: Any) -> None:
    """Refuse weights whose rows or columns, on one rank, are no multiples of what FP4 products need."""
    _check_sizes(config, "fp4", FP4_MULTIPLE)


def _check_sizes(config: Any, precision: str, multiple: int) -> None:
    for name, size, ranks, size_of in product_sizes(config):
        if size % (multiple * ranks):
            over = f" over {size_of} ({ranks})" if ranks > 1 else ""
            raise ValueError(
                f"{precision}={getattr(config, precision)!r} with {precision}_recipe="
                f"{getattr(config, f'{precision}_recipe')!r}: {name} ({size}){over} must be a multiple of {multiple} "
                f"on each rank; change it, or set {precision}=None"
            )


def check_fp8_param(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    """Refuse weights kept in FP8 or FP4 where mcore's two halves of it, in layers and in data parallelism, disagree.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    for name in ("fp8_param", "fp4_param"):
        kept, gathered = getattr(config, name), getattr(ddp_config, f"{name}_gather")
        if kept != gathered:
            raise ValueError(
                f"{name}={kept} with {name}_gather={gathered}: the model's weights and what data parallel ranks gather "
                "are the same tensors; use build_ddp_config, or give both one value"
            )
        if kept and not ddp_config.use_distributed_optimizer:
            raise ValueError(
                f"{name}=True with use_distributed_optimizer=False: only that optimizer casts its fp32 weights to "
                f"{name[:3].upper()}; set use_distributed_optimizer=True in build_ddp_config, or {name}=False"
            )
    if ddp_config.reuse_grad_buf_for_mxfp8_param_ag and config.fp8_recipe != "mxfp8":
        raise ValueError(
            f"reuse_grad_buf_for_mxfp8_param_ag=True with fp8_recipe={config.fp8_recipe!r}: it is for 'mxfp8' alone"
        )


def check_optimizer_precision(
    optimizer_config: OptimizerConfig, config: Any, ddp_config: DistributedDataParallelConfig
) -> None:
    """Refuse precisions of optimizer states and weights that mcore 0.19 would mix up.

    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    if config.fp8_param and optimizer_config.fp8_recipe != config.fp8_recipe:
        raise ValueError(
            f"OptimizerConfig.fp8_recipe is {optimizer_config.fp8_recipe!r}, but weights are kept in FP8 "
            f"(fp8_param=True) by {config.fp8_recipe!r}: use build_optimizer_config, or give both the same value"
        )
    if optimizer_config.reuse_grad_buf_for_mxfp8_param_ag != ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            "reuse_grad_buf_for_mxfp8_param_ag is "
            f"{optimizer_config.reuse_grad_buf_for_mxfp8_param_ag} in OptimizerConfig and "
            f"{ddp_config.reuse_grad_buf_for_mxfp8_param_ag} in DistributedDataParallelConfig: give both one value"
        )
    if not optimizer_config.optimizer_cpu_offload:
        return
    if ddp_config.use_megatron_fsdp or is_torch_fsdp(ddp_config):
        raise ValueError(
            "optimizer_cpu_offload=True with wrap_fsdp, of whose shards mcore 0.19's optimizer on the CPU finds no "
            "gradients: set it to False, or use wrap_ddp with use_distributed_optimizer=True"
        )
    if not optimizer_config.use_precision_aware_optimizer:
        raise ValueError(
            "optimizer_cpu_offload=True with use_precision_aware_optimizer=False: mcore's optimizer on the CPU takes "
            "gradients by that path only; set use_precision_aware_optimizer=True (and use_distributed_optimizer)"
        )
    if config.fp8_param and config.fp8_recipe != "delayed":
        raise ValueError(
            f"optimizer_cpu_offload=True with fp8_param=True and fp8_recipe={config.fp8_recipe!r}: set "
            "fp8_recipe='delayed', or fp8_param=False"
        )
    if not optimizer_config.optimizer_offload_fraction:
        raise ValueError(
            "optimizer_cpu_offload=True with optimizer_offload_fraction=0.0 moves nothing: set it to what part of the "
            "weights the CPU is to update, up to 1.0"
        )


def fp8_advice(config: Any) -> list[str]:
    """Return why FP8 may train slower than bf16 would in this model; empty if nothing speaks against it.

    The source for the size is Transformer Engine's issues 761 and 836, where models of 1 B parameters lost, and the
    benchmarks here, where products of 4096 gain.
    """
    if not config.fp8 or config.hidden_size >= SMALL_HIDDEN_SIZE:
        return []
    return [
        f"fp8={config.fp8!r} with hidden_size ({config.hidden_size}) below {SMALL_HIDDEN_SIZE}: quantising costs more "
        "than such small products save, and bf16 trains faster; set fp8=None"
    ]


def refuse_fp8_weights(config: Any, what: str) -> None:
    """Raise ValueError if weights are kept in FP8 or FP4, whole or nothing, for what goes by their rows."""
    for name in ("fp8_param", "fp4_param"):
        if getattr(config, name):
            raise ValueError(f"{what} weights kept in {name[:3].upper()} ({name}=True): set {name}=False")


def start_from_own_weights(model: torch.nn.Module) -> None:
    """Let an optimizer start from weights in FP8 as they are now, not from the initial ones that they remember."""
    for parameter in model.parameters():
        if hasattr(parameter, "get_high_precision_init_val"):
            vars(parameter)["_high_precision_init_val"] = parameter.dequantize().cpu()
