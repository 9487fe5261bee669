"""A Llama and its loop in plain torch: torch.compile, cuDNN attention, fused AdamW. What one writes without a library.

    PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.peers.plain_torch C steps=12

Switch: `compile=model`, `layers`, `off`, or `graphs`: the whole model in CUDA graphs (mode "reduce-overhead"). By
default the whole model up to a hidden size of 1024, otherwise each layer.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.peers import loop
from benchmarks.peers.processes import OVERLAP_FREELY, Result, check_switches, torchrun
from benchmarks.shapes import Run, Shape, read_run


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.head = shape.kv_channels
        kv = shape.num_query_groups * self.head
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)


class Llama(nn.Module):
    """Llama with the parameter names of Hugging Face's."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        exponents = torch.arange(0, shape.kv_channels, 2, dtype=torch.float32) / shape.kv_channels
        angles = torch.outer(torch.arange(shape.sequence_length), shape.rotary_base**-exponents)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [b, s]; returns logits [b, s, vocab_size]."""
        x = self.model.embed_tokens(tokens).to(torch.bfloat16)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, in float32. x: [b, heads, s, head]; cos and sin: [s, head]."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def command(run: Run) -> tuple[list[str], dict[str, str | None]]:
    check_switches(run, "compile")
    return torchrun(run, "benchmarks.peers.plain_torch"), OVERLAP_FREELY


def parse(log: str, run: Run) -> Result:
    return Result.read(log)


def main() -> None:
    run = read_run(sys.argv[1:])
    device = loop.start(run)
    with device:
        model = Llama(run.shape)
    loop.prepare(run, model, model.model.layers)
    loop.train(run, device, model, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
