"""Does every layout train every architecture alike? Measures the matrix of tests/sameness_cases.py on CPU ranks.

    uv run python benchmarks/sameness.py                   all of it: docs/sameness.json, from which docs/sameness.md
    uv run python benchmarks/sameness.py PP2 TP2 llama     these layouts and architectures, printed only

Each cell trains for 20 steps in fp32 from the weights and on the global batches of one rank; docs/sameness.md says what
is compared. It takes two hours on two cores; stopped, it goes on where it was. Delete docs/sameness.json to begin anew.
"""

import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from minloop.messages import without_warnings

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

with without_warnings():  # of mcore, about packages that are not installed
    from matrix import Cell, Matrix  # the tests are no package
    from sameness_cases import ARCHITECTURES, EXPLAINED, LAYOUTS, RECIPE

JSON, MARKDOWN = ROOT / "docs" / "sameness.json", ROOT / "docs" / "sameness.md"
Record = dict[str, Any]


def measure(layouts: Sequence[str], architectures: Sequence[str], known: Sequence[Record] = ()) -> Iterator[Record]:
    """The record of each cell, row by row, of those that are not `known`."""
    have = {(record["layout"], record["architecture"]) for record in known}
    with tempfile.TemporaryDirectory() as directory:
        matrix = Matrix(directory, LAYOUTS, ARCHITECTURES, RECIPE, sgd=True)
        for layout in layouts:
            start, wanted = time.perf_counter(), [name for name in architectures if (layout, name) not in have]
            if not wanted:
                continue
            row = matrix.row(layout, wanted)
            print(f"{layout} ({time.perf_counter() - start:.0f} s)", flush=True)
            for architecture, cell in row.items():
                print(f"    {architecture:40} {describe(cell)}", flush=True)
                yield as_record(layout, architecture, cell)


def describe(cell: Cell) -> str:
    if cell.failed or cell.refused:
        return f"FAILED {cell.failed}" if cell.failed else f"refused: {cell.refused}"
    return (
        f"loss {cell.loss:.1e}, gradient norm {cell.grad_norm:.1e}, first gradient {cell.first_gradient:.1e}, "
        f"weights after SGD {cell.sgd_weights:.1e}, after Adam {cell.adam_weights:.1e} {cell.first_difference}"
    )


def as_record(layout: str, architecture: str, cell: Cell) -> Record:
    numbers = None if cell.refused or cell.failed else cell
    return {
        "layout": layout,
        "architecture": architecture,
        "ranks": LAYOUTS[layout][0],
        "worst_relative": numbers and cell.worst_relative,
        "refused": cell.refused or None,
        "failed": cell.failed or None,
        **{name: numbers and value for name, value in asdict(cell).items() if isinstance(value, float)},
    }


def main(names: Sequence[str]) -> bool:
    """Measure and write; returns whether no cell failed."""
    known = {name.casefold(): name for name in (*LAYOUTS, *ARCHITECTURES)}
    if unknown := [name for name in names if name.casefold() not in known]:
        sys.exit(f"neither a layout nor an architecture of tests/sameness_cases.py: {', '.join(unknown)}")
    if not names and torch.cuda.is_available():
        sys.exit(f"{JSON.name} is of CPU ranks, and here ranks have GPUs: hide them (CUDA_VISIBLE_DEVICES=)")
    wanted = {known[name.casefold()] for name in names}
    layouts = [name for name in LAYOUTS if name in wanted] or [*LAYOUTS]
    architectures = [name for name in ARCHITECTURES if name in wanted] or [*ARCHITECTURES]
    if names:
        return not any(record["failed"] for record in measure(layouts, architectures))
    records: list[Record] = json.loads(JSON.read_text()) if JSON.exists() else []
    for record in measure(layouts, architectures, known=records):
        records.append(record)
        write(records)
    write(records)
    return not any(record["failed"] for record in records)


def write(records: list[Record]) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    JSON.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    MARKDOWN.write_text(document(records))


MARKS = (
    "[1] and so on are refusals, quoted below the first table.",
    "\\* marks a difference that is not rounding, explained below the first table.",
)

TEXT = """# Every layout trains the same model

Change the layout, get the same training: here is how far that holds, for each architecture (columns) in each layout
(rows). The cases, with every field of their configs, are in `tests/sameness_cases.py`, the figures also in
`docs/sameness.json`. A layout is named by its parallel sizes: DP data, TP tensor, PP pipeline, VPP virtual pipeline, CP
context, EP expert and ETP expert tensor parallel. TP2+SP is tensor parallel with sequence parallelism, TP2 without it.
An architecture is a small model of its kind: "GPT-2" has learned positions, LayerNorm, GELU and biases.

`uv run python benchmarks/sameness.py` goes on with the cells that the JSON file lacks: delete it to measure all of them
anew, two hours on two cores. `uv run python benchmarks/sameness.py TP2 Llama` measures one cell and writes nothing.
In the tests TP2+SP and PP2 VPP2 are measured with every architecture, the other layouts with one or two.

Every cell starts from the weights that one rank initialised, read from its checkpoint, and trains on the same global
batches of real text (bytes of Python source, 8 samples of 32 tokens, each with another number of tokens that count), in
fp32 on the CPU. (The seed alone gives other weights in another layout: start from one checkpoint to compare.) The
weights begin with a standard deviation of 0.1 and Adam has an ε of 1e-5: with small weights or the usual ε some of
these models enlarge rounding so much that one rank differs from itself, with another micro batch size, by up to 1e-2.
Compared with the run on one rank are:

- the loss and the gradient norm of each of 20 Adam steps, relative: the first table shows the worse of the two;
- every element of the first gradient, gathered to its full shape, over the largest element of its tensor;
- every weight after 20 steps of plain SGD, likewise. mcore's distributed optimizer (ZeRO-1) has no SGD: there and in
  the reference Adam takes the same steps, with β₁ = 0 and an ε so large that its denominator is constant.

The weights after the Adam steps are in the JSON file (`adam_weights`), but not judged: Adam divides a gradient by its
own size, so that where a gradient is near zero its rounding noise becomes a step of full size.

The tests ask for 2e-6 in losses and gradient norms (with experts 1e-5), 5e-5 in the first gradient and 2e-5 in the
weights. The worst first gradients are those of the hybrid's A_log, a sum of large terms that nearly cancel.

That replicas of the model are equal bit for bit is checked in every cell (`minloop.check_replicas`).
{marks}

{machine}

## Loss and gradient norm over 20 Adam steps, worst relative difference from one rank

{main}

## The first gradient, and the weights after 20 SGD steps

Worst relative difference from one rank over all elements of all tensors.

{detail}
"""


def document(records: Sequence[Record]) -> str:
    refusals: dict[str, int] = {}

    def grid(value: Any) -> str:
        cells = {(record["layout"], record["architecture"]): record for record in records}
        names = [name for name in ARCHITECTURES if any(record["architecture"] == name for record in records)]
        lines = ["| layout | ranks | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
        for layout in (name for name in LAYOUTS if any(record["layout"] == name for record in records)):
            shown = [show(cells.get((layout, name)), value) for name in names]
            lines.append(f"| {layout} | {LAYOUTS[layout][0]} | " + " | ".join(shown) + " |")
        return "\n".join(lines)

    def show(record: Record | None, value: Any) -> str:
        if record is None:
            return "not measured"
        if said := record["refused"] or record["failed"]:
            return f"[{refusals.setdefault(said, len(refusals) + 1)}]"
        return value(record) + ("\\*" if (record["layout"], record["architecture"]) in EXPLAINED else "")

    main_grid = grid(lambda record: f"{record['worst_relative']:.1e}")
    detail = grid(lambda record: f"{record['first_gradient']:.0e}, {record['sgd_weights']:.0e}")
    reasons = dict.fromkeys(f"{architecture}: {reason}" for (_, architecture), (_, reason) in EXPLAINED.items())
    notes = [f"{index}. {text}" for text, index in refusals.items()], [f"\\* {reason}." for reason in reasons]
    return TEXT.format(
        machine=(
            f"torch {version('torch')}, megatron-core {version('megatron-core')}, Python {platform.python_version()}, "
            f"{platform.machine()}, gloo, one thread per rank."
        ),
        marks="\n".join(mark for mark, note in zip(MARKS, notes, strict=True) if note),
        main="\n\n".join([main_grid, *("\n".join(note) for note in notes if note)]),
        detail=detail,
    )


if __name__ == "__main__":
    if not main(sys.argv[1:]):
        sys.exit("some cells failed")
