"""Draw docs/precision.svg from benchmarks/results/precision.json: one model's losses on real text in every precision.

PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 benchmarks/precision.py   # train, on one GPU
python docs/precision.py                                                                     # draw
"""

import json
from pathlib import Path

from axes import TOP, WIDTH, frame

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "precision.json"
COLOURS = ("#24292f", "#57606a", "#8c959f", "#0969da", "#54aeff", "#bf3989", "#1a7f37", "#bc4c00", "#8250df", "#9a6700")
COLOURS += ("#1b7c83", "#cf222e")
LAST = 20  # iterations whose mean is printed


def draw(cases):
    """Return the SVG: the curves over one another, thick to thin, so that each shows where they coincide."""
    curves = {name: case["losses"] for name, case in cases.items() if "losses" in case}
    parts, x, y = frame(max(map(len, curves.values())), 6, height=340)
    legend_left = WIDTH - 420
    for index, (name, curve) in enumerate(curves.items()):
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="{max(1.0, 6.0 - index):.1f}"'
        points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        legend = TOP + 20 + 18 * index
        mean = sum(curve[-LAST:]) / len(curve[-LAST:])
        text = f"{name.replace('_', ' ')}: {mean:.3f} over the last {LAST}"
        if cases[name]["skipped"]:
            text += f", {cases[name]['skipped']} skipped"
        parts.append(f'<path d="M{legend_left} {legend - 4}h24" {stroke}/>')
        parts.append(f'<text x="{legend_left + 32}" y="{legend}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "precision.svg").write_text(draw(json.loads(RESULTS.read_text())["cases"]))
