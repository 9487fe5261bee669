"""The kernels that mcore and Transformer Engine look up by name as they run, put in their places."""

from importlib import import_module

from megatron.core.transformer import TransformerConfig

from minloop.layers.flash_window import mend_flash_attention
from minloop.layers.weight_gradient import provide_weight_gradient


def install_kernels(config: TransformerConfig) -> None:
    """Install what a model of this config needs; what is there already stays."""
    if config.gradient_accumulation_fusion:
        provide_weight_gradient()
    if config.transformer_impl == "transformer_engine":
        mend_flash_attention()
        if config.fused_single_qkv_rope:
            import_module("minloop.layers.fused_rope").use_fused_rope()  # which needs Triton
