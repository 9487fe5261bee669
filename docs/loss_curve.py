"""Draw docs/loss_curve.svg: one model, trained on real text in three layouts from one checkpoint.

torchrun --nproc-per-node 2 docs/loss_curve.py        # train (about three minutes on two CPU cores), then draw
python docs/loss_curve.py                             # draw again from docs/loss_curve.json
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
TRAIN_ITERS = 300
LAYOUTS = {
    "tensor parallel 2": {"tensor_model_parallel_size": 2},
    "pipeline parallel 2": {"pipeline_model_parallel_size": 2},
    "data parallel 2, sharded optimizer": {"tensor_model_parallel_size": 1},
}
COLOURS = ("#0969da", "#bf3989", "#1a7f37")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 300, 50, 40, 16


def train():
    """Train in each layout from the first one's initial weights; write the losses (nats per byte) on one rank."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import train_text

    import minloop

    losses, first_rank = {}, False
    for name, layout in LAYOUTS.items():
        state = train_text.build_state(TRAIN_ITERS, **layout)
        data, _ = train_text.build_text(num_files=200)
        if losses:
            minloop.load_checkpoint("checkpoints/loss_curve", state)
        else:
            minloop.save_checkpoint("checkpoints/loss_curve", state)
        loader = minloop.build_loader(data, state.groups, micro_batch_size=train_text.MICRO_BATCH_SIZE)
        count = minloop.num_microbatches(train_text.GLOBAL_BATCH_SIZE, train_text.MICRO_BATCH_SIZE, state.groups)
        steps = [minloop.train_step(state, loader, num_microbatches=count) for _ in range(TRAIN_ITERS)]
        losses[name] = [step.loss.item() for step in steps]
        first_rank = minloop.is_first_rank(state.groups)
        minloop.shutdown_distributed()
    if first_rank:
        (HERE / "loss_curve.json").write_text(json.dumps(losses) + "\n")
    return first_rank


def draw(losses):
    """Return the SVG: the curves over one another, thick to thin, so that each shows where they coincide."""
    count, top = len(next(iter(losses.values()))), 6.0
    right = WIDTH - 12

    def x(step):
        return LEFT + (right - LEFT) * step / count

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in range(0, 7, 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, count + 1, 50):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT - 40}" y="{TOP + 2}">loss</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">iteration</text>')
    for index, (name, curve) in enumerate(losses.items()):
        stroke = f'stroke="{COLOURS[index]}" stroke-width="{5 - 2 * index}"'
        points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        legend = TOP + 20 + 18 * index
        parts.append(f'<path d="M{WIDTH - 280} {legend - 4}h24" {stroke}/>')
        parts.append(f'<text x="{WIDTH - 248}" y="{legend}">{name}</text>')
    first, *others = losses.values()

    def apart(steps):
        return max(abs(a - b) for other in others for a, b in zip(first[:steps], other[:steps], strict=True))

    for line, text in enumerate(
        (f"apart by {apart(20):.0e} in 20 iterations;", f"rounding grows to {apart(count):.0e}")
    ):
        parts.append(f'<text x="{WIDTH - 280}" y="{TOP + 20 + 18 * (len(losses) + line)}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if "RANK" not in os.environ or train():
        (HERE / "loss_curve.svg").write_text(draw(json.loads((HERE / "loss_curve.json").read_text())))
