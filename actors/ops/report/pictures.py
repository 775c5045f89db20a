"""The curves of a report as PNG files, for slides and messages."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from actors.ops.compare.picture import MEAN_OF, running_mean
from actors.ops.report.curves import Curve
from actors.ops.report.svg import thinned
from actors.ops.screens.render import printable
from schemas.errors import ConfigError

INCHES, DPI = (7.0, 3.2), 120
"""Size of a picture: 840 × 384 pixels."""
LONGEST_TITLE = 90
"""Characters of a title that fit into a picture."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draw each curve into a file NAME.png of a folder, which is made if needed; return the paths.

    Values of steps are shown in grey with the mean of MEAN_OF steps, and values of evaluations each with a mark.

    Raises:
        ConfigError: a file can't be written.
        ImportError: matplotlib is not installed.
    """
    try:
        if curves:
            folder.mkdir(parents=True, exist_ok=True)
        return [_draw(curve, folder / f"{curve.name}.png") for curve in curves]
    except OSError as error:
        raise ConfigError(f"--pictures: {folder} can't be written: {error.strerror}") from error


def _draw(curve: Curve, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    if curve.is_evaluation:
        axes.plot(*zip(*sorted(curve.values.items()), strict=True), color="C0", marker="o", markersize=4)
    else:
        steps = thinned(curve.values)
        axes.plot(list(steps), list(steps.values()), color="0.75", linewidth=0.9, marker="." if len(steps) == 1 else "")
        if len(curve.values) >= MEAN_OF:
            axes.plot(*running_mean(curve.values), color="C0", label=f"mean of {MEAN_OF} steps")
            axes.legend(fontsize="small", frameon=False)
    # names of the user are no formulas, whatever dollars they have
    title = printable(curve.title)
    title = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 1]}…"
    axes.set_title(title, fontsize="medium", loc="left", parse_math=False)
    axes.set_xlabel("version" if curve.is_evaluation else "step")
    axes.grid(alpha=0.3)
    # written aside first: an open viewer of pictures never sees half a file
    staging = path.with_name(f".{path.name}")
    with warnings.catch_warnings():
        # a letter that the font lacks is drawn as a box
        warnings.filterwarnings("ignore", message="Glyph ")
        figure.savefig(staging, format="png", dpi=DPI)
    staging.replace(path)
    return path
