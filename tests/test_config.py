"""Configs: the choices made, layouts replaced, and every contradiction refused by name."""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from ranks import RankError, run_ranks
from sameness_cases import HETEROGENEOUS
from small import small_config, small_state

import minloop
from minloop.architecture import check_gpt_options, gpt_specs
from minloop.context_parallel_checks import check_context_parallel
from minloop.distributed import DEFAULT_ORDER, check_world_size
from minloop.graph_checks import check_graph_sequence
from minloop.kernel_checks import check_kernels
from minloop.optimizer import check_optimizer_config
from minloop.spelling import check_spellings

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
LOCAL = {"transformer_impl": "local"}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2, "params_dtype": torch.bfloat16}


def test_precision_decides_the_dtypes() -> None:
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
    ]
    for fields, dtype in cases:
        config = minloop.build_config(**MODEL, **fields)
        assert (config.params_dtype, config.pipeline_dtype) == (dtype, dtype)


def test_derived_fields_are_mcores() -> None:
    config = minloop.build_config(**MODEL)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (128, 8, 4)
    assert isinstance(config, minloop.TransformerConfig)


def test_the_fusions_suit_the_model_whatever_the_machine() -> None:
    gelu, swiglu, other = (
        minloop.build_config(**MODEL, **LOCAL, **fields)
        for fields in (
            {},
            {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False},
            {"activation_func": F.relu},
        )
    )
    assert [config.bias_activation_fusion for config in (gelu, swiglu, other)] == [True, True, False]
    assert all(config.bias_dropout_fusion and not config.cross_entropy_loss_fusion for config in (gelu, swiglu, other))
    assert minloop.build_config(**MODEL, bf16=True).cross_entropy_loss_fusion is True
    assert minloop.build_config(**MODEL, bf16=True, deterministic_mode=True).cross_entropy_loss_fusion is False
    assert minloop.build_config(**MODEL, bias_activation_fusion=False).bias_activation_fusion is False


SWIGLU: dict[str, Any] = {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False}


def test_a_clamp_or_an_offset_of_swiglu_is_left_to_the_kernel_that_knows_it() -> None:
    for fields in ({"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0}):
        assert minloop.build_config(**MODEL, **SWIGLU, **fields).bias_activation_fusion is False


def test_with_transformer_engine_the_fusions_suit_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minloop.config.check_config", lambda _: None)  # which wants a GPU

    def build(config_class: Any = minloop.TransformerConfig, **fields: Any) -> Any:
        absent = {"apply_rope_fusion": False, "moe_permute_fusion": False}  # mcore looks for those kernels at once
        return minloop.build_config(config_class, **MODEL, transformer_impl="transformer_engine", **absent, **fields)

    assert build(**SWIGLU).use_te_activation_func is True
    blocks = {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": [HETEROGENEOUS[0]] * 4})}
    for config in (
        build(HeterogeneousTransformerConfig, **SWIGLU, **blocks),
        build(**SWIGLU, is_hybrid_model=True),
        build(**SWIGLU, glu_linear_offset=1.0),
        build(**SWIGLU, activation_func_clamp_value=7.0),
    ):
        assert config.use_te_activation_func is False
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
    assert build(**experts, moe_router_load_balancing_type="aux_loss").moe_router_fusion is True
    for fields in ({"moe_router_load_balancing_type": "quantile_balancing"}, {"moe_router_dtype": "fp64"}):
        assert build(**experts, **fields).moe_router_fusion is False
    assert [build(**experts, is_hybrid_model=hybrid).bias_dropout_fusion for hybrid in (False, True)] == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_backend": AttnBackend.local}, "attention_backend=AttnBackend.local with transformer_impl='transf"),
        ({"normalization": "L2Norm"}, "normalization='L2Norm' with transformer_impl='transformer_engine'"),
        ({"context_parallel_size": 2}, "params_dtype=torch.float32, in which it has no such attention: set bf16=True"),
        (
            CP2 | {"window_size": (7, 0)},
            r"cp_comm_type=None and window_size=\(7, 0\): set cp_comm_type='a2a' or 'all_g",
        ),
        (
            CP2 | {"softmax_type": "learnable", "cp_comm_type": "all_gather"},
            "softmax_type='learnable': set cp_comm_typ",
        ),
        (CP2 | {"num_query_groups": 1, "cp_comm_type": "a2a"}, "deals heads out to 2 ranks, and 1 heads of keys on ea"),
    ],
)
def test_what_transformer_engine_has_no_kernel_for_is_refused(fields: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(**(vars(minloop.build_config(**MODEL)) | {"transformer_impl": "transformer_engine"}))
    for check in (check_kernels, check_context_parallel):
        check(config)
    vars(config).update(fields)
    check = check_context_parallel if "context_parallel_size" in fields else check_kernels
    with pytest.raises(ValueError, match=message):
        check(config)


def test_what_transformer_engine_has_kernels_for_is_not_refused() -> None:
    config = SimpleNamespace(**(vars(minloop.build_config(**MODEL)) | {"transformer_impl": "transformer_engine"}))
    windows: dict[str, Any] = {"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 1, 0]}
    kinds: dict[str, Any] = {"cp_comm_type": ["a2a", "p2p", "all_gather", "p2p"], "num_query_groups": 2}
    for fields in ({}, {"window_size": (-1, 0)}, windows | kinds, {"softmax_type": "learnable", "cp_comm_type": "a2a"}):
        check_context_parallel(SimpleNamespace(**(vars(config) | CP2 | fields)))


def test_any_field_can_be_given_and_a_subclass_used() -> None:
    config = minloop.build_config(**MODEL, calculate_per_token_loss=False, activation_func=F.silu)
    assert config.calculate_per_token_loss is False
    assert config.activation_func is F.silu
    latent = minloop.build_config(minloop.MLATransformerConfig, **MODEL)
    assert isinstance(latent, minloop.MLATransformerConfig)
    with pytest.raises(TypeError, match="TransformerConfig has no field 'tensor_parallel'"):
        minloop.build_config(**MODEL, tensor_parallel=2)
    with pytest.raises(TypeError, match="did you mean 'recompute_granularity'"):
        minloop.build_config(**MODEL, recompute_granularty="full")
    for ddp in ({}, {"reshard_after_forward": True}):
        with pytest.raises(TypeError, match="ParallelConfig has no field 'bucket_siz': did you mean 'bucket_size'"):
            minloop.build_ddp_config(config, bucket_siz=1, **ddp)
    with pytest.raises(TypeError, match="OptimizerConfig has no field 'adam_bet1': did you mean 'adam_beta1'"):
        minloop.build_optimizer_config(config, minloop.build_ddp_config(config), lr=1.0, adam_bet1=0.9)


def test_virtual_stages_overlap_their_communication() -> None:
    config = minloop.build_config(**MODEL, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    plain, virtual = (
        minloop.build_config(**MODEL, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
        for layout in ("Et|tttL", "E|tt|tt|L")
    )
    assert (plain.overlap_p2p_comm, virtual.overlap_p2p_comm) == (False, True)


def test_replace_layout_leaves_the_old_layout_behind() -> None:
    old = minloop.build_config(
        **MODEL,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    old.grad_scale_func = abs  # as a training state would bind it
    new = minloop.replace_layout(old, tensor_model_parallel_size=1, pipeline_model_parallel_size=4)
    assert (new.tensor_model_parallel_size, new.sequence_parallel, new.expert_tensor_parallel_size) == (1, False, 1)
    assert (new.virtual_pipeline_model_parallel_size, new.overlap_p2p_comm, new.grad_scale_func) == (None, False, None)
    assert new.microbatch_group_size_per_vp_stage == 4
    assert (old.tensor_model_parallel_size, old.grad_scale_func) == (2, abs)


def test_replace_layout_leaves_behind_what_nothing_reads_any_more() -> None:
    old = minloop.build_config(
        **MODEL, **PP2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm_warmup_flush=True
    )
    vars(old).update(tensor_model_parallel_size=2, tp_comm_overlap=True, tp_comm_bulk_wgrad=False, fp8_margin=1)
    assert old.deallocate_pipeline_outputs
    new = minloop.replace_layout(old, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    assert (new.tp_comm_bulk_wgrad, new.fp8_margin, new.overlap_p2p_comm_warmup_flush) == (True, 0, False)
    assert not new.deallocate_pipeline_outputs
    with pytest.raises(ValueError, match="fp8_margin=1 with fp8=None"):
        minloop.replace_layout(old, tensor_model_parallel_size=1, fp8_margin=1)
    kept = minloop.build_config(**MODEL, **PP2, deallocate_pipeline_outputs=False)
    assert not minloop.replace_layout(kept, tensor_model_parallel_size=2).deallocate_pipeline_outputs


def test_a_gate_that_makes_the_model_larger_is_mentioned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minloop.messages._said", set())
    for _ in range(2):
        minloop.build_config(**MODEL, **SWIGLU)
    (line,) = caplog.messages
    assert "ffn_hidden_size left at 4 × hidden_size (128): half as many" in line
    assert "8/3 × hidden_size (85) keeps their number" in line
    monkeypatch.setattr("minloop.messages._said", set())
    caplog.clear()
    for fields in ({"ffn_hidden_size": 128}, {"num_moe_experts": 2, "moe_ffn_hidden_size": 128}):
        minloop.build_config(**MODEL, **SWIGLU, **fields)
    minloop.build_config(**MODEL)
    monkeypatch.setenv("RANK", "1")
    minloop.build_config(**MODEL, **SWIGLU)
    assert caplog.messages == []


def test_replace_layout_keeps_the_model_and_the_rest_of_the_layout() -> None:
    old = minloop.build_config(**MODEL, pipeline_model_parallel_size=2, bf16=True, normalization="RMSNorm")
    new = minloop.replace_layout(old, tensor_model_parallel_size=4)
    differing = {f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)}
    # mcore makes new initialisation functions for every config
    differing -= {"init_method", "output_layer_init_method", "embedding_init_method"}
    assert differing == {"tensor_model_parallel_size", "expert_tensor_parallel_size"}
    by_hand = minloop.build_config(**MODEL, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tttL")
    again = minloop.replace_layout(by_hand, tensor_model_parallel_size=2)
    assert str(again.pipeline_model_parallel_layout) == "Et|tttL"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers is not set"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tL", "mtp_num_layers": 1},
            r"pipeline_model_parallel_layout='Ettt\|tL' .* mtp_num_layers \(1\): Number of mtp layers",
        ),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local': graphs of single layers"),
        (
            {"cuda_graph_impl": "full_iteration", "fp16": True},
            "'full_iteration' with fp16=True: its loss scale changes",
        ),
        ({"cuda_graph_impl": "full_iteration", **LOCAL}, r"hidden_dropout 0\.1.* use_te_rng_tracker=False"),
        (
            {"cuda_graph_impl": "full_iteration", "pipeline_model_parallel_size": 2},
            "'full_iteration' with pipeline_model_parallel_size=2: such a step has not been replayed yet",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is not set"),
        ({"tensor_model_parallel_size": 3}, r"num_attention_heads \(4\) .* tensor_model_parallel_size \(3\)"),
        ({"num_query_groups": 3}, r"num_attention_heads \(4\) .* num_query_groups \(3\)"),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_query_groups": 3, "tensor_model_parallel_size": 4},
            r"num_query_groups \(3\) is neither a multiple nor a divisor of tensor_model_parallel_size \(4\)",
        ),
        ({"sequence_parallel": True}, "sequence_parallel=True needs tensor_model_parallel_size > 1"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": None}, "needs pipeline_dtype"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs pipeline_model_parallel_size > 1"),
        (
            {"pipeline_model_parallel_size": 3},
            r"num_layers \(4\) is not divisible by pipeline_model_parallel_size \(3\)",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "overlap_p2p_comm": False,
                "batch_p2p_comm": True,
            },
            "mixes up microbatches: set overlap_p2p_comm=True",
        ),
        ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, "exclude each other"),
        ({"expert_model_parallel_size": 2}, "num_moe_experts is None"),
        ({"expert_model_parallel_size": 2, "num_moe_experts": 3}, r"num_moe_experts \(3\) is not divisible"),
        ({"fp16": True, "bf16": True}, "choose one"),
        ({"transformer_impl": "inference_optimized"}, "cannot train"),
        (
            {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 3]},
            r"multiply to 6, not to context_parallel_size \(4\)",
        ),
        (
            {"context_parallel_size": 2, "calculate_per_token_loss": False},
            r"context_parallel_size \(2\) needs calculate_per_token_loss=True",
        ),
        ({"num_moe_experts": 4, "moe_router_topk_limited_devices": 2}, r"moe_router_topk_limited_devices \(2\) means"),
        ({"context_parallel_size": 2, "cp_comm_type": "ring"}, "cp_comm_type='ring'"),
        ({"context_parallel_size": 2, "cp_comm_type": "a2a+p2p"}, "hierarchical_context_parallel_sizes=None"),
        (
            {"context_parallel_size": 2, "cp_comm_type": "a2a", "num_attention_heads": 3, "hidden_size": 48},
            r"num_attention_heads \(3\).*cp_comm_type='a2a'",
        ),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0: it must be at least 1"),
        ({"hidden_dropout": 1.5}, "hidden_dropout is 1.5"),
        ({"params_dtype": torch.bfloat16}, "bf16 is False: set bf16=True"),
        ({"multi_latent_attention": True}, "only MLATransformerConfig has"),
        ({"moe_layer_freq": [1, 0]}, r"moe_layer_freq has 2 entries for num_layers \(4\): give one per layer"),
        ({"cp_comm_type": ["p2p"] * 3}, r"cp_comm_type has 3 entries for num_layers \(4\): give one per layer"),
        ({"overlap_moe_expert_parallel_comm": True}, "_comm=True with expert_model_parallel_size=1: it hides"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute=True is a part of overlap_moe_expert_parallel_comm=True"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 1,
            },
            r"microbatch_group_size_per_vp_stage \(1\) is less than pipeline_model_parallel_size \(2\)",
        ),
        ({"tp_comm_overlap": True}, "tp_comm_overlap=True with tensor_model_parallel_size=1: it needs more than 1"),
        (
            {"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True, **LOCAL},
            "tp_comm_overlap=True with transformer_impl=local: it needs 'transformer_engine' and a GPU",
        ),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True, which"),
        ({"gtp_weight_remat_size": 2}, "gtp_weight_remat_size is 2, which does not train as it says: leave it at 1"),
        (
            {"mtp_num_layers": 1, "mtp_detach_heads": True, "pipeline_model_parallel_size": 2},
            r"mtp_detach_heads=True with pipeline_model_parallel_size \(2\)",
        ),
        *(
            ({name: value}, f"{name}={value} with fp8=None and fp4=None, without which nothing reads it: set fp8")
            for name, value in {
                "fp8_dot_product_attention": True,
                "fp8_wgrad": False,
                "first_last_layers_bf16": True,
            }.items()
        ),
        *(
            ({name: value}, f"{name}={value} with num_moe_experts=None, .*: set num_moe_experts, or leave {name} out")
            for name, value in {"moe_grouped_gemm": True, "moe_router_topk": 4, "moe_aux_loss_coeff": 0.01}.items()
        ),
        ({"cpu_offloading_num_layers": 2}, "cpu_offloading_num_layers=2 with cpu_offloading=False"),
        ({"offload_modules": ["core_attn"]}, "with fine_grained_activation_offloading=False"),
        ({"offload_modules": ["coreattn"]}, "'coreattn' is none of core_attn, .*: did you mean 'core_attn'?"),
        ({"offload_modules": "core_attn"}, "a list of them is due: give offload_modules=.'core_attn'."),
        ({"cpu_offloading": True, **LOCAL}, "cpu_offloading=True with transformer_impl='local'"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"], **LOCAL},
            "fine_grained_activation_offloading=True with transformer_impl='local'",
        ),
        ({"attention_backend": "flash"}, "'flash' is no AttnBackend: .* and give AttnBackend.flash$"),
        ({"attention_backend": "falsh"}, "give one of AttnBackend.flash, AttnBackend.fused"),
        ({"use_te_activation_func": True, "activation_func": F.silu}, "for which mcore takes ReLU: set use_te_activat"),
        (
            SWIGLU | {"use_te_activation_func": True, "glu_linear_offset": 1.0},
            "use_te_activation_func=True with glu_linear_offset=1.0, which Transformer Engine's activation leaves out",
        ),
        (
            SWIGLU | {"use_te_activation_func": True, "is_hybrid_model": True},
            "use_te_activation_func=True with is_hybrid_model=True, whose specs",
        ),
        *(
            (
                {name: value},
                f"{name}={value!r} with {reader}=.*, without which nothing reads it: set {reader}, or leave",
            )
            for reader, names in {
                "num_moe_experts": {
                    "moe_layer_freq": 2,
                    "moe_latent_size": 16,
                    "moe_router_score_function": "sigmoid",
                    "moe_router_enable_expert_bias": True,
                    "moe_router_load_balancing_type": "none",
                    "moe_router_dtype": "fp32",
                    "moe_shared_expert_overlap": True,
                },
                "mtp_num_layers": {"mtp_detach_heads": True, "mtp_use_repeated_layer": True},
                "fp8": {
                    "fp8_recipe": "tensorwise",
                    "fp8_margin": 1,
                    "fp8_quantizer_factory": "own.factory",
                    "fp8_amax_history_len": 16,
                    "fp8_amax_compute_algo": "max",
                },
                "fp4": {"fp4_recipe": "custom", "fp4_quantizer_factory": "own.factory"},
                "tp_comm_overlap": {
                    "tp_comm_bulk_wgrad": False,
                    "tp_comm_bulk_dgrad": False,
                    "tp_comm_overlap_ag": False,
                    "tp_comm_overlap_rs": False,
                    "tp_comm_overlap_rs_dgrad": True,
                    "tp_comm_atomic_ag": True,
                    "tp_comm_atomic_rs": True,
                },
                "window_size": {"window_attn_skip_freq": 2},
                "hybrid_context_parallel": {"max_seqlen_per_dp_cp_rank": 64},
            }.items()
            for name, value in names.items()
        ),
        (
            {"num_moe_experts": 4, "moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap=True with moe_shared_expert_intermediate_size=None",
        ),
        *(
            (
                {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2], "cp_comm_type": kinds}
                | {"transformer_impl": "local"},
                "hierarchical_context_parallel_sizes=.* does not read them: set cp_comm_type='a2a.p2p', or leave",
            )
            for kinds in (None, "p2p", ["p2p", "a2a", "p2p", "a2a"])
        ),
        *(
            ({name: value}, rf"{name}={value} with pipeline_model_parallel_size \(1\), where nothing reads it")
            for name, value in {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
                "microbatch_group_size_per_vp_stage": 4,
            }.items()
        ),
        *(
            (
                {"pipeline_model_parallel_size": 2, "batch_p2p_comm": False, "overlap_p2p_comm": True, name: True}
                | more,
                rf"{name}=True needs virtual_pipeline_model_parallel_size > 1, which is None: .* set {name}=False",
            )
            for name, more in (
                ("overlap_p2p_comm", {}),
                ("overlap_p2p_comm", {"pipeline_model_parallel_layout": "Ett|ttL"}),
                ("overlap_p2p_comm_warmup_flush", {"overlap_p2p_comm": False}),
            )
        ),
        ({"use_ring_exchange_p2p": True}, "this torch.distributed has no ring_exchange: set it to False"),
        *(
            (
                fields,
                rf"{next(iter(fields))}=.* with num_layers \(4\) and pipeline_model_parallel_size \({pp}\): {text}",
            )
            for fields, pp, text in (
                ({"num_layers_in_first_pipeline_stage": 1}, 1, "Mismatch: 3 middle layers .*. Give a first and"),
                ({"num_layers_in_first_pipeline_stage": 4} | PP2, 2, "Mismatch: 0 middle layers .*alone$"),
                ({"account_for_embedding_in_pipeline_split": True} | PP2, 2, "number of middle layers: 5 must"),
                (
                    {"num_layers_in_first_pipeline_stage": 3, "virtual_pipeline_model_parallel_size": 2} | PP2,
                    2,
                    "number of layers at first stage: 3",
                ),
            )
        ),
        (
            {"pipeline_model_parallel_layout": "E|tt|tt|L", "virtual_pipeline_model_parallel_size": 4} | PP2,
            "virtual_pipeline_model_parallel_size=4 with .* conflicts with pipeline_model_parallel_layout",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
            "mcore has 'gdn_norm_out' with ex",
        ),
        *(
            (LOCAL | {"num_moe_experts": 4, "moe_router_fusion": True} | fields, "neither 'quantile_balancing' nor")
            for fields in ({"moe_router_load_balancing_type": "quantile_balancing"}, {"moe_router_dtype": "fp64"})
        ),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minloop.build_config(**(MODEL | fields))


@pytest.mark.parametrize(
    ("field", "word", "message"),
    [
        ("normalization", "Layernorm", "is none of 'LayerNorm', 'RMSNorm', 'L2Norm': did you mean 'LayerNorm'?"),
        ("recompute_method", "blocks", "is none of 'uniform', 'block', None: did you mean 'block'?"),
        ("recompute_granularity", "some", "is none of 'full', 'selective', None"),
        ("moe_router_score_function", "softmx", "'sqrtsoftplus': did you mean 'softmax'?"),
        ("moe_token_dispatcher_type", "all2all", "'allgather', 'alltoall', 'flex': did you mean 'alltoall'?"),
        ("moe_router_dtype", "fp16", "is none of 'fp32', 'fp64', None"),
        ("experimental_attention_variant", "gdn", "is none of 'gated_delta_net', 'dsa', None"),
    ],
)
def test_a_word_that_mcore_does_not_know_is_answered_with_those_it_knows(field: str, word: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        minloop.build_config(**(MODEL | {field: word}))
    assert str(error.value).startswith(f"{field}='{word}' is none of ")


def test_mcores_defaults_are_words_that_it_knows() -> None:
    minloop.build_config(**MODEL, **LOCAL, normalization="L2Norm")
    fields = dataclasses.fields(minloop.TransformerConfig)
    check_spellings(SimpleNamespace(**{field.name: field.default for field in fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experimental_attention_variant": "dsa", "add_bias_linear": False}, "experimental_attention_variant='dsa': "),
        ({"linear_attention_freq": 2}, "linear_attention_freq=2: a GPT has no such layers"),
    ],
)
def test_layers_that_a_gpt_does_not_have(fields: dict[str, Any], message: str) -> None:
    one: Any = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0))
    with pytest.raises(ValueError, match=message):
        gpt_specs(minloop.build_config(**MODEL, **LOCAL, **fields), one, None)


def test_a_misspelt_option_of_yarn_is_answered_with_the_nearest() -> None:
    options = {"position_embedding_type": "yarn", "yarn_rotary_scaling_factr": 4.0}
    with pytest.raises(ValueError, match=r"_scaling_factr is no option .*: did you mean 'yarn_rotary_scaling_factor'"):
        check_gpt_options(minloop.build_config(**MODEL), options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_transformer_engine_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"transformer_impl='transformer_engine' but .*use transformer_impl='local'"):
        minloop.build_config(**MODEL, transformer_impl="transformer_engine")


def test_ddp_and_optimizer_configs() -> None:
    config = minloop.build_config(**MODEL, bf16=True)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    assert (ddp_config.overlap_grad_reduce, ddp_config.overlap_param_gather) == (True, True)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=0.1)
    assert (optimizer_config.bf16, optimizer_config.use_distributed_optimizer) == (True, True)
    assert optimizer_config.min_lr == 0
    with pytest.raises(ValueError, match="lr is not set"):
        minloop.build_optimizer_config(config, ddp_config)
    with pytest.raises(
        ValueError, match=r"decoupled_min_lr=0.1 with decoupled_lr=None, without which nothing reads it"
    ):
        minloop.build_optimizer_config(config, ddp_config, lr=0.1, decoupled_min_lr=0.1)
    with pytest.raises(ValueError, match="overlap_param_gather=True needs use_distributed_optimizer=True"):
        minloop.build_ddp_config(config, overlap_param_gather=True)
    with pytest.raises(ValueError, match="set one of them to False"):
        minloop.build_ddp_config(config, average_in_collective=True)
    aware = {"use_precision_aware_optimizer": True}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype=torch.bfloat16 with use_precision_aware_optimizer=False"),
        (aware | {"optimizer": "sgd"}, "use_precision_aware_optimizer=True with optimizer='sgd': set that to 'adam'"),
        (aware | {"use_distributed_optimizer": False}, "set that to True, in build_ddp_config, or"),
        (aware, "needs Transformer Engine's Adam, .* set use_precision_aware_optimizer=False"),
    ]
    for fields, message in refused:
        with (
            mock.patch("minloop.optimizer_config_checks.HAVE_TE", new=False),
            pytest.raises(ValueError, match=message),
        ):
            minloop.build_optimizer_config(config, ddp_config, lr=0.1, **fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_custom_fsdp", True),
        ("data_parallel_sharding_strategy", "optim_grads_params"),
        ("outer_dp_sharding_strategy", "optim"),
        ("fsdp_double_buffer", True),
        ("megatron_fsdp_enable_fine_grained_param_gather", True),
    ],
)
def test_megatron_fsdp_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}={value!r} asks for Megatron FSDP: use wrap_fsdp"):
        minloop.build_ddp_config(minloop.build_config(**MODEL), **{field: value})


ZERO1: dict[str, Any] = {"use_distributed_optimizer": True}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "ddp", "optimizer", "message"),
    [
        ({}, {}, {"optimizer": "soap"}, "'soap' is none of adam, sgd, lion, muon; mcore cannot save it"),
        ({}, {}, {"bf16": True}, "OptimizerConfig.bf16 is True, but the model was built with False"),
        ({}, ZERO1, {"overlap_param_gather_with_optimizer_step": True}, "parallel_size, which is None"),
        ({}, {}, {"use_layer_wise_distributed_optimizer": True}, "does not drive that optimizer"),
        ({}, ZERO1, {"optimizer": "lion"}, "'lion' with use_distributed_optimizer=True: set it to False"),
        ({"fp16": True}, {}, {"optimizer": "muon"}, "'muon' with fp16=True"),
        (TP2, {}, {"optimizer": "muon"}, r"tensor_model_parallel_size \(2\) .*muon_tp_mode='duplicated'"),
        (TP2, {}, {"optimizer": "muon", "muon_tp_mode": "duplicated"}, "needs the package emerging-optimizers"),
        ({}, {}, {"optimizer": "lion"}, "pip install emerging-optimizers"),
    ],
)
def test_optimizers_that_do_not_suit_the_model(
    fields: dict[str, Any], ddp: dict[str, Any], optimizer: dict[str, Any], message: str
) -> None:
    config = minloop.build_config(**MODEL, **fields)
    ddp_config = minloop.build_ddp_config(config, **ddp)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=0.1, **optimizer)
    with mock.patch("minloop.optimizer.find_spec", return_value=None), pytest.raises(ValueError, match=message):
        check_optimizer_config(optimizer_config, config, ddp_config)


EP2: dict[str, Any] = {"expert_model_parallel_size": 2, "num_moe_experts": 4, "add_bias_linear": False}


@pytest.mark.parametrize(
    ("fields", "order", "message"),
    [
        (PP2 | TP2, "tp-cp-ep-pp-dp", ""),
        (PP2 | EP2, "tp-cp-ep-dp-pp", ""),
        (PP2 | EP2, "tp-cp-ep-pp-dp", r"order='tp-cp-ep-pp-dp' with pipeline_model_parallel_size \(2\) > 1"),
        (PP2 | EP2 | {"num_moe_experts": 8, "expert_model_parallel_size": 8}, "tp-cp-ep-dp-pp", "= 16: change the num"),
    ],
)
def test_orders_and_sizes_that_a_world_of_eight_takes(fields: dict[str, Any], order: str, message: str) -> None:
    config = minloop.build_config(**MODEL, **fields)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_world_size(config, 8, order)


def test_the_default_order_is_mcores() -> None:
    parameters = inspect.signature(parallel_state.initialize_model_parallel).parameters
    assert parameters["order"].default == DEFAULT_ORDER


def init(fields: dict[str, Any]) -> None:
    minloop.init_distributed(small_config(**fields), seed=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            r"world size 2 is not a multiple of tensor_model_parallel_size \(2\) × "
            r"pipeline_model_parallel_size \(2\) × context_parallel_size \(1\) = 4",
        ),
        ({"expert_model_parallel_size": 4, "num_moe_experts": 4}, r"expert_model_parallel_size \(4\)"),
    ],
)
def test_the_world_must_fit_the_layout(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(2, init, fields, timeout=60)


def half_set_environment(missing: str) -> None:
    del os.environ[missing]
    init({})


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_launch_variables(missing: str) -> None:
    with pytest.raises(RankError, match=f"but not {missing}: start the script with torchrun"):
        run_ranks(1, half_set_environment, missing)


ONE_PROCESS = """
import minloop, torch.distributed as dist
config = minloop.build_config(num_layers=1, hidden_size=8, num_attention_heads=1)
groups = minloop.init_distributed(config, seed=1)
minloop.build_gpt_model(config, groups, vocab_size=8, max_sequence_length=4)
print(dist.get_world_size(), minloop.is_first_rank(groups))
minloop.shutdown_distributed()
"""


def run_one_process(path: str = "") -> tuple[str, str]:
    launch = ("RANK", "WORLD", "MASTER")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launch)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", ONE_PROCESS], env=environment, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_without_launch_variables_it_is_one_quiet_process() -> None:
    assert run_one_process() == ("1 True\n", "")


@pytest.mark.parametrize("content", ["from pyramid.session import anything", ""], ids=["fails to import", "imports"])
def test_the_wrong_apex_is_named_and_passed_over(content: str, tmp_path: Path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text(content)
    output, errors = run_one_process(str(tmp_path))
    assert output == "1 True\n"
    assert f"the package apex in {tmp_path / 'apex'} is not NVIDIA's" in errors


def port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(other.getsockname()[1]))
        init({})


def test_a_port_in_use_is_named() -> None:
    with pytest.raises(RankError, match=r"MASTER_PORT \d+ is in use on 127.0.0.1"):
        run_ranks(1, port_in_use)


def init_in_the_hosts_group() -> tuple[bool, int]:
    init({"tensor_model_parallel_size": 2})
    minloop.shutdown_distributed()
    return dist.is_initialized(), dist.get_world_size()


def test_a_hosts_default_group_is_used_and_survives() -> None:
    assert run_ranks(2, init_in_the_hosts_group, init="any") == [(True, 2)] * 2


def init_in_a_group_that_gpus_cannot_use() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        for make in (init, lambda fields: minloop.build_groups(small_config(**fields))):
            with pytest.raises(RuntimeError, match="default group's backend is gloo, but these ranks have GPUs"):
                make({"tensor_model_parallel_size": 2})


def test_gloo_is_refused_on_gpus() -> None:
    run_ranks(2, init_in_a_group_that_gpus_cannot_use, init="gloo")


def second_layout() -> None:
    init({"tensor_model_parallel_size": 2})
    init({})


def test_a_second_layout_needs_a_shutdown_first() -> None:
    with pytest.raises(RankError, match=r"another layout \(tensor_model_parallel_size: 2 there, 1 here"):
        run_ranks(2, second_layout)


def model_for_other_groups() -> None:
    groups = minloop.init_distributed(small_config(tensor_model_parallel_size=2), seed=1)
    minloop.build_gpt_model(small_config(), groups, vocab_size=256, max_sequence_length=32)


def model_for_some_groups() -> None:
    config = small_config(tensor_model_parallel_size=2)
    groups = minloop.init_distributed(config, seed=1)
    some = minloop.ProcessGroupCollection(tp=groups.tp, pp=groups.pp, cp=groups.cp)
    minloop.build_gpt_model(config, some, vocab_size=256, max_sequence_length=32)


def odd_vocabulary() -> None:
    config = small_config(tensor_model_parallel_size=2)
    groups = minloop.init_distributed(config, seed=1)
    minloop.build_gpt_model(config, groups, vocab_size=255, max_sequence_length=32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (model_for_other_groups, r"tensor_model_parallel_size is 1 in the config, but the groups were made for 2"),
        (model_for_some_groups, r"the groups lack dp, mp, tp_cp, .*: build_groups or init_distributed makes all"),
        (odd_vocabulary, r"vocab_size \(255\) is not divisible by tensor_model_parallel_size \(2\): pad it to 256"),
    ],
)
def test_models_that_do_not_fit_are_refused(function: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(2, function)


def rates_by_width(fields: dict[str, Any]) -> set[float]:
    state = small_state(lr=1e-3, **fields)
    minloop.shutdown_distributed()
    return {group["max_lr"] for group in state.optimizer.param_groups}


def test_mup_scales_learning_rates_with_the_width() -> None:
    assert run_ranks(1, rates_by_width, {}) == [{1e-3}]
    assert run_ranks(1, rates_by_width, {"use_mup": True, "mup_base_hidden_size": 8}) == [{1e-3, 1e-3 * 8 / 32}]


def test_graphs_of_short_sequences_are_refused_where_cudnn_attends() -> None:
    config = small_config(cuda_graph_impl="full_iteration", use_te_rng_tracker=False)
    for backend in (AttnBackend.auto, AttnBackend.fused):
        config.attention_backend = backend
        with pytest.raises(ValueError, match="sequences of 127 tokens and attention_backend"):
            check_graph_sequence(config, 127)
        check_graph_sequence(config, 128)
    config.attention_backend = AttnBackend.unfused
    check_graph_sequence(config, 32)
