"""Draw the curves of the pages: `python docs/images/curves.py`.

Each NAME.curves.json beside this file has values of each step of a real run, copied from its metrics.jsonl by
`python docs/images/curves.py NAME METRICS_FILE`; NAME.svg is drawn from it. Nothing here is needed to run anything.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
PAPER, INK, FRAME, COLOURS = "#ffffff", "#333333", "#cccccc", ("#1f77b4", "#d95f02", "#2a9d50")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 380, 200, 52, 30, 14, 30
"""Size of a panel and of the margins around its axes, in pixels."""
WINDOW = 10
"""Steps of a running mean."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `values` are names in metrics.jsonl."""

    title: str
    values: tuple[str, ...]
    top: float | None = None
    """Upper end of the axis; None: the largest value."""


PICTURES = {
    "quickstart": [
        Panel("sampled reward", ("reward_mean",), 1.0),
        Panel("entropy, nats per token", ("entropy",)),
        Panel("lag of the oldest group, versions", ("lag_max",), 2.0),
    ],
    "find_number": [
        Panel("sampled success", ("reward_mean",), 1.0),
        Panel("entropy, nats per token", ("entropy",)),
        Panel("lag of the oldest group, versions", ("lag_max",), 2.0),
    ],
    "calculator": [
        Panel("sampled success", ("reward_mean",), 1.0),
        Panel("entropy, nats per token", ("entropy",)),
        Panel("lag of the oldest group, versions", ("lag_max",), 2.0),
    ],
    "tutorial": [
        Panel("reward of the function repeats", ("reward/repeats",), 1.0),
        Panel("reward of the function length", ("reward/length",), 1.0),
    ],
    "training": [
        Panel("Reward", ("reward_mean",), 1.0),
        Panel("Entropy", ("entropy",)),
        Panel("Gradient norm", ("grad_norm",)),
        Panel("Mismatch KL", ("mismatch_kl",)),
        Panel("Completion tokens", ("completion_tokens_mean",)),
        Panel("Groups without variance", ("groups_without_variance",), 1.0),
    ],
}
"""Panels of each picture; `training` has the titles of panels of the dashboard GRPO training."""
SOURCES = {"training": "quickstart"}
"""Pictures that are drawn from the values of another one."""


def copy(name: str, metrics: Path) -> None:
    """Keep the values that the pictures of a run need, rounded to four digits."""
    pictures = [name, *(picture for picture, source in SOURCES.items() if source == name)]
    names = dict.fromkeys(value for picture in pictures for panel in PICTURES[picture] for value in panel.values)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    columns = {value: [float(f"{line[value]:.4g}") for line in lines] for value in ("step", *names)}
    rows = [f" {json.dumps(value)}: {json.dumps(numbers)}" for value, numbers in columns.items()]
    (HERE / f"{name}.curves.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def svg(name: str) -> str:
    """Return a picture: the panels in two columns, each value light, with a running mean in front of it."""
    data = json.loads((HERE / f"{SOURCES.get(name, name)}.curves.json").read_text(encoding="utf-8"))
    panels = PICTURES[name]
    columns = 3 if len(panels) % 3 == 0 else 2
    width, height = WIDTH * columns, HEIGHT * -(-len(panels) // columns)
    drawn = [
        f'<g transform="translate({WIDTH * (i % columns)} {HEIGHT * (i // columns)})">\n{_panel(panel, data)}\n</g>'
        for i, panel in enumerate(panels)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        f'<g font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        *drawn,
        "</g>",
        "</svg>",
        "",
    ])  # fmt: skip


def _panel(panel: Panel, data: dict[str, list[float]]) -> str:
    steps = data["step"]
    top = panel.top or max(max(data[value]) for value in panel.values) or 1.0
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def points(values: list[float]) -> str:
        places = (
            (LEFT + (right - LEFT) * step / steps[-1], bottom - (bottom - TOP) * min(value, top) / top)
            for step, value in zip(steps, values, strict=True)
        )
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    lines = [
        f'<text x="{LEFT}" y="{TOP - 10}" font-weight="bold">{escape(panel.title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" fill="none" stroke="{FRAME}"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 10}" text-anchor="end">{top:.3g}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">step {steps[0]:.0f}</text>',
        f'<text x="{right}" y="{HEIGHT - 10}" text-anchor="end">{steps[-1]:.0f}</text>',
    ]
    for colour, value in zip(COLOURS, panel.values, strict=False):
        for values, opacity in ((data[value], 0.35), (_smooth(data[value]), 1)):
            lines.append(
                f'<polyline points="{points(values)}" fill="none" stroke="{colour}" stroke-opacity="{opacity}"/>'
            )
    return "\n".join(lines)


def _smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and the WINDOW − 1 values before it."""
    windows = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]  # `sum` rounds otherwise since Python 3.12


if __name__ == "__main__":
    if sys.argv[1:]:
        copy(sys.argv[1], Path(sys.argv[2]))
    for picture in PICTURES:
        (HERE / f"{picture}.svg").write_text(svg(picture), encoding="utf-8")
        print(HERE / f"{picture}.svg", file=sys.stderr)
