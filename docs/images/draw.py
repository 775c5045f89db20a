"""Draw the pictures of docs/reference/screens.md: `python docs/images/draw.py`.

Each NAME.json beside this file is the progress.json of a real run of the quickstart, copied while it ran; NAME.svg is
what the command prints of it. Nothing here is needed to run anything.
"""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from actors.ops.screens.render import MARGIN, View, render

HERE = Path(__file__).parent
COMMANDS = {
    "up": "actors up run.yaml",
    "top": "actors top outputs/quickstart",
    "status": "actors status outputs/quickstart; echo $?",
}
COLUMNS, FONT, WIDTH, HEIGHT = 100, 13, 7.83, 18
"""Of a character, in pixels; monospaced fonts are 0.6 times as wide as high, and this one is told its width."""
PAPER, INK, SOFT, BAD = "#10151c", "#d7dde5", "#7fb2ff", "#ff8f7a"


def screen(name: str) -> list[str]:
    """What the terminal shows."""
    view = View("quickstart", "outputs/quickstart", json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")))
    lines = render(view, COLUMNS)
    if name == "status":
        lines = ["healthy" if view.is_healthy else "not healthy", *lines, "0" if view.is_healthy else "1"]
    return [f"$ {COMMANDS[name]}", *lines]


def svg(lines: list[str]) -> str:
    """The lines as text of a fixed pitch: headings in a colour of their own, trouble in another."""
    width, height = round(COLUMNS * WIDTH) + 2 * FONT, HEIGHT * (len(lines) + 1)
    rows = [_row(line, HEIGHT * (i + 1) + 2) for i, line in enumerate(lines) if line]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
        f'<g font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{FONT}" fill="{INK}">',
        *rows,
        "</g>",
        "</svg>",
        "",
    ])  # fmt: skip


def _row(line: str, y: int) -> str:
    head, rest = line[:MARGIN], line[MARGIN:]
    colour = BAD if head.startswith(("trouble", "not health")) else SOFT
    text = f'<tspan fill="{colour}">{escape(head)}</tspan>{escape(rest)}'
    return f'<text x="{FONT}" y="{y}" xml:space="preserve" textLength="{len(line) * WIDTH:.0f}">{text}</text>'


if __name__ == "__main__":
    for name in COMMANDS:
        (HERE / f"{name}.svg").write_text(svg(screen(name)), encoding="utf-8")
        print(HERE / f"{name}.svg", file=sys.stderr)
