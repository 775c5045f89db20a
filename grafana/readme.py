"""README.md of the dashboards, generated from the same data as the dashboards."""

from collections.abc import Iterable

from grafana.panels import Dashboard
from grafana.promql import metrics

HEAD = """# Dashboards

Six pages for Grafana 10.1 or newer. They need a Prometheus that scrapes the run.
[Operations](../docs/reference/operations.md#grafana) describes the setup of both.

Import `dashboards/*.json` into Grafana, or let Grafana load the files from a folder. Each page has the variables *Data
source*, *Run*, *Actor* and *Name* (of the process, e.g. `rollout-0`). Panels about a whole run ignore *Actor* and
*Name*.

`make dashboards` generates the JSON files and this file from Python: `overview.py`, `data_plane.py`, `training.py`,
`inference.py`, `environments.py` and `cost.py` have the pages, `panels.py` has their parts. Tests compare the JSON with
the code, each metric with [the list of metrics](../docs/reference/metrics.md), and each selector with a run that a real
Prometheus scrapes. No test loads the pages into a Grafana server.
"""


def readme(pages: Iterable[Dashboard]) -> str:
    """Return the text of README.md: each page, panel by panel, with the metrics of each panel."""
    return "\n".join([HEAD, *(_page(page) for page in pages)])


def _page(page: Dashboard) -> str:
    lines = [f"## {page.title}", "", page.description, ""]
    for row in page.rows:
        lines += [f"### {row.title}", "", "| Panel | Shows | Metrics |", "|---|---|---|"]
        for panel in row.panels:
            names = dict.fromkeys(name for query in panel.queries for name in metrics(query.expr))
            lines.append(f"| {panel.title} | {panel.description} | {', '.join(f'`{name}`' for name in names)} |")
        lines.append("")
    return "\n".join(lines)
