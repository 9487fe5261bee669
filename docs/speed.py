"""Draws docs/speed.svg from benchmarks/results/summary.json: tokens per second beside each peer's of the same job.

python docs/speed.py
"""

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, LEFT, BAR, GAP = 720, 190, 20, 26
COLOURS = {"minloop": "#0969da"}
OTHER = "#8c959f"


def pairs(rows):
    """Each peer's row with the fastest of minloop's that it met: they have the same shape, layout, words and day."""
    for row in rows:
        if row["peer"] == "minloop" or not row["ratio_to_peer"]:
            continue
        rate = row["tokens_per_s_per_gpu"] * row["ratio_to_peer"]
        met = [
            other
            for other in rows
            if other["peer"] == "minloop" and abs(other["tokens_per_s_per_gpu"] / rate - 1) < 1e-3
        ]
        if met:
            yield met[0], row


def draw(rows):
    """Return the SVG: one group of two bars for each pair, as long as the rate over that of minloop."""
    best = {}
    for ours, theirs in pairs(rows):  # of several jobs the last
        best[ours["shape"], ours["gpus"], ours["precision"], theirs["peer"]] = ours, theirs
    parts, y = [], 16
    for (shape, gpus, precision, _), rows_of_pair in sorted(best.items()):
        fastest = max(row["tokens_per_s_per_gpu"] for row in rows_of_pair)
        label = f"{shape}, {precision}, {gpus} GPU{'s' if gpus > 1 else ''}"
        parts.append(f'<text x="8" y="{y + BAR + 6}" font-weight="bold">{escape(label)}</text>')
        for row in rows_of_pair:
            length = (WIDTH - LEFT - 190) * row["tokens_per_s_per_gpu"] / fastest
            colour = COLOURS.get(row["peer"], OTHER)
            text = f"{row['peer']}: {row['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 15}">{escape(text)}</text>')
            y += BAR + 2
        y += GAP - BAR
    box = f'viewBox="0 0 {WIDTH} {y + 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 6}" fill="white"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    summary = json.loads((HERE.parent / "benchmarks" / "results" / "summary.json").read_text())
    (HERE / "speed.svg").write_text(draw(summary))
