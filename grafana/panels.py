"""Dashboards as plain data: dashboards have rows of panels, panels have queries. `render` makes JSON of dashboards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MATCH = 'run=~"$run"'
"""Matchers for the series of the chosen runs, of all actors."""
MINE = 'run=~"$run", actor=~"$actor", name=~"$name"'
"""Matchers for the series of the chosen runs, actors and processes."""
TRAIN = MATCH + ', purpose="train"'
WINDOW = "$__rate_interval"
"""Grafana's variable for the shortest window with enough scrapes at the current zoom."""
PanelKind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and the legend of its series in Grafana's form: `{{name}}` is the value of the label."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel.

    Args:
        unit: name of a unit in Grafana.
        thresholds: pairs of a value and the colour from this value on; below the first value the colour is green.
        stacked: True if the series are parts of a whole.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = "timeseries"
    thresholds: tuple[tuple[float, str], ...] = ()
    stacked: bool = False
    width: int = 8
    """Width in columns; a page has 24."""


@dataclass(frozen=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A page. `uid` is its address in Grafana and the name of its JSON file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    numbers: tuple[tuple[str, str, str], ...] = ()
    """Variables that the reader of the page fills in: (name, default, label)."""

    @property
    def panels(self) -> Iterator[Panel]:
        """Panels of all rows, in order."""
        return (panel for row in self.rows for panel in row.panels)


def plot(title: str, description: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    """Return a panel of lines over time, from pairs (expression, legend)."""
    return Panel(title, description, unit, tuple(Query(*query) for query in queries), stacked=stacked)


def number(
    title: str, description: str, unit: str, expr: str, thresholds: tuple[tuple[float, str], ...] = (), width: int = 3
) -> Panel:
    """Return a panel with the newest value of each run."""
    return Panel(title, description, unit, (Query(expr, "{{run}}"),), "stat", thresholds, width=width)


def heatmap(title: str, description: str, unit: str, metric: str) -> Panel:
    """Return a panel with a histogram's distribution over time, summed over all processes of the chosen runs."""
    expr = f"sum by (le) (increase({metric}_bucket{{{MATCH}}}[{WINDOW}]))"
    return Panel(title, description, unit, (Query(expr, "{{le}}"),), "heatmap")


def rate(metric: str, by: str, matchers: str = MATCH, fold: str = "sum") -> str:
    """Return the expression for a counter's increase per second, summed by labels, or folded by another function."""
    return f"{fold} by ({by}) (rate({metric}{{{matchers}}}[{WINDOW}]))"


def quantile(q: float, metric: str, by: str, matchers: str = MATCH) -> str:
    """Return the expression for a quantile of a histogram's newest observations, by labels."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{matchers}}}[{WINDOW}])))"


def mean(metric: str, by: str, matchers: str = MATCH) -> str:
    """Return the expression for the mean of a histogram's newest observations, by labels."""
    total, count = rate(f"{metric}_sum", by, matchers), rate(f"{metric}_count", by, matchers)
    return f"{total} / {count}"
