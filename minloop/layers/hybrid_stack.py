"""mcore's stack of layers of several kinds, without the norm that needs Transformer Engine."""

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer import TransformerConfig

from minloop.layers.norm import TorchNorm


class TorchHybridStack(HybridStack):
    """In place of mcore's `HybridStack`, whose final norm is Transformer Engine's whatever its spec says."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        post_process: bool = True,
        post_layer_norm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **options)
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
