"""Picture of a sweep as SVG: steps per second, and the share of the time in which trainer and engines wait."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from actors.simulate.sweep import Axis, Point

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 30, 50
"""Margins of a panel, in pixels."""
COLOURS = ("#2563a8", "#c2571a", "#2e8b57", "#8a3fa0", "#a03f55", "#5b6470", "#b8860b", "#1d8a99")
PAPER, INK, GRID = "#ffffff", "#1c2430", "#d9dee5"
Lines = dict[str, list[float]]
"""Values of each line, in the order of the first axis."""


def picture(axes: Sequence[Axis], found: Sequence[Point]) -> str:
    """Return the picture: two panels over the values of the first axis, a line per value of the second."""
    series = axes[1].values if len(axes) > 1 else ("",)
    rates, waits = Lines(), Lines()
    for value in series:
        results = [point.result for point in found if point.values[1:] == ((value,) if value else ())]
        name = f"{axes[1].key} {value}" if value else ""
        rates[name or "steps per second"] = [result.steps_per_second for result in results]
        waits[f"trainer waits {name}".strip()] = [100 * result.trainer_idle for result in results]
        waits[f"engines idle {name}".strip()] = [100 * result.engine_idle for result in results]
    height = 2 * HEIGHT
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        *_panel("steps per second", axes[0], rates, 0, None),
        *_panel("% of the time", axes[0], waits, HEIGHT, 100.0),
        "</svg>",
        "",
    ])  # fmt: skip


def _panel(title: str, axis: Axis, lines: Lines, y: int, top: float | None) -> list[str]:
    """Return a panel whose upper edge is at `y`; `top` is the largest value of the scale, None: by the values."""
    highest = top or 1.05 * max(max(values) for values in lines.values()) or 1.0
    left, right, upper, lower = LEFT, WIDTH - RIGHT, y + TOP, y + HEIGHT - BOTTOM

    def place(number: int, value: float) -> tuple[float, float]:
        across = number / (len(axis.values) - 1) if len(axis.values) > 1 else 0.5
        return left + 20 + across * (right - left - 40), lower - value / highest * (lower - upper)

    shapes = [f'<text x="{left}" y="{y + 18}" font-weight="bold">{escape(title)}</text>']
    for tick in range(5):
        value = highest * tick / 4
        height = place(0, value)[1]
        shapes.append(f'<path d="M{left} {height:.1f}H{right}" stroke="{GRID}"/>')
        shapes.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for number, text in enumerate(axis.values):
        across = place(number, 0.0)[0]
        shapes.append(f'<text x="{across:.1f}" y="{lower + 16}" text-anchor="middle">{escape(text)}</text>')
    shapes.append(f'<text x="{right}" y="{lower + 34}" text-anchor="end">{escape(axis.key)}</text>')
    for number, (name, values) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(i, value) for i, value in enumerate(values)]
        path = "L".join(f"{x:.1f} {height:.1f}" for x, height in places)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{height:.1f}" r="3" fill="{colour}"/>' for x, height in places]
        shapes.append(f'<text x="{left + 150 * (number % 4)}" y="{lower + 34}" fill="{colour}">{escape(name)}</text>')
    return shapes
