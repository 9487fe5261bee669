"""Which rows of Hugging Face's tensors make up which of mcore's: `architectures` spelt out for one model.

Both sides hold the same rows, of the same length; only their order and the tensors they lie in differ.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from minloop.checkpoint.hf import architectures as table
from minloop.checkpoint.hf.architectures import Rule
from minloop.checkpoint.hf.config import HFModel
from minloop.checkpoint.parts import Part


class Rows(NamedTuple):
    """Some rows of one of Hugging Face's tensors, from `start` up to, not including, `stop`."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """What one of mcore's full tensors is made of.

    Attributes:
        rows: Hugging Face's, in mcore's order.
        shapes: of the tensors they come from.
        padded: whether more rows may follow, of zeros: a vocabulary that is padded.
    """

    rows: tuple[Rows, ...]
    shapes: dict[str, tuple[int, ...]]
    padded: bool = False

    def shape(self) -> tuple[int, ...]:
        """mcore's shape, without padding."""
        columns = next(iter(self.shapes.values()))[1:]
        return (sum(piece.stop - piece.start for piece in self.rows), *columns)

    def pieces(self, place: tuple[slice, ...]) -> Iterator[tuple[str, tuple[slice, ...], slice]]:
        """What a block of mcore's tensor holds of each of theirs: (their name, block of it, rows of our block)."""
        (mine, *columns), offset = place, 0
        for tensor, start, stop in self.rows:
            first, last = max(mine.start, offset), min(mine.stop, offset + stop - start)
            if first < last:
                shift = start - offset
                theirs = slice(first + shift, last + shift)
                yield tensor, (theirs, *columns), slice(first - mine.start, last - mine.start)
            offset += stop - start


def layouts(model: HFModel) -> dict[str, Layout]:
    """The layout of every full tensor of a model by `own_name`, in the order of the layers."""
    sizes = _sizes(model)
    groups = model.fields["num_query_groups"]
    found = {table.EMBEDDING.own: _layout(table.EMBEDDING, sizes, groups, "", padded=True)}
    for layer in range(model.fields["num_layers"]):
        for rule in _layer_rules(model, layer):
            own, theirs = f"decoder.layers.{layer}.{rule.own}", f"model.layers.{layer}."
            if "{expert}" not in next(iter(rule.theirs)):
                found[own] = _layout(rule, sizes, groups, theirs)
                continue
            for expert in range(sizes["e"]):
                found[f"{own}[{expert}]"] = _layout(rule, sizes, groups, theirs, expert)
    found[table.FINAL_NORM.own] = _layout(table.FINAL_NORM, sizes, groups, "")
    if not model.options["share_embeddings_and_output_weights"]:
        found[table.OUTPUT.own] = _layout(table.OUTPUT, sizes, groups, "", padded=True)
    return found


def own_name(part: Part) -> str:
    """The name in `layouts` of the full tensor that a part belongs to."""
    numbers = list(part.numbers)
    name = part.key
    if in_layer := re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(\D.*)", name):
        layer = in_layer[1] or numbers.pop(0)  # layers that are not alike are not stacked
        name = f"decoder.layers.{layer}.{table.OTHER_NAMES.get(in_layer[2], in_layer[2])}"
    return name + "".join(f"[{number}]" for number in numbers)


def _sizes(model: HFModel) -> dict[str, int]:
    """What the letters in the rules stand for."""
    fields = model.fields
    return {
        "v": model.options["vocab_size"],
        "h": fields["hidden_size"],
        "d": fields["kv_channels"],
        "q": fields["kv_channels"] * fields["num_attention_heads"],
        "k": fields["kv_channels"] * fields["num_query_groups"],
        "f": fields["ffn_hidden_size"],
        "e": fields.get("num_moe_experts") or 0,
        "m": fields.get("moe_ffn_hidden_size") or 0,
    }


def _layer_rules(model: HFModel, layer: int) -> list[Rule]:
    fields = model.fields
    rules = [*table.LAYER]
    if fields.get("qk_layernorm"):
        rules += table.QK_NORM
    if fields["add_bias_linear"] or fields.get("add_qkv_bias"):
        rules += table.QKV_BIAS
    if fields["add_bias_linear"]:
        rules += table.OTHER_BIASES
    with_experts: Any = fields.get("moe_layer_freq", 0)  # 1 for all layers, or one number for each
    has_experts = with_experts[layer] if isinstance(with_experts, list) else with_experts
    return rules + [*(model.architecture.experts if has_experts else table.MLP)]


def _layout(
    rule: Rule, sizes: dict[str, int], groups: int, prefix: str, expert: int = 0, *, padded: bool = False
) -> Layout:
    shapes = {
        prefix + name.format(expert=expert): tuple(sizes[letter] for letter in shape.split())
        for name, shape in rule.theirs.items()
    }
    cuts = groups if rule.by_query_group else 1
    rows = (
        Rows(name, shape[0] // cuts * cut, shape[0] // cuts * (cut + 1))
        for cut in range(cuts)
        for name, shape in shapes.items()
    )
    return Layout(tuple(rows), shapes, padded)
