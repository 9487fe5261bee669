"""mcore's stack of layers of several kinds, with dropout that sequence parallel ranks draw each for its own tokens."""

import contextlib
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

from minloop.layers.norm import TorchNorm


class OwnStreamHybridStack(HybridStack):
    """As in mcore's `TransformerBlock`, layers draw from the tensor parallel rank's own stream in sequence parallelism.

    mcore 0.19's `HybridStack` leaves them the common one: ranks with other tokens, and attention with other heads,
    would drop at the same places. Its stack within a layer of multi-token prediction is given the own stream already.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork() if self.config.sequence_parallel else contextlib.nullcontext():
            return super().forward(*args, **options)


class TorchHybridStack(OwnStreamHybridStack):
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
