"""Rendering of a `Dashboard` as Grafana's JSON, with grafana-foundation-sdk. Grafana 10.1 and newer load the JSON."""

import json
from collections.abc import Callable
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.panels import Dashboard, Panel, PanelKind, Query

SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
HEIGHT = 8
NUMBER_HEIGHT = 4
EVERYTHING = ".+"
PanelBuilder = timeseries.Panel | stat.Panel | heatmap.Panel


def render(page: Dashboard) -> str:
    """Return the text of a page's JSON file."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["grpo-actors"])
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Other pages")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["grpo-actors"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, of in (
        ("run", 'up{run!=""}'),
        ("actor", 'up{run=~"$run"}'),
        ("name", 'up{run=~"$run", actor=~"$actor"}'),
    ):
        builder.with_variable(_choice(name, of))
    for name, default, label in page.numbers:
        builder.with_variable(
            dashboard.TextBoxVariable(name)
            .label(label)
            .default_value(default)
            .current(models.VariableOption(text=default, value=default))
        )
    number = count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(number)))
        for panel in row.panels:
            builder.with_panel(_panel(panel).id(next(number)))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _choice(name: str, of: str) -> Builder[models.VariableModel]:
    """Return a variable for the values of a label; a reader may choose several values, or all."""
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query({"query": f"label_values({of}, {name})", "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(EVERYTHING)
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel) -> PanelBuilder:
    made = MAKERS[panel.kind](panel)
    made.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit).span(panel.width)
    for ref, query in zip("ABCDEFGH", panel.queries, strict=False):
        made.with_target(_target(ref, query, panel.kind == "heatmap"))
    return made


def _target(ref: str, query: Query, as_heatmap: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).expr(query.expr).legend_format(query.legend).datasource(SOURCE)
    return target.format(PromQueryFormat.HEATMAP) if as_heatmap else target


def _plot(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().height(HEIGHT).line_width(1).fill_opacity(20 if panel.stacked else 0)
    made.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    made.tooltip(
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    if panel.stacked:
        made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return made


def _number(panel: Panel) -> stat.Panel:
    steps = [models.Threshold(value=None, color="green")]
    steps += [models.Threshold(value=value, color=color) for value, color in panel.thresholds]
    made = stat.Panel().height(NUMBER_HEIGHT).graph_mode(common_models.BigValueGraphMode.AREA)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return made.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))


def _heatmap(panel: Panel) -> heatmap.Panel:
    return heatmap.Panel().height(HEIGHT).calculate(False)


MAKERS: dict[PanelKind, Callable[[Panel], PanelBuilder]] = {
    "timeseries": _plot,
    "stat": _number,
    "heatmap": _heatmap,
}
