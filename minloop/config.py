"""Configs: mcore's own dataclasses, built with the choices that are right on this machine, and checked at once.

The parallel sizes live in `TransformerConfig` alone. Nothing here is a second config language: each function returns
the mcore dataclass, every field of which may be given by its mcore name.
"""

import dataclasses
import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import is_te_min_version

from minloop.checks import HOOKS, STAGE_FIELDS, check_config, check_ddp_config, use_transformer_engine
from minloop.combined_checks import stages_named, virtual_stages
from minloop.expert_checks import fuses_routers
from minloop.ignored_checks import unread
from minloop.kernel_checks import is_heterogeneous
from minloop.messages import say_once
from minloop.optimizer_config_checks import check_optimizer_fields
from minloop.spelling import check_fields


def build_config[Config: TransformerConfig](config_class: type[Config] = TransformerConfig, /, **fields: Any) -> Config:
    """Build mcore's `TransformerConfig` with the settings that are right and fast on this machine.

    Where a field is not given: `params_dtype` and `pipeline_dtype` follow bf16/fp16; `transformer_impl` is Transformer
    Engine where there is one and a GPU, otherwise local; pipeline stages free what they have sent
    (`deallocate_pipeline_outputs`), interleaved ones overlap their communication; the loss is averaged over the tokens
    of the global batch (`calculate_per_token_loss`), the only average that no layout changes; fused kernels that suit
    the model are on (see `_fusions`), on a GPU weight gradients are accumulated as they are computed; CUDA graphs draw
    from Transformer Engine's random streams; FP8 with delayed scaling scales by the largest values of the last 1024
    passes. All other fields keep mcore's defaults.

    Args:
        config_class: `TransformerConfig` or a subclass of it (`MLATransformerConfig`, your own).
        fields: any field of that class, by mcore's name.
    Raises:
        ValueError: fields that contradict each other; the message names them and the remedy.
        TypeError: a name that is no field, with the nearest that is one.
    """
    check_fields(config_class, fields)
    defaults = {f.name: f.default for f in dataclasses.fields(config_class) if f.default is not dataclasses.MISSING}
    draft = SimpleNamespace(**(defaults | fields))
    chosen: dict[str, Any] = {"calculate_per_token_loss": True}
    chosen["cuda_graph_modules"] = []  # mcore's default, "full", is deprecated and means the same
    chosen["params_dtype"] = torch.bfloat16 if draft.bf16 else torch.float16 if draft.fp16 else torch.float32
    chosen["pipeline_dtype"] = fields.get("params_dtype", chosen["params_dtype"])
    implementation = "transformer_engine" if use_transformer_engine() else "local"
    draft.transformer_impl = chosen["transformer_impl"] = fields.get("transformer_impl", implementation)
    chosen["deallocate_pipeline_outputs"] = draft.pipeline_model_parallel_size > 1
    if virtual_stages(draft) > 1:
        overlap = fields.get("overlap_p2p_comm", True)
        chosen["overlap_p2p_comm"], chosen["batch_p2p_comm"] = overlap, not overlap
    if draft.num_moe_experts:  # as mcore would choose with a warning
        chosen["moe_ffn_hidden_size"] = draft.ffn_hidden_size or 4 * draft.hidden_size
    elif draft.variable_seq_lengths:  # with which mcore refuses its default even where there are no experts
        chosen["moe_token_dispatcher_type"] = "alltoall"
    if draft.fp8 and draft.fp8_recipe == "delayed":
        # As Transformer Engine has them; mcore's own scale by the last microbatch alone, and clip the next one's peaks.
        chosen |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    # Of a graph's random numbers only Transformer Engine's tracker knows.
    chosen["use_te_rng_tracker"] = draft.cuda_graph_impl != "none" and draft.transformer_impl != "local"
    chosen |= _fusions(draft) | fields
    check_config(SimpleNamespace(**(defaults | chosen)))
    with stages_named(chosen), warnings.catch_warnings():
        if "cross_entropy_fusion_impl" not in fields:  # mcore warns of earlier versions than the one that is chosen
            warnings.filterwarnings("ignore", "Transformer Engine cross entropy")
        config = config_class(**chosen)
    check_config(config)
    _hint_at_gates(draft)
    return config


def _hint_at_gates(draft: SimpleNamespace) -> None:
    only_experts = draft.num_moe_experts and draft.moe_layer_freq == 1
    first = os.environ.get("RANK", "0") == "0"  # groups, by which say_once knows it, are built after the config
    if first and draft.gated_linear_unit and not (draft.ffn_hidden_size or only_experts or is_heterogeneous(draft)):
        say_once(
            f"gated_linear_unit=True with ffn_hidden_size left at 4 × hidden_size ({4 * draft.hidden_size}): half as "
            f"many weights again as without a gate; 8/3 × hidden_size ({8 * draft.hidden_size // 3}) keeps their number"
        )


def _fusions(draft: SimpleNamespace) -> dict[str, Any]:
    """The fused kernels that are valid for this config; as a library mcore leaves all of them off.

    Those of activations are another rounding, never another function: mcore's fused GELU is the tanh approximation, so
    it is on whatever the machine, and Transformer Engine's activations only replace what is the same without them.
    """
    with_te = draft.transformer_impl == "transformer_engine"
    gelu = draft.activation_func is F.gelu and draft.add_bias_linear and not draft.gated_linear_unit
    # of this mcore none knows a clamp or an offset
    plain = draft.activation_func_clamp_value is None and not draft.glu_linear_offset
    swiglu = draft.activation_func is F.silu and draft.gated_linear_unit and plain
    # which mcore's specs of other layers leave out
    usual_layers = not (draft.num_moe_experts or draft.is_hybrid_model or is_heterogeneous(draft))
    te_activation = with_te and swiglu and not draft.add_bias_linear and usual_layers
    rope = with_te and not draft.rotary_interleaved and not draft.multi_latent_attention
    other_rope = draft.qk_l2_norm or draft.attention_output_gate or draft.flash_decode or draft.test_mode
    experts = with_te and bool(draft.num_moe_experts)
    if draft.num_moe_experts:  # experts weigh their activation, and of this mcore fused SwiGLU without biases only
        gelu, swiglu = False, swiglu and not draft.add_bias_linear
    return {
        "use_te_activation_func": te_activation and not draft.bias_activation_fusion,
        "bias_activation_fusion": (gelu or swiglu) and not (te_activation or draft.use_te_activation_func),
        # the grouped layers of a hybrid model have biases, too
        "bias_dropout_fusion": not (experts and draft.add_bias_linear and draft.is_hybrid_model),
        "apply_rope_fusion": rope,
        "fused_single_qkv_rope": rope and torch.cuda.is_available() and not (draft.qk_layernorm or other_rope),
        "moe_grouped_gemm": experts and not draft.add_bias_linear,
        "moe_permute_fusion": experts,
        "moe_router_fusion": experts and fuses_routers(draft),
        # whatever the precision, its gradient is rounded to bf16
        "cross_entropy_loss_fusion": draft.bf16 and not draft.deterministic_mode,
        # faster; before 2.20 Transformer Engine's rounded gradients that were yet to be scaled (its pull request 3193)
        "cross_entropy_fusion_impl": "te" if with_te and is_te_min_version("2.20.0") else "native",
        "gradient_accumulation_fusion": torch.cuda.is_available(),
    }


def replace_layout[Config: TransformerConfig](config: Config, **changes: Any) -> Config:
    """Return a new config of the same model in another layout; `config` stays as it is.

    Unlike `dataclasses.replace` it leaves behind what belongs to the old layout: hooks bound by a training state, the
    division of layers into stages when the number of stages changes, sequence parallel and its overlap at tensor
    parallel 1, an expert tensor parallel size that only followed the tensor parallel size, how stages communicate
    (`overlap_p2p_comm`, `overlap_p2p_comm_warmup_flush`, `batch_p2p_comm`), when their size changes how context
    parallel ranks do (`cp_comm_type`, `hierarchical_context_parallel_sizes`), and what nothing reads any more.

    Args:
        changes: the fields to change, by mcore's names, e.g. ``tensor_model_parallel_size=4``.
    """
    fields: dict[str, Any] = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    dropped = {*HOOKS, "overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "batch_p2p_comm"}
    if (
        changes.get("pipeline_model_parallel_size", config.pipeline_model_parallel_size)
        != config.pipeline_model_parallel_size
    ):
        dropped |= {*STAGE_FIELDS, "deallocate_pipeline_outputs"}
    if changes.get("tensor_model_parallel_size", config.tensor_model_parallel_size) == 1:
        dropped |= {"sequence_parallel", "tp_comm_overlap"}
    if config.expert_tensor_parallel_size == config.tensor_model_parallel_size:
        dropped.add("expert_tensor_parallel_size")
    if changes.get("context_parallel_size", config.context_parallel_size) != config.context_parallel_size:
        dropped |= {"cp_comm_type", "hierarchical_context_parallel_sizes"}
    layout = fields["pipeline_model_parallel_layout"]
    if layout is not None:  # mcore parsed it into an object; its text parses again
        fields["pipeline_model_parallel_layout"] = layout.input_data
    kept = {name: value for name, value in fields.items() if name not in dropped}
    kept = {name: value for name, value in kept.items() if name not in unread(kept | changes)}
    return build_config(type(config), **(kept | changes))


def build_ddp_config(config: TransformerConfig, **fields: Any) -> DistributedDataParallelConfig:
    """Build mcore's `DistributedDataParallelConfig`: gradients reduced in fp32, communication overlapped.

    Overlap is on wherever it can be: the gradient reduction with the backward pass, and with the distributed optimizer
    (ZeRO-1) the parameter gather with the forward pass.

    For `wrap_fsdp`: with `use_megatron_fsdp` gradients are kept and reduced in fp32, too, and unless it is given
    `data_parallel_sharding_strategy` is "optim_grads_params"; with `reshard_after_forward` it is mcore's
    `TorchFullyShardedDataParallelConfig`, whose gradients are reduced in fp32 and kept in the dtype of the weights.

    Raises:
        ValueError: overlap_param_gather without what it needs; averaging that contradicts `calculate_per_token_loss`;
            fp8_param or fp4_param without the distributed optimizer.
        TypeError: a name that is no field.
    """
    if "reshard_after_forward" in fields:
        fields.setdefault("grad_reduce_in_fp32", True)
        check_fields(TorchFullyShardedDataParallelConfig, fields)
        torch_config = TorchFullyShardedDataParallelConfig(**fields)
        check_ddp_config(config, torch_config)
        return torch_config
    check_fields(DistributedDataParallelConfig, fields)
    fsdp = fields.get("use_megatron_fsdp", False)
    sharded = fields.get("use_distributed_optimizer", fsdp)
    overlap = fields.get("overlap_grad_reduce", True)
    chosen: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": sharded and overlap,
        "fp8_param_gather": config.fp8_param,
        "fp4_param_gather": config.fp4_param,
        "delay_wgrad_compute": config.delay_wgrad_compute,
    }
    if fsdp:
        chosen |= {
            "use_distributed_optimizer": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "gradient_reduce_div_fusion": torch.cuda.is_available(),
            # On gloo no gather is to be under way when a run ends after its last step.
            "fsdp_all_gather_in_start_param_sync": torch.cuda.is_available(),
            "megatron_fsdp_main_grads_dtype": torch.float32,
        }
    ddp_config = DistributedDataParallelConfig(**(chosen | fields))
    check_ddp_config(config, ddp_config)
    return ddp_config


def build_optimizer_config(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig, **fields: Any
) -> OptimizerConfig:
    """Build mcore's `OptimizerConfig`; precision and sharding follow `config` and `ddp_config`.

    `min_lr`, which mcore leaves at None and its scheduler then rejects, is 0.0 unless given.

    Raises:
        ValueError: no `lr`; a precision-aware optimizer without what it needs, or what needs one without it;
            `decoupled_min_lr` without `decoupled_lr`.
        TypeError: a name that is no field.
    """
    check_fields(OptimizerConfig, fields)
    if fields.get("lr") is None:
        raise ValueError("lr is not set: give build_optimizer_config(..., lr=...)")
    chosen: dict[str, Any] = {
        "bf16": config.bf16,
        "fp16": config.fp16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
        "min_lr": 0.0,
        "fp8_recipe": config.fp8_recipe if config.fp8_param else None,  # of weights, which are bf16 otherwise
        "reuse_grad_buf_for_mxfp8_param_ag": ddp_config.reuse_grad_buf_for_mxfp8_param_ag,
    }
    check_optimizer_fields(chosen | fields)
    return OptimizerConfig(**(chosen | fields))
