"""Draw docs/precision.svg from benchmarks/results/precision.json: one model's losses on real text in every precision.

PYTHONPATH=$PWD python -m torch.distributed.run --nproc-per-node 1 benchmarks/precision.py   # train, on one GPU
python docs/precision.py                                                                     # draw
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "precision.json"
COLOURS = ("#24292f", "#0969da", "#54aeff", "#bf3989", "#1a7f37", "#bc4c00", "#8250df")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 340, 50, 40, 16
LAST = 20  # iterations whose mean is printed


def frame(count, top):
    """Return the axes, and the functions that place an iteration and a loss on them."""
    right = WIDTH - 12

    def x(step):
        return LEFT + (right - LEFT) * step / count

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(loss, top) / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in range(top + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, count + 1, 50):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT - 40}" y="{TOP + 2}">loss</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">iteration</text>')
    return parts, x, y


def draw(cases):
    """Return the SVG: the curves over one another, thick to thin, so that each shows where they coincide."""
    curves = {name: case["losses"] for name, case in cases.items() if "losses" in case}
    parts, x, y = frame(max(map(len, curves.values())), 6)
    legend_left = WIDTH - 420
    for index, (name, curve) in enumerate(curves.items()):
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="{max(1.0, 6.0 - index):.1f}"'
        points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        legend = TOP + 20 + 18 * index
        mean = sum(curve[-LAST:]) / len(curve[-LAST:])
        text = f"{name.replace('_', ' ')}: {mean:.3f} over the last {LAST}, {cases[name]['median_ms']:.0f} ms a step"
        if cases[name]["skipped"]:
            text += f", {cases[name]['skipped']} skipped"
        parts.append(f'<path d="M{legend_left} {legend - 4}h24" {stroke}/>')
        parts.append(f'<text x="{legend_left + 32}" y="{legend}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "precision.svg").write_text(draw(json.loads(RESULTS.read_text())["cases"]))
