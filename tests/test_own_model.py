"""A user's own `MegatronModule`, here a language model of MLPs, is trained and checkpointed in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from ranks import run_ranks
from small import SEQUENCE_LENGTH, VOCAB_SIZE, rounding, small_config, text_loader, train
from torch import Tensor

import minloop

STEPS, ENOUGH = 8, 20  # that layouts take, and after which one rank has learnt
TOLERANCE = rounding(2e-6)
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
}


class Block(MegatronModule):
    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(config)
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": tp_group}
        outer, inner = config.hidden_size, 2 * config.hidden_size
        self.fc1 = ColumnParallelLinear(outer, inner, gather_output=False, bias=True, **options)
        self.fc2 = RowParallelLinear(inner, outer, bias=True, input_is_parallel=True, skip_bias_add=False, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        inner: Any = self.fc1(hidden)
        outer: Any = self.fc2(torch.nn.functional.gelu(inner[0]))
        return hidden + outer[0]


class TokenMLP(MegatronModule):
    """Predicts the next token from the present one and its position."""

    vocab_size, max_sequence_length, position_embedding_type = VOCAB_SIZE, SEQUENCE_LENGTH, "none"

    def __init__(
        self, config: TransformerConfig, pre_process: bool, post_process: bool, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.pg_collection, self.input_tensor = groups, torch.empty(0)
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "tp_group": groups.tp}
        self.embedding = VocabParallelEmbedding(VOCAB_SIZE, config.hidden_size, **options) if pre_process else None
        count = config.num_layers // groups.pp.size()
        self.numbers = range(groups.pp.rank() * count, (groups.pp.rank() + 1) * count)
        for number in self.numbers:
            self.add_module(f"block{number}", Block(config, groups.tp))
        self.output = (
            ColumnParallelLinear(config.hidden_size, VOCAB_SIZE, gather_output=False, bias=False, **options)
            if post_process
            else None
        )

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens: Any, position_ids: Any, attention_mask: Any, labels: Any = None, **_: Any) -> Tensor:
        hidden = self.input_tensor if self.embedding is None else self.embedding(tokens).transpose(0, 1).contiguous()
        for number in self.numbers:
            hidden = self.get_submodule(f"block{number}")(hidden)
        if self.output is None:
            return hidden
        logits: Any = self.output(hidden)
        losses = vocab_parallel_cross_entropy(logits[0].float(), labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1)


def provide(
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
) -> TokenMLP:
    return TokenMLP(config, pre_process, post_process, pg_collection)


def build(fields: dict[str, Any]) -> minloop.TrainState:
    config = small_config(num_layers=2, **fields)
    ddp_config = minloop.build_ddp_config(config, use_distributed_optimizer=True)
    groups = minloop.init_distributed(config, seed=1)
    chunks = minloop.wrap_ddp(minloop.build_model(provide, config, groups), ddp_config, groups)
    optimizer_config = minloop.build_optimizer_config(config, ddp_config, lr=5e-3)
    optimizer = minloop.build_optimizer(chunks, optimizer_config, groups)
    return minloop.TrainState(chunks, optimizer, None, config, groups)


def train_on(source: str, target: str, fields: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    """Train on from the checkpoint in `source`, and leave one in `target`, where these are given."""
    state = build(fields)
    loader = text_loader(state)
    if source:
        minloop.load_checkpoint(source, state, loader)
    history = train(state, loader, steps)
    if target:
        minloop.save_checkpoint(target, state, loader)
    minloop.shutdown_distributed()
    return history


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of initial weights, and what one rank makes of it."""
    initial = str(tmp_path_factory.mktemp("initial"))
    run_ranks(1, train_on, "", initial, {}, 0)
    (history,) = run_ranks(1, train_on, initial, "", {}, ENOUGH)
    assert history[-1][0] < 0.75 * history[0][0]
    return initial, history[:STEPS]


@pytest.mark.parametrize(("first", "second"), [("DP2", "TP2"), ("TP2", "PP2"), ("PP2", "DP2")])
def test_a_run_goes_on_in_another_layout(reference: Any, first: str, second: str, tmp_path: Path) -> None:
    """Half the steps in one layout, half in another: together they are those of one rank."""
    initial, expected = reference
    history = run_ranks(2, train_on, initial, str(tmp_path), LAYOUTS[first], STEPS // 2)[0]
    history += run_ranks(2, train_on, str(tmp_path), "", LAYOUTS[second], STEPS // 2)[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(history, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
        assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
