"""README.md of the dashboards, made from the same data as they are."""

from collections.abc import Iterable

from grafana.panels import Dashboard
from grafana.promql import metrics

HEAD = """# Dashboards

Five pages for Grafana 10.1 or newer, on a Prometheus that scrapes a run: [operations](../docs/reference/operations.md)
says how. Import `dashboards/*.json`, or have Grafana find them, as it says there. Each page has the variables *Data
source*, *Run*, *Actor* and *Name* (of the process, `rollout-0`); panels about a run as a whole heed the run alone.

The pages are code: `overview.py`, `data_plane.py`, `training.py`, `inference.py`, `cost.py`, written with the words of
`panels.py`. `python -m grafana` writes JSON and this file anew; it needs `pip install -e ".[dashboards]"`. Tests hold
the JSON to the code, every metric to [the list of metrics](../docs/reference/metrics.md), and every selector to a live
run that a real Prometheus scrapes. No test loads the pages into a Grafana server.
"""


def readme(pages: Iterable[Dashboard]) -> str:
    """Each page, panel by panel, with the metrics that a panel is made of."""
    return "\n".join([HEAD, *(_page(page) for page in pages)])


def _page(page: Dashboard) -> str:
    lines = [f"## {page.title}", "", page.description, ""]
    for row in page.rows:
        lines += [f"### {row.title}", "", "| Panel | Tells | From |", "|---|---|---|"]
        for panel in row.panels:
            names = dict.fromkeys(name for query in panel.queries for name in metrics(query.expr))
            lines.append(f"| {panel.title} | {panel.description} | {', '.join(f'`{name}`' for name in names)} |")
        lines.append("")
    return "\n".join(lines)
