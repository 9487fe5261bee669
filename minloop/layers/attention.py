"""Dot product attention in plain torch, with what mcore's own leaves to Transformer Engine."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import divide, get_pg_size
from torch import Tensor
from torch.nn.attention import SDPBackend

from minloop.layers.context_parallel import ContextParallel
from minloop.layers.kernels import Band, Boundaries, Options, allowed_by, attend

_CAUSAL_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_ANY_KERNEL = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,  # half as fast as cuDNN's on an H200
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_KERNELS = {
    AttnBackend.auto: _ANY_KERNEL,
    AttnBackend.local: _ANY_KERNEL,
    AttnBackend.flash: (SDPBackend.FLASH_ATTENTION,),
    AttnBackend.fused: (SDPBackend.CUDNN_ATTENTION,),
    AttnBackend.unfused: (SDPBackend.MATH,),
}


class TorchDotProductAttention(MegatronModule):
    """In place of mcore's `DotProductAttention`, on any device, through torch's fused attention kernels.

    Also where mcore's has nothing: context parallelism, value heads of another size than key heads (multi-latent
    attention), packed sequences. A causal mask always holds, with a window or an `attention_mask` too; a window of -1
    is open. The softmax is always taken in fp32.

    Attention sinks (`softmax_type` other than "vanilla") are written out and hold [s, s] scores in memory. Windows and
    packed sequences hold a mask [s, s], unless torch's flash kernel can run: on a GPU, in bf16 or fp16, without dropout
    and `attention_mask`. What the patterns of context parallelism hold is said where they are (`context_parallel`).
    Dropout draws from the stream of this tensor parallel rank, the same on all context parallel ranks, as in mcore.

    Args:
        config: whose `attention_backend` chooses the kernels on a GPU, by default cuDNN's before all others.
        layer_number: from 1; decides whether the layer has a window (`window_size`, `window_attn_skip_freq`).
        attn_mask_type: used where a call names none.
        attention_dropout: by default `config.attention_dropout`.
        softmax_scale: factor of the scores, by default 1 / sqrt(size of a key head).
        cp_comm_type: "p2p" (so None too), "a2a", "all_gather" or "a2a+p2p": all give the same numbers.
        pg_collection: `tp`, `cp` and, for "a2a+p2p", `hcp` are used.
    Raises:
        ValueError: qk_clip or log_max_attention_logit is on, `softmax_type` or `cp_comm_type` is unknown, or its groups
            or heads do not go together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        if config.qk_clip or config.log_max_attention_logit:
            raise ValueError(
                f"qk_clip={config.qk_clip}, log_max_attention_logit={config.log_max_attention_logit}: torch's kernels "
                "do not report the largest logit: set both to False or use transformer_impl='transformer_engine'"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "hcp"])
        self.tp_group = groups.tp
        # A module may go without context parallelism (an encoder, say) though there is a group for it.
        parallel = config.context_parallel_size > 1 and get_pg_size(groups.cp) > 1
        self.parallel = ContextParallel.from_groups(cp_comm_type, groups) if parallel else None
        if self.parallel is not None:
            self.parallel.check_heads(divide(config.num_attention_heads, get_pg_size(groups.tp)))
        self.gathers = cp_comm_type == "all_gather"
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.attention_dropout = torch.nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        frequency: Any = config.window_attn_skip_freq
        windowed = is_layer_window_attention(config.window_size, frequency, layer_number)
        self.window = (config.window_size if windowed else None) or (-1, -1)  # -1 is open
        self.kernels = _KERNELS[config.attention_backend]
        self.softmax_offset = self._build_softmax_offset()

    def _build_softmax_offset(self) -> Tensor | None:
        """The logit of the sink of each head on this rank, [np]."""
        config = self.config
        if config.softmax_type == "vanilla":
            return None
        heads = divide(config.num_attention_heads, get_pg_size(self.tp_group))
        offset = torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.softmax_type == "off-by-one":
            return offset
        if config.softmax_type != "learnable":
            raise ValueError(f"softmax_type={config.softmax_type!r}: use 'vanilla', 'off-by-one' or 'learnable'")
        offset = torch.nn.Parameter(offset)
        tensor_parallel.set_tensor_model_parallel_attributes(offset, True, 0, 1)
        if config.perform_initialization and config.init_method is not None:
            with _own_stream():
                config.init_method(offset)
        return offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend with the heads of this tensor parallel rank.

        Args:
            query: [sq, b, np, hn], or [t, np, hn] of packed sequences; key and value likewise.
            key: [sk, b, ng, hn], ng a divisor of np.
            value: [sk, b, ng, hv].
            attention_mask: bool, True where a query may not look, broadcast to [b, np, sq, sk]. With context parallel
                its rows are those of this rank and its columns those of the whole sequence, in natural order.
            attn_mask_type: by default the module's own.
            packed_seq_params: where sequences begin and end in the "thd" layout; in "sbhd" the ranks that share the
                sequence, of hybrid context parallelism.
        Returns:
            [sq, b, np * hv], or [t, np * hv] of packed sequences.
        Raises:
            ValueError: attention_bias is given, or arguments do not go together.
        """
        if attention_bias is not None:
            raise ValueError(
                "attention_bias is not supported: use attention_mask or transformer_impl='transformer_engine'"
            )
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL_TYPES
        packed: Any = packed_seq_params
        if packed is not None and packed.qkv_format == "sbhd" and packed.local_cp_size is not None:
            group = packed.cp_group
            parallel = None if group is None else ContextParallel(group, ring=None if self.gathers else group)
            return self._attend(query, key, value, causal, parallel=parallel).flatten(2)
        if packed_seq_params is not None:
            boundaries = self._boundaries(packed_seq_params, causal, attention_mask, len(query))
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            return self._attend(query, key, value, causal, boundaries=boundaries).flatten(1)
        keys = len(key) if self.parallel is None else len(key) * self.parallel.everyone.size()
        return self._attend(query, key, value, causal, allowed_by(attention_mask, len(query), keys)).flatten(2)

    def _boundaries(self, packed: PackedSeqParams, causal: bool, mask: Tensor | None, tokens: int) -> Tensor:
        """Where packed sequences end: [n + 2], int32, from 0 to the number of tokens."""
        own = None if self.parallel is None else self.parallel.everyone
        ranks = get_pg_size(own)
        refused = {
            f"qkv_format={packed.qkv_format!r} (only 'thd')": packed.qkv_format != "thd",
            "an attn_mask_type that is not causal": not causal,
            "an attention_mask": mask is not None,
            "a cp_group of their own": packed.cp_group not in (None, own) and get_pg_size(packed.cp_group) > 1,
            f"local_cp_size={packed.local_cp_size}": packed.local_cp_size not in (None, ranks),
        }
        if any(refused.values()):
            raise ValueError(
                f"packed_seq_params do not go with {', '.join(what for what, given in refused.items() if given)}: "
                "change that, pass packed_seq_params=None, or use transformer_impl='transformer_engine'"
            )
        padded: Any = packed.cu_seqlens_q_padded
        boundaries = packed.cu_seqlens_q if padded is None else padded
        # What follows the last sequence is one more: the flash kernel would leave those tokens unwritten.
        return F.pad(boundaries.int(), (0, 1), value=tokens * ranks)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        allowed: Tensor | None = None,
        boundaries: Tensor | None = None,
        parallel: ContextParallel | None = None,
    ) -> Tensor:
        """[sq, b, np, hn] -> [sq, b, np, hv]."""
        parallel = parallel or self.parallel
        left, right = (None if side < 0 else side for side in self.window)
        band = Band(left, 0 if causal else right)
        options = Options(
            scale=query.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            dropout=self.attention_dropout.p if self.training else 0.0,
            kernels=self.kernels,
            sinks=self.softmax_offset,
            fp32_factor=self.layer_number if self.config.apply_query_key_layer_scaling else 1,
        )
        # With sequence parallelism the whole block draws from this stream, and entered anew it could not be recomputed.
        own_stream = options.dropout and not self.config.sequence_parallel
        with _own_stream() if own_stream else contextlib.nullcontext():
            if parallel is not None:
                return parallel.attend(query, key, value, band, options, allowed, boundaries)
            both = None if boundaries is None else Boundaries(boundaries, boundaries)
            return attend(query, key, value, band, options, allowed, both)

    sharded_state_dict = DotProductAttention.sharded_state_dict  # of `softmax_offset`


def _own_stream() -> contextlib.AbstractContextManager[None]:
    """Random numbers that differ between tensor parallel ranks: heads are sharded over them."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    return tracker.fork()
