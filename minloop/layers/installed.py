"""Kernels put where mcore and Transformer Engine look them up by name, and layers mended once they are built."""

import copy
from importlib import import_module
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.heterogeneous import linear_replacements
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch.nn import Module, Parameter

from minloop.layers.flash_window import mend_flash_attention
from minloop.layers.gathered_linear import gather_by_hidden_dimension
from minloop.layers.weight_gradient import provide_weight_gradient


def install_kernels(config: TransformerConfig) -> None:
    """Install what a model of this config needs; what is there already stays."""
    if config.gradient_accumulation_fusion:
        provide_weight_gradient()
    if config.transformer_impl == "transformer_engine":
        mend_flash_attention()
        if config.fused_single_qkv_rope:
            import_module("minloop.layers.fused_rope").use_fused_rope()  # which needs Triton


def fuse_rope_where_it_fits(chunk: Module, config: TransformerConfig) -> None:
    """With `fused_single_qkv_rope`, let each call of an attention decide whether its product is rotated in one kernel.

    mcore insists on it in every call, though its function knows plain RoPE only, and no packed sequences, and of a
    group of heads that ranks share it would take all queries, not this rank's (mcore's attention.py:1908). Rotations
    of packed sequences in one kernel leave out YaRN's factor, and begin anew in the tokens' own positions of mRoPE
    (mcore's rope_utils.py:319): these go without `apply_rope_fusion`.
    """
    kind = getattr(chunk, "position_embedding_type", None)
    attentions = [module for module in chunk.modules() if isinstance(module, SelfAttention)]
    for own in (config, *(attention.config for attention in attentions)):  # heterogeneous layers have their own
        own.apply_rope_fusion = own.apply_rope_fusion and kind not in ("yarn", "mrope")
        own.fused_single_qkv_rope = own.fused_single_qkv_rope and kind == "rope"
    if config.fused_single_qkv_rope:
        for attention in attentions:
            attention.register_forward_pre_hook(_rotate_as_fits, with_kwargs=True)
            attention.register_forward_hook(_rotate_fused, always_call=True)


def _rotate_as_fits(attention: Any, _: Any, options: dict[str, Any]) -> None:
    apart = options.get("packed_seq_params"), options.get("inference_context")
    fits = apart == (None, None) and options.get("rotary_pos_emb") is not None
    attention.config.fused_single_qkv_rope = fits and attention.config.num_query_groups >= attention.world_size


def _rotate_fused(attention: Any, *_: Any) -> None:
    attention.config.fused_single_qkv_rope = True


def adapt_layers(chunk: Module, config: TransformerConfig) -> None:
    """Mend Transformer Engine's layers where mcore leaves something out."""
    if config.transformer_impl == "transformer_engine":
        mark_sinks(chunk)
        add_up_repeated_layers(chunk)
        if config.hybrid_context_parallel:
            let_samples_choose_ranks(chunk, config)
        for module in chunk.modules():
            if isinstance(module, getattr(linear_replacements, "TELayerNormColumnParallelLinearGathered", ())):
                gather_by_hidden_dimension(module)


def mark_sinks(chunk: Module) -> None:
    """Say of the learned logits of sinks that ranks have those of other heads: norms would count the first rank's."""
    for module in chunk.modules():
        offset = getattr(module, "softmax_offset", None)
        if isinstance(offset, Parameter) and not hasattr(offset, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(offset, True, 0, 1)


def let_samples_choose_ranks(chunk: Module, config: TransformerConfig) -> None:
    """Give attention what mcore gives it only with a context parallel size of the layout: a stream, and how to talk.

    Of one sample Transformer Engine multiplies the length on this rank by the ranks itself, where mcore's is the whole.
    """
    for module in chunk.modules():
        if isinstance(module, TEDotProductAttention):
            attention: Any = module
            attention.kept_packed_seq_params -= {"max_seqlen_q", "max_seqlen_kv"}
            kinds = config.cp_comm_type
            kind = kinds[attention.layer_number - 1] if isinstance(kinds, list) else kinds
            attention.cp_comm_type = kind or "p2p"
            if getattr(TEDotProductAttention, "cp_stream", None) is None:
                TEDotProductAttention.cp_stream = torch.cuda.Stream()


def add_up_repeated_layers(chunk: Module) -> None:
    """Let a layer that all depths of multi-token prediction share add to `main_grad` whenever it is called.

    In a first microbatch Transformer Engine writes `main_grad` anew (its linear.py:1576), and the first depth, whose
    backward pass comes last, would wipe out what others added.
    """
    for block in chunk.modules():
        if isinstance(block, MultiTokenPredictionBlock) and block.mtp_use_repeated_layer:
            for module in block.modules():
                if hasattr(module, "is_first_microbatch"):
                    vars(module)["disable_parameter_transpose_cache"] = True


def adapt_experts(chunk: Module, config: TransformerConfig) -> None:
    """Let mcore's experts do without a sort of tokens, and Transformer Engine's also with biases and without tokens."""
    sort_tokens_once(chunk)
    if config.transformer_impl == "transformer_engine":
        let_experts_have_no_token(chunk)
        if config.add_bias_linear:
            let_experts_have_biases(chunk)


def sort_tokens_once(chunk: Module) -> None:
    """Where one rank has all experts, whole, leave out mcore's sort by rank and expert of tokens sorted by expert."""
    for module in chunk.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher) or dispatcher.drop_and_pad:
            continue
        if dispatcher.ep_size == dispatcher.tp_size == 1:
            dispatcher.num_local_experts = 1  # which there decides over that sort alone


def let_experts_have_no_token(chunk: Module) -> None:
    """Where a rank has some of the experts, let the all-gather dispatcher sort tokens without the fused kernel.

    There may be none for those experts, and Transformer Engine's kernel wants one (its permutation.py,
    `moe_permute_mask_map_forward`). The all-to-all dispatcher sorts them before they are sent.
    """
    for module in chunk.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAllGatherTokenDispatcher) and dispatcher.ep_size > 1:
            dispatcher.config = copy.copy(dispatcher.config)
            dispatcher.config.moe_permute_fusion = False


def let_experts_have_biases(chunk: Module) -> None:
    """Let what mcore adds an expert's bias to, in place, be a copy: of Transformer Engine's it would be a view.

    That is how its linear layers return products, and autograd refuses to change such a view (mcore's mlp.py:354).
    """
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            experts: Any = module.local_experts
            for expert in experts:
                expert.linear_fc2.register_forward_hook(_copied)


def _copied(_: Any, __: Any, outputs: tuple[Any, Any]) -> tuple[Any, Any]:
    product, bias = outputs
    return (product if bias is None else product.clone()), bias
