"""The formula of attention, and what it is compared with: modules, inputs, masks and cases."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

import minloop
from minloop.layers import TorchDotProductAttention

S, B = 64, 2
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
NO_GROUPS = minloop.ProcessGroupCollection(tp=None, cp=None)


def build_attention(
    mask_type: AttnMaskType = AttnMaskType.causal,
    groups: minloop.ProcessGroupCollection = NO_GROUPS,
    layer_number: int = 1,
    arguments: dict[str, Any] | None = None,
    **fields: Any,
) -> TorchDotProductAttention:
    every: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "perform_initialization": False,
    }
    config = minloop.TransformerConfig(**(every | fields))
    return TorchDotProductAttention(config, layer_number, mask_type, "self", pg_collection=groups, **(arguments or {}))


def make_inputs(
    query_groups: int = 4,
    sq: int = S,
    key_size: int = 8,
    value_size: int = 8,
    place: tuple[Any, ...] = ("cpu", torch.float64),
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(5)
    shapes = (sq, B, 4, key_size), (S, B, query_groups, key_size), (S, B, query_groups, value_size)
    query, key, value = (torch.randn(x, generator=generator, dtype=torch.float64).to(*place[:2]) for x in shapes)
    return query, key, value


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float = 8**-0.5, sinks: Tensor | None = None
) -> Tensor:
    """The formula, all in fp64: [sq, b, np, hn] -> [sq, b, np * hv]."""
    key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
    scores = scale * torch.einsum("ibhd,jbhd->bhij", query.double(), key.double())
    weights = scores.masked_fill(~allowed.to(scores.device), -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp().view(-1, 1, 1)
    return torch.einsum("bhij,jbhd->ibhd", weights / total, value.double()).flatten(2)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of all inputs, for one arbitrary gradient of the output."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = function(*inputs)
    generator = torch.Generator().manual_seed(6)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10, name: str = "") -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape, name
        torch.testing.assert_close(
            one.double(), other.double(), rtol=tolerance, atol=tolerance, msg=lambda message: f"{name}: {message}"
        )


def window_mask(window: tuple[int, int], sq: int = S) -> Tensor:
    ahead = torch.arange(S) - torch.arange(S - sq, S)[:, None]
    return (ahead >= -window[0]) & (ahead <= window[1])


def random_mask() -> Tensor:
    """True where a query may not look, [b, 1, s, s]; each token may look at itself."""
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(B, 1, S, S, generator=generator) < 0.5) & ~torch.eye(S, dtype=torch.bool)


def packed(lengths: list[int], **fields: Any) -> PackedSeqParams:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    every: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": boundaries, "cu_seqlens_kv": boundaries}
    return PackedSeqParams(**(every | fields))


def packed_mask(lengths: list[int], window: tuple[int, int] | None = None) -> Tensor:
    """True where a query may look; tokens after the last sequence are one more."""
    lengths_of_all = [*lengths, S - sum(lengths)]
    sequence = torch.arange(len(lengths_of_all)).repeat_interleave(torch.tensor(lengths_of_all))
    return (sequence[:, None] == sequence) & (CAUSAL if window is None else window_mask(window))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor]] = {
    "MHA": ({}, {}, CAUSAL),
    "GQA": ({"num_query_groups": 2}, {"query_groups": 2}, CAUSAL),
    "one group": ({"num_query_groups": 1}, {"query_groups": 1}, CAUSAL),
    "MLA": (
        {"arguments": {"softmax_scale": 0.2, "k_channels": 24, "v_channels": 16}},
        {"key_size": 24, "value_size": 16},
        CAUSAL,
    ),
    "heads of odd sizes": (
        {"arguments": {"softmax_scale": 0.3}, "window_size": (3, 0)},
        {"key_size": 7, "value_size": 5},
        window_mask((3, 0)),
    ),
    "values larger than keys": ({"arguments": {"softmax_scale": 0.3}}, {"value_size": 12}, CAUSAL),
    "window": ({"window_size": (3, 0)}, {}, window_mask((3, 0))),
    "window of one": ({"window_size": (0, 0)}, {}, window_mask((0, 0))),
    "long window": ({"window_size": (21, 0)}, {}, window_mask((21, 0))),
    "window as long as the sequence": ({"window_size": (S, 0)}, {}, CAUSAL),
    "open window": ({"window_size": (-1, 0)}, {}, CAUSAL),
    "causal wins over the window": ({"window_size": (-1, -1)}, {}, CAUSAL),
    "GQA window": ({"window_size": (3, 0), "num_query_groups": 2}, {"query_groups": 2}, window_mask((3, 0))),
    "window both ways": (
        {"window_size": (3, 2), "mask_type": AttnMaskType.no_mask}, {}, window_mask((3, 2)),
    ),
    "long window both ways": (
        {"window_size": (21, 13), "mask_type": AttnMaskType.no_mask}, {}, window_mask((21, 13)),
    ),
    "window skips this layer": ({"window_size": (3, 0), "window_attn_skip_freq": 2, "layer_number": 2}, {}, CAUSAL),
    "no mask": ({"mask_type": AttnMaskType.no_mask}, {}, torch.ones(S, S, dtype=torch.bool)),
    "last of the keys": ({}, {"sq": 1}, torch.ones(1, S, dtype=torch.bool)),
    "end of the keys": ({}, {"sq": 5}, CAUSAL[-5:]),
    "window at the end of the keys": ({"window_size": (3, 0)}, {"sq": 5}, window_mask((3, 0), 5)),
    "layer scaling": ({"apply_query_key_layer_scaling": True, "layer_number": 3}, {}, CAUSAL),
}  # fmt: skip
