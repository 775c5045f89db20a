"""Picture of several runs: sampled reward by step, evaluations by version, and steps per second."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.ops.compare.figures import Figures
from actors.ops.compare.words import labels
from schemas.errors import ConfigError

MEAN_OF = 10
"""Steps of the running mean of rewards."""
POINTS = 500
"""Most points of a curve; more would not be seen."""


def draw(runs: Sequence[Figures], path: Path) -> None:
    """Draw the runs into a file, in the format of its ending: a panel for rewards, one per evaluation, one for speed.

    Raises:
        ConfigError: matplotlib is not installed, does not know the ending, or the file can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture: needs matplotlib; install grpo-actors[plots]") from error
    evaluations = list(dict.fromkeys(label for run in runs for label in run.evaluations))
    names = labels(runs)
    figure = Figure(figsize=(9, 3 * (len(evaluations) + 2)), layout="constrained")
    panels = figure.subplots(len(evaluations) + 2, 1, squeeze=False)[:, 0]
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        panels[0].plot(*running_mean(run.rewards), color=f"C{number}", label=name)
        for panel, evaluation in zip(panels[1:], evaluations, strict=False):
            if evaluation in run.evaluations:
                values = sorted(run.evaluations[evaluation].values.items())
                panel.plot(*zip(*values, strict=True), color=f"C{number}", marker="o", markersize=3, label=name)
    panels[0].set(xlabel="step", ylabel=f"sampled reward, mean of {MEAN_OF} steps")
    for panel, evaluation in zip(panels[1:], evaluations, strict=False):
        measures = {run.evaluations[evaluation].measure for run in runs if evaluation in run.evaluations}
        panel.set(xlabel="version", ylabel=f"{evaluation}, {' or '.join(sorted(measures))}")
    rates = [run.steps_per_second or 0.0 for run in runs]
    panels[-1].barh(names, rates, color=[f"C{number}" for number in range(len(runs))])
    panels[-1].invert_yaxis()
    panels[-1].set(xlabel="steps per second")
    for panel in panels[:-1]:
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: {error}") from None


def running_mean(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return steps and the mean of the MEAN_OF values up to each step, thinned out to at most POINTS points.

    Args:
        values: values by step.
    """
    steps = sorted(values)
    every = max(1, -(-len(steps) // POINTS))
    # the last step is always among them
    chosen = range((len(steps) - 1) % every, len(steps), every) if steps else range(0)
    windows = ([values[step] for step in steps[max(0, i - MEAN_OF + 1) : i + 1]] for i in chosen)
    return [steps[i] for i in chosen], [sum(window) / len(window) for window in windows]
