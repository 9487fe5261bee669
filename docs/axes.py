"""The axes of a picture of losses, which docs/loss_curve.py and docs/precision.py draw into."""

WIDTH, LEFT, BOTTOM, TOP = 720, 50, 40, 16


def frame(count, top, height):
    """Return the SVG's axes up to iteration `count` and loss `top`, and the functions that place those on them."""
    right = WIDTH - 12

    def x(step):
        return LEFT + (right - LEFT) * step / count

    def y(loss):
        return TOP + (height - TOP - BOTTOM) * (1 - min(loss, top) / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for loss in range(top + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, count + 1, 50):
        parts.append(f'<text x="{x(step):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT - 40}" y="{TOP + 2}">loss</text>')
    parts.append(f'<text x="{right}" y="{height - 6}" text-anchor="end">iteration</text>')
    return parts, x, y
