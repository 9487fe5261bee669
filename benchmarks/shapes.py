"""The shapes that benchmarks share, and one benchmark run as words: `C gpus=2 steps=12 global_batch_size=4`.

All are decoders like Llama: RMSNorm, RoPE, grouped queries, SwiGLU, untied embeddings, no bias, no dropout; E has the
layers of Qwen3-30B-A3B, with experts. A program is told its run by such words, so that every peer, whatever its own
command line, reads the same ones.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

LEARNING_RATE = 1e-5  # constant, from the first step: at 1e-4 shape C's loss doubles in its second step


@dataclass(frozen=True)
class Shape:
    """One model and its batch. `global_batch_size` counts the samples of one optimizer step over all GPUs."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    rotary_base: int = 10_000
    norm_epsilon: float = 1e-5
    head_size: int = 0  # 0: hidden_size / num_attention_heads
    qk_layernorm: int = 0
    num_moe_experts: int = 0  # with experts every layer has them, and no other MLP
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0

    @property
    def kv_channels(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron.core's TransformerConfig that say this shape."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "qk_layernorm": bool(self.qk_layernorm),
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        } | (self.expert_fields() if self.num_moe_experts else {})

    def expert_fields(self) -> dict[str, Any]:
        """Return TransformerConfig's fields of the experts."""
        return {
            "num_moe_experts": self.num_moe_experts,
            "moe_router_topk": self.moe_router_topk,
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
        }

    def num_microbatches(self, gpus: int = 1) -> int:
        """Microbatches of each data parallel GPU in one step. Raises ValueError if that is no integer."""
        count, rest = divmod(self.global_batch_size, self.micro_batch_size * gpus)
        if rest or not count:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} of shape {self.name} is no multiple of micro_batch_size "
                f"{self.micro_batch_size} x {gpus} GPUs: pass another global_batch_size=... or gpus=..."
            )
        return count


LLAMA_8B = Shape("D", 32, 4096, 14336, 32, 8, 128_256, 8192, 1, 16, rotary_base=500_000)

QWEN3_30B = Shape(
    "Qwen3-30B-A3B",
    48,
    2048,
    6144,
    32,
    4,
    151_936,
    4096,
    2,
    32,
    rotary_base=1_000_000,
    norm_epsilon=1e-6,
    head_size=128,
    qk_layernorm=1,
    num_moe_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
)

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("A", 24, 1024, 2816, 16, 16, 50_304, 1024, 4, 4),  # bound by the host's launches
        Shape("B", 24, 2048, 5504, 16, 16, 131_072, 4096, 4, 16),
        replace(LLAMA_8B, name="C", num_layers=16),  # Llama-3-8B's layers, as many as one GPU of 141 GB trains
        LLAMA_8B,
        replace(LLAMA_8B, name="D4096", sequence_length=4096),
        replace(QWEN3_30B, name="E", num_layers=8),  # as many as one GPU of 141 GB trains
        Shape("tiny", 2, 64, 128, 4, 2, 256, 32, 1, 2),  # for a CPU
        replace(
            Shape("tinyE", 2, 64, 128, 4, 2, 256, 32, 1, 2),
            head_size=32,
            qk_layernorm=1,
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=48,
        ),
    )
}


@dataclass(frozen=True)
class Run:
    """One measured run of `steps` optimizer steps.

    Times and losses are means over windows of `window` steps: the GPU is synchronised at their edges alone, which a
    shape of short steps (A) needs.
    """

    shape: Shape
    gpus: int = 1
    steps: int = 12
    window: int = 1
    options: dict[str, str] = field(default_factory=dict[str, str])  # a peer's own switches

    @property
    def words(self) -> list[str]:
        """The words that read_run reads back."""
        base = SHAPES[self.shape.name]
        changed = {f.name: getattr(self.shape, f.name) for f in fields(Shape)}
        changed = {name: value for name, value in changed.items() if value != getattr(base, name)}
        counts = {"gpus": self.gpus, "steps": self.steps, "window": self.window}
        return [base.name, *(f"{name}={value}" for name, value in (counts | changed | self.options).items())]


def read_run(words: list[str]) -> Run:
    """Read a shape's name and `name=value` words: fields of Run and of Shape (integers), any other a peer's own switch.

    Raises:
        ValueError: the first word names no shape.
    """
    if not words or words[0] not in SHAPES:
        raise ValueError(f"the first word is {words[:1]}, not a shape: one of {', '.join(SHAPES)}")
    given = dict(word.split("=", 1) for word in words[1:])
    counts = {name: int(given.pop(name)) for name in ("gpus", "steps", "window") if name in given}
    changed = {f.name: int(given.pop(f.name)) for f in fields(Shape) if f.name in given}
    return Run(replace(SHAPES[words[0]], **changed), **counts, options=given)
