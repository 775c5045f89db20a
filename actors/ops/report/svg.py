"""Curves as SVG inside of an HTML page: no script, no other file, colours that the page sets."""

from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT = 520, 170
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 26, 26
"""Margins around the curve, in pixels."""
TICKS = 4
POINTS = 400
"""Most points of a curve; more would not be seen."""


def curve(title: str, values: Mapping[int, float], *, dots: bool = False) -> str:
    """Return a picture of values over steps; a text in its place if there are none.

    Args:
        title: heading of the picture.
        values: value by step.
        dots: True to mark each value, for few of them.
    """
    if not values:
        return f"<figure><figcaption>{escape(title)}: no values</figcaption></figure>"
    points = thinned(values)
    steps, heights = list(points), list(points.values())
    low, high = min(heights), max(heights)
    # a constant is drawn in the middle
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def place(step: int, value: float) -> tuple[float, float]:
        across = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    shapes = [f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>']
    for tick in range(TICKS + 1):
        value = low + (high - low) * tick / TICKS
        y = place(first, value)[1]
        shapes.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{steps[0]}</text>')
    shapes.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step {steps[-1]}</text>')
    places = [place(step, value) for step, value in points.items()]
    shapes.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}" class="curve"/>')
    if dots or len(places) == 1:
        marked = zip(places, points.items(), strict=True)
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{step}: {value:.4g}</title></circle>'
            for (x, y), (step, value) in marked
        ]
    label = escape(f"{title}, from {heights[0]:.3g} to {heights[-1]:.3g}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def thinned(values: Mapping[int, float]) -> dict[int, float]:
    """Return at most POINTS points: means of neighbours, each at the last step of its neighbours."""
    steps = sorted(values)
    each = max(1, -(-len(steps) // POINTS))
    groups = [steps[i : i + each] for i in range(0, len(steps), each)]
    return {group[-1]: sum(values[step] for step in group) / len(group) for group in groups}
