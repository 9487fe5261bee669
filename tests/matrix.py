"""The sameness matrix: what an architecture does in a layout, compared with what it does on one rank."""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import RankError, run_ranks
from sameness_cases import Options
from small import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, shared_state, text_loader, train

import minloop
from minloop.sameness.compare import relative_difference

STEPS = 20
SGD: Options = {"lr": 0.1, "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}}
LINEAR_ADAM: Options = {
    "lr": 100.0,
    "optimizer": {"adam_beta1": 0.0, "adam_eps": 1000.0, "weight_decay": 0.0},
}
"""The same steps by Adam, whose denominator is then nearly constant: mcore's distributed optimizer has no SGD."""


@dataclass
class Run:
    """What one layout did; tensors are on the first rank only.

    Attributes:
        losses, grad_norms: of all Adam steps.
        record: outputs and gradients of the first step.
        weights: full weights after all steps, by optimizer: "adam", "sgd" and, on one rank and with ZeRO-1, "linear".
    """

    losses: list[float]
    grad_norms: list[float]
    record: minloop.LayoutRecord
    weights: dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Cell:
    """How far a layout is from one rank, each the worst relative difference; or why that cannot be said.

    Attributes:
        loss, grad_norm: over all Adam steps.
        first_gradient: of any element, over its tensor's largest, before the first step.
        sgd_weights, adam_weights: likewise, of the weights after all steps. Adam makes full steps of rounding noise in
            gradients near zero, so that its weights are told, not judged.
        first_difference: the first thing in the order of computation that differs by more than 1e-5.
        refused: the error with which minloop or mcore refuses the combination.
        failed: anything else that went wrong.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    first_gradient: float = 0.0
    sgd_weights: float = 0.0
    adam_weights: float = 0.0
    first_difference: str = ""
    refused: str = ""
    failed: str = ""

    @property
    def worst_relative(self) -> float:
        return max(self.loss, self.grad_norm)


def run(directory: str, options: Options, *, sgd: bool, steps: int, first: bool = False) -> Run:
    """Train from the weights in `directory`, which the first run, on one rank, writes; with `sgd` also by SGD."""
    sharded = options.get("ddp", {}).get("use_distributed_optimizer", False)
    record = minloop.LayoutRecord()
    history: list[tuple[float, float]] = []
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, changes in {"adam": {}, "sgd": SGD, "linear": LINEAR_ADAM}.items():
        if name != "adam" and (not sgd or (not first and (name == "linear") != sharded)):
            continue
        state = shared_state(f"{directory}/{name}", first, **(options | changes))
        if name == "adam":
            count = minloop.num_microbatches(GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, state.groups)
            record = minloop.record_layout(state, text_loader(state), num_microbatches=count)
        loader = text_loader(state)
        trained = train(state, loader, 3)
        minloop.check_replicas(state)
        trained += train(state, loader, steps - 3)
        history = history or trained
        weights[name] = minloop.full_weights(state)
        minloop.shutdown_distributed()
    return Run([loss for loss, _ in history], [norm for _, norm in history], record, weights)


def run_reference(directory: str, architecture: Options, sgd: bool, steps: int) -> None:
    """Write initial weights and what one rank makes of them into `directory`."""
    torch.save(run(directory, architecture, sgd=sgd, steps=steps, first=True), f"{directory}/reference.pt")


def compare(directory: str, options: Options, sgd: bool, steps: int) -> Cell:
    """Run a layout and compare it with the reference; on ranks other than the first, a cell of zeros."""
    try:
        result = run(directory, options, sgd=sgd, steps=steps)
    except (ValueError, RuntimeError, AssertionError, NotImplementedError, TypeError, AttributeError) as error:
        minloop.shutdown_distributed()
        if isinstance(error, ValueError):
            return Cell(refused=str(error))
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Cell(failed=f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
    if os.environ["RANK"] != "0":
        return Cell()
    return compare_runs(torch.load(f"{directory}/reference.pt", weights_only=False), result)


def compare_row(cases: Sequence[tuple[str, Options]], sgd: bool, steps: int) -> list[Cell]:
    return [compare(directory, options, sgd, steps) for directory, options in cases]


def compare_runs(reference: Run, result: Run) -> Cell:
    differences = minloop.compare_records(reference.record, result.record)
    gradients = [d.relative for d in differences if d.what.startswith("gradient")]
    linear = "linear" if "linear" in result.weights else "sgd"
    return Cell(
        loss=_worst(result.losses, reference.losses),
        grad_norm=_worst(result.grad_norms, reference.grad_norms),
        first_gradient=max(gradients, default=torch.inf),
        sgd_weights=_worst_weight(result.weights[linear], reference.weights[linear])
        if linear in result.weights
        else 0.0,
        adam_weights=_worst_weight(result.weights["adam"], reference.weights["adam"]),
        first_difference=str(minloop.first_difference(differences, 1e-5) or ""),
    )


def _worst(values: Sequence[float], references: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(values, references, strict=True))


def _worst_weight(weights: dict[str, torch.Tensor], references: dict[str, torch.Tensor]) -> float:
    if weights.keys() != references.keys():
        return torch.inf
    return max(relative_difference(weights[name], value) for name, value in references.items())


class Matrix:
    """Measures cells. References are made when they are first needed, and kept in `directory`.

    Args:
        common: options of every cell, below those of architecture and layout.
        sgd: whether to train by SGD too.
        steps: by each optimizer.
    """

    def __init__(
        self,
        directory: str,
        layouts: Mapping[str, tuple[int, Options]],
        architectures: Mapping[str, Options],
        common: Options,
        *,
        sgd: bool,
        steps: int = STEPS,
    ) -> None:
        self._directory, self._layouts, self._architectures = Path(directory), layouts, architectures
        self._common, self._how = common, (sgd, steps)

    def row(self, layout: str, architectures: Sequence[str]) -> dict[str, Cell]:
        """The cells of one layout, measured in the same processes; on their own if that fails."""
        ranks, options = self._layouts[layout]
        cases = [(self._reference(name), self._options(name) | options) for name in architectures]
        try:
            results = run_ranks(ranks, compare_row, cases, *self._how, timeout=60 + 60 * len(cases))
        except RankError as error:
            if len(architectures) == 1:
                return {architectures[0]: Cell(failed=str(error).splitlines()[0])}
            return {name: self.row(layout, [name])[name] for name in architectures}
        return {name: _join(cells) for name, cells in zip(architectures, zip(*results, strict=True), strict=True)}

    def _options(self, architecture: str) -> Options:
        return self._common | self._architectures[architecture]

    def _reference(self, architecture: str) -> str:
        directory = self._directory / str(list(self._architectures).index(architecture))
        if not (directory / "reference.pt").exists():
            directory.mkdir(exist_ok=True)
            run_ranks(1, run_reference, str(directory), self._options(architecture), *self._how, timeout=300)
        return str(directory)


def _join(cells: Sequence[Cell]) -> Cell:
    """One cell of all ranks': the first rank's numbers, or what any rank has to say against them."""
    against: list[Any] = [cell for cell in cells if cell.failed] or [cell for cell in cells if cell.refused]
    return against[0] if against else cells[0]
