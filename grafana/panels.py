"""What a dashboard is made of, as plain data: rows of panels, panels of queries. `render` turns it into JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MATCH = 'run=~"$run"'
"""Matches the series of the chosen runs, whatever actor they are of."""
MINE = 'run=~"$run", actor=~"$actor", name=~"$name"'
"""Likewise, of the chosen actors and processes only."""
TRAIN = MATCH + ', purpose="train"'
WINDOW = "$__rate_interval"
"""Grafana's own: the shortest window that holds enough scrapes at the present zoom."""
PanelKind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True)
class Query:
    """One PromQL expression and how its series are called. `legend` is Grafana's: `{{name}}`."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel; `unit` is one of Grafana's names of units.

    Args:
        thresholds: (from this value on, colour) beside green below.
        stacked: whether the series are parts of a whole.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = "timeseries"
    thresholds: tuple[tuple[float, str], ...] = ()
    stacked: bool = False
    width: int = 8
    """Of 24 columns."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One page. `uid` is its address in Grafana and the name of its file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    numbers: tuple[tuple[str, str, str], ...] = ()
    """Variables that a reader types in: (name, default, what it is)."""

    @property
    def panels(self) -> Iterator[Panel]:
        """All, row by row."""
        return (panel for row in self.rows for panel in row.panels)


def plot(title: str, description: str, unit: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    """A panel of lines over time, from (expression, legend)."""
    return Panel(title, description, unit, tuple(Query(*query) for query in queries), stacked=stacked)


def number(
    title: str, description: str, unit: str, expr: str, thresholds: tuple[tuple[float, str], ...] = (), width: int = 3
) -> Panel:
    """A panel with the newest value of each run."""
    return Panel(title, description, unit, (Query(expr, "{{run}}"),), "stat", thresholds, width=width)


def heatmap(title: str, description: str, unit: str, metric: str) -> Panel:
    """The course of a histogram's distribution, all processes of the chosen runs together."""
    expr = f"sum by (le) (increase({metric}_bucket{{{MATCH}}}[{WINDOW}]))"
    return Panel(title, description, unit, (Query(expr, "{{le}}"),), "heatmap")


def rate(metric: str, by: str, matchers: str = MATCH, fold: str = "sum") -> str:
    """A counter's increase per second, summed (or folded otherwise) by labels."""
    return f"{fold} by ({by}) (rate({metric}{{{matchers}}}[{WINDOW}]))"


def quantile(q: float, metric: str, by: str, matchers: str = MATCH) -> str:
    """A quantile of a histogram's newest observations, by labels."""
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket{{{matchers}}}[{WINDOW}])))"


def mean(metric: str, by: str, matchers: str = MATCH) -> str:
    """Mean of a histogram's newest observations, by labels."""
    total, count = rate(f"{metric}_sum", by, matchers), rate(f"{metric}_count", by, matchers)
    return f"{total} / {count}"
