"""Models of which a part is trained, on some ranks nothing: they are saved, resumed bit for bit, and resharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sameness_cases import MOE
from small import rounding, small_state, text_loader, train

import minloop
from minloop.checkpoint.optimizer_steps import steps_taken

EXPERTS: dict[str, Any] = MOE | {"num_layers": 4, "moe_layer_freq": [0, 0, 1, 1]}
PP2 = {"pipeline_model_parallel_size": 2}
KINDS: dict[str, dict[str, Any]] = {"ZeRO-1": {"use_distributed_optimizer": True}, "DDP": {}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "the head, the last stage's": ("output_layer", {"num_layers": 2} | PP2),
    "the embedding, the first stage's": ("embedding", {"num_layers": 2} | PP2),
    "experts, the last stage's": (".experts.", EXPERTS | PP2),
    "experts alone": (".experts.", EXPERTS | {"expert_model_parallel_size": 2}),
}


class TrainOnly:
    def __init__(self, part: str) -> None:
        self.part = part

    def __call__(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.part in name)


def partly_trained(part: str, fields: dict[str, Any], kind: str, seed: int) -> minloop.TrainState:
    gpt = fields.get("gpt", {}) | {"before_wrapping": TrainOnly(part)}
    return small_state(seed=seed, ddp=KINDS[kind], **(fields | {"gpt": gpt}))


def resumed(directory: str, part: str, fields: dict[str, Any], kind: str) -> tuple[Any, Any, float]:
    """Steps of an uninterrupted run and of a resumed one, and how many the resumed one's optimizer had taken."""
    state = partly_trained(part, fields, kind, seed=1)
    loader = text_loader(state)
    train(state, loader, 3)
    minloop.save_checkpoint(directory, state, loader)
    straight = train(state, loader, 3)
    minloop.shutdown_distributed()
    history, steps = loaded(directory, part, fields, kind)
    return straight, history, steps


def loaded(directory: str, part: str, fields: dict[str, Any], kind: str) -> tuple[Any, float]:
    state = partly_trained(part, fields, kind, seed=2)
    loader = text_loader(state)
    minloop.load_checkpoint(directory, state, loader)
    steps = steps_taken(state)
    history = train(state, loader, 3)
    minloop.shutdown_distributed()
    return history, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_what_ranks_train_nothing_of_goes_on_where_it_was(tmp_path: Path, case: str, kind: str) -> None:
    part, fields = CASES[case]
    ranks = run_ranks(2, resumed, str(tmp_path), part, fields, kind)
    for straight, history, steps in ranks:
        assert steps == 3
        assert history == straight
    whole = {name: value for name, value in fields.items() if not name.endswith("_model_parallel_size")}
    ((history, steps),) = run_ranks(1, loaded, str(tmp_path), part, whole, kind)
    assert steps == 3
    torch.testing.assert_close(torch.tensor(history), torch.tensor(ranks[0][0]), rtol=rounding(1e-5), atol=0)
