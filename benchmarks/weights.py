"""The initial weights that every peer starts from: one rule by name, and each peer's own names for them.

A matrix is drawn from normal(0, 0.02) with a generator seeded by its name, on the device where it is wanted (the draws
of one kind of GPU are alike), and rounded to bfloat16, so that fp32 masters made from bf16 parameters equal those of
fp32 parameters. Norm weights are ones. The names are Hugging Face's for Llama:
`model.layers.3.self_attn.q_proj.weight`.
"""

import re
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.shapes import Shape
from minloop import TrainState

STD = 0.02


def draw(name: str, shape: Shape, device: torch.device) -> Tensor:
    """Return the initial value of Llama's parameter `name`: float32 [out, in] or [hidden_size]."""
    h, kv = shape.hidden_size, shape.num_query_groups * shape.kv_channels
    q = shape.num_attention_heads * shape.kv_channels
    sizes = {
        "embed_tokens": (shape.vocab_size, h),
        "lm_head": (shape.vocab_size, h),
        "q_proj": (q, h),
        "k_proj": (kv, h),
    }
    sizes |= {"v_proj": (kv, h), "o_proj": (h, q)}
    ffn = shape.moe_ffn_hidden_size if ".experts." in name else shape.ffn_hidden_size
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (ffn, h))
    sizes |= {"down_proj": (h, ffn), "gate": (shape.num_moe_experts, h)}
    kind = name.split(".")[-2]
    if kind in ("q_norm", "k_norm"):
        return torch.ones(shape.kv_channels, device=device)
    if kind.endswith("norm"):
        return torch.ones(h, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    weight = torch.empty(sizes[kind], device=device).normal_(0, STD, generator=generator)
    return weight.bfloat16().float()


def round_otherwise(state: TrainState, seed: int) -> None:
    """Move about half of the bf16 weights to a neighbouring number; replicas move alike."""
    generator = torch.Generator(next(state.chunks[0].parameters()).device).manual_seed(seed)
    for chunk in state.chunks:
        for parameter in chunk.parameters():
            random = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.copy_(parameter.data.float() * (1 + (random - 0.5) * 2**-7))
    state.optimizer.reload_model_params()


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, Tensor]], value_of: Callable[[str, torch.device], Tensor]) -> None:
    """Set each parameter, sharded (DTensor) or whole, to `value_of(name, device)`.

    Raises:
        ValueError: a value has another shape than its parameter.
    """
    for name, parameter in parameters:
        value = value_of(name, parameter.device)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{name}: the initial value is {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            )
        if isinstance(parameter, DTensor):  # every rank draws the whole and keeps its part
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value.to(parameter.dtype))
        if hasattr(parameter, "get_high_precision_init_val"):  # of an FP8 parameter, for the optimizer to begin with
            vars(parameter)["_high_precision_init_val"] = value.cpu()


def llama(shape: Shape) -> Callable[[str, torch.device], Tensor]:
    """Values for modules named as Hugging Face names Llama's, compiled or not."""
    return lambda name, device: draw(name.replace("_orig_mod.", ""), shape, device)


def megatron_core(shape: Shape, first_expert: int = 0) -> Callable[[str, torch.device], Tensor]:
    """Values for megatron.core's GPTModel of one tensor and pipeline rank, Transformer Engine's layers or local ones.

    Of the experts, that rank has those from `first_expert` on. linear_qkv has, for each query group, the group's
    queries, then its key, then its value; linear_fc1 the gate, then the rest.
    """
    norms = {"linear_qkv.layer_norm": "input_layernorm", "linear_fc1.layer_norm": "post_attention_layernorm"}
    norms |= {"pre_mlp_layernorm.": "post_attention_layernorm", "input_layernorm.": "input_layernorm"}
    norms |= {"q_layernorm.": "self_attn.q_norm", "k_layernorm.": "self_attn.k_norm", "router.": "mlp.gate"}
    whole = {"linear_proj": "self_attn.o_proj", "linear_fc2": "mlp.down_proj"}
    outside = {"word_embeddings": "model.embed_tokens", "output_layer": "lm_head", "final_layernorm": "model.norm"}

    def value(name: str, device: torch.device) -> Tensor:
        def part(llama_name: str) -> Tensor:
            return draw(f"{llama_name}.weight", shape, device)

        found = re.search(r"\blayers\.(\d+)\.(.*)", name)
        if not found:
            return part(next(llama_name for own, llama_name in outside.items() if own in name))
        layer, rest = f"model.layers.{found[1]}", found[2]
        if "experts." in rest:  # experts.linear_fc1.weight7, or experts.local_experts.7.linear_fc1.weight
            number = re.search(r"local_experts\.(\d+)|weight(\d+)", rest)
            expert = f"{layer}.mlp.experts.{first_expert + int((number[1] or number[2]) if number else 0)}"
            if "linear_fc2" in rest:
                return part(f"{expert}.down_proj")
            return torch.cat([part(f"{expert}.gate_proj"), part(f"{expert}.up_proj")])
        for own, llama_name in (norms | whole).items():
            if own in rest:
                return part(f"{layer}.{llama_name}")
        if "linear_fc1" in rest:
            return torch.cat([part(f"{layer}.mlp.gate_proj"), part(f"{layer}.mlp.up_proj")])
        qkv = [part(f"{layer}.self_attn.{kind}_proj") for kind in "qkv"]
        return torch.cat([w.view(shape.num_query_groups, -1, shape.hidden_size) for w in qkv], dim=1).flatten(0, 1)

    return value


def torchtitan(shape: Shape) -> Callable[[str, torch.device], Tensor]:
    """Values for torchtitan's Llama 3, whose RoPE turns neighbouring pairs: other rows of queries and keys."""
    kinds = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj"}
    kinds |= {
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
    }
    kinds |= {
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    outside = {"tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm"}

    def value(name: str, device: torch.device) -> Tensor:
        module = re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.|\.weight$", "", name)
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        llama_name = f"model.layers.{layer[1]}.{kinds[layer[2]]}" if layer else outside[module]
        weight = draw(f"{llama_name}.weight", shape, device)
        if llama_name.endswith(("q_proj", "k_proj")):
            heads = weight.view(-1, 2, shape.kv_channels // 2, shape.hidden_size)
            weight = heads.transpose(1, 2).reshape(weight.shape)
        return weight

    return value
