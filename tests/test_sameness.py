"""Every layout trains the same model: a part of the matrix that `benchmarks/sameness.py` measures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Cell, Matrix
from ranks import run_ranks
from sameness_cases import ARCHITECTURES, EXPLAINED, LAYOUTS, RECIPE, SP, Options, layout
from small import rounding, shared_state, text_loader, train

import minloop
from minloop.sameness.compare import relative_difference

DOCUMENTED = json.loads((Path(__file__).parent.parent / "docs" / "sameness.json").read_text())
REFUSALS = {(cell["layout"], cell["architecture"]): cell["refused"] or "" for cell in DOCUMENTED}
ARCHITECTURES_OF = {
    "TP2+SP": [*ARCHITECTURES],
    # what has layers, losses or embeddings that stages divide unevenly
    "PP2 VPP2": [
        *("GPT-2, tied", "Llama", "sliding window", "MTP 1, tied", "MTP 2", "heterogeneous", "hybrid"),
        *("MLA, q-LoRA, YaRN", "MoE, aux loss", "MoE, DeepSeek-like"),
    ],
}
DENSE, ROUTED, FIRST_GRADIENT, WEIGHTS = 2e-6, 1e-5, 5e-5, 2e-5
"""The gradient of a gated delta net's A_log is a small difference of large sums, known to 3e-5; others to 3e-6."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(str(tmp_path_factory.mktemp("references")), LAYOUTS, ARCHITECTURES, RECIPE, sgd=False, steps=5)


def architectures_for(layout: str) -> list[str]:
    if layout in ARCHITECTURES_OF:
        return ARCHITECTURES_OF[layout]
    return ["MoE, aux loss"] if "EP" in layout or "ETP" in layout else ["Llama"]


def complaints(layout: str, architecture: str, cell: Cell, scale: float = 1.0) -> list[str]:
    limit, _ = EXPLAINED.get((layout, architecture), (ROUTED if "MoE" in architecture else DENSE, ""))
    said = REFUSALS.get((layout, architecture), cell.refused)
    found = [cell.failed] if cell.failed else []
    if cell.refused != said:
        found.append(f"refused with {cell.refused!r}, but docs/sameness.json says {said!r}")
    for name, bound in (
        ("loss", limit),
        ("grad_norm", limit),
        ("first_gradient", max(limit, FIRST_GRADIENT)),
        ("sgd_weights", max(limit, WEIGHTS)),
    ):
        bound *= scale
        if not getattr(cell, name) <= bound:
            found.append(f"{name} differs by {getattr(cell, name):.1e}, more than {bound:.0e}; {cell.first_difference}")
    return [f"{architecture}: {complaint}" for complaint in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_the_same_models(matrix: Matrix, layout: str) -> None:
    cells = matrix.row(layout, architectures_for(layout))
    assert [line for name, cell in cells.items() for line in complaints(layout, name, cell, rounding(1.0))] == []


def test_the_documented_table_is_whole_and_within_its_bounds() -> None:
    layouts, cells = {record["layout"] for record in DOCUMENTED}, {*REFUSALS}
    assert layouts == {*LAYOUTS}
    assert cells == {(layout, architecture) for layout in layouts for architecture in ARCHITECTURES}
    found: list[str] = []
    for record in DOCUMENTED:
        numbers = {name: record[name] or 0.0 for name in ("loss", "grad_norm", "first_gradient", "sgd_weights")}
        cell = replace(Cell(refused=record["refused"] or "", failed=record["failed"] or ""), **numbers)
        assert record["ranks"] == LAYOUTS[record["layout"]][0]
        found += [f"{record['layout']}, {line}" for line in complaints(record["layout"], record["architecture"], cell)]
    assert found == []


def run_with_micro_batch(directory: str, micro_batch_size: int, first: bool) -> list[tuple[float, float]]:
    state = shared_state(directory, first, **RECIPE)
    history = train(state, text_loader(state, micro_batch_size), 5, micro_batch_size)
    minloop.shutdown_distributed()
    return history


def test_microbatches_do_not_matter(tmp_path: Path) -> None:
    histories: list[Any] = [run_ranks(1, run_with_micro_batch, str(tmp_path), size, size == 1)[0] for size in (1, 8)]
    for ours, theirs in zip(*histories, strict=True):
        assert ours == pytest.approx(theirs, rel=rounding(DENSE))


MUON: Options = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
"""Else it makes updates orthogonal in bf16, whose rounding enlarges that of other sums."""

MUON_LAYOUTS = [
    layout(2, optimizer=MUON),
    layout(2, tp=2, **SP, optimizer=MUON | {"muon_tp_mode": "duplicated"}),
    layout(2, tp=2, **SP, optimizer=MUON | {"muon_tp_mode": "distributed"}),
]


def run_muon(directory: str, cases: Sequence[Options], first: bool) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Losses and gradient norms of five steps in each case, and the weights after them."""
    results: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for options in cases:
        state = shared_state(directory, first, **(RECIPE | ARCHITECTURES["Llama"] | options))
        results.append((train(state, text_loader(state), 5), minloop.full_weights(state)))
        minloop.shutdown_distributed()
    return results


def test_muon_trains_the_same_model_in_every_layout(tmp_path: Path) -> None:
    ((history, weights),) = run_ranks(1, run_muon, str(tmp_path), [{"optimizer": MUON}], first=True)[0]
    for ours, found in run_ranks(2, run_muon, str(tmp_path), [options for _, options in MUON_LAYOUTS], first=False)[0]:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(history), rtol=rounding(DENSE), atol=0)
        assert all(relative_difference(found[name], weight) <= rounding(WEIGHTS) for name, weight in weights.items())
