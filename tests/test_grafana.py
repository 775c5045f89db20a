"""Dashboards name what actors export, say what each panel tells, and are what the code makes of them."""

import json

import pytest

from actors.telemetry.metrics import ALL_SPECS
from grafana.pages import PAGES
from grafana.promql import metrics, selectors
from grafana.readme import readme
from tests.prometheus import ROOT, SPECIAL, TARGET_LABELS, known_series, unknown_in
from tests.system.tools import missing

FOLDER = ROOT / "grafana"
PANELS = [pytest.param(page, panel, id=f"{page.uid}: {panel.title}") for page in PAGES for panel in page.panels]


@pytest.mark.parametrize(("page", "panel"), PANELS)
def test_panel_names_metrics_and_labels_that_actors_export(page, panel):
    """A renamed metric or label would leave it empty without a word."""
    assert panel.queries
    assert [found for query in panel.queries for found in unknown_in(query.expr, known_series())] == []


@pytest.mark.parametrize(("page", "panel"), PANELS)
def test_panel_tells_what_it_shows_of_the_run_that_was_chosen(page, panel):
    """A sentence, a unit, a name of its own on the page; every selector heeds $run."""
    assert panel.description.endswith(".")
    assert panel.unit
    titles = [other.title for row in page.rows if panel in row.panels for other in row.panels]
    assert titles.count(panel.title) == 1
    for query in panel.queries:
        assert all('run=~"$run"' in matchers for _, matchers in selectors(query.expr)), query.expr


def test_no_metric_has_a_label_of_targets():
    """Prometheus would rename it to exported_…, and expressions would read the target's."""
    assert [s.name for s in ALL_SPECS if {name for name, _ in s.labels} & set(TARGET_LABELS)] == []


def test_every_metric_of_the_product_is_on_a_page():
    """Who adds one says where it is seen."""
    shown = {name for page in PAGES for panel in page.panels for q in panel.queries for name in metrics(q.expr)}
    suffixes = ("", "_bucket", "_sum")
    assert [s.name for s in ALL_SPECS if not {s.name + suffix for suffix in suffixes} & shown] == []


def test_special_metrics_are_those_that_panels_read():
    """No entry is left behind when a panel goes."""
    shown = {name for page in PAGES for panel in page.panels for q in panel.queries for name in metrics(q.expr)}
    assert set(SPECIAL) <= shown
    assert all(SPECIAL.values())


def test_readme_describes_every_panel():
    """It is made from the same code: `python -m grafana`."""
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == readme(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_committed_page_has_the_expressions_descriptions_and_variables_of_the_code(page):
    """What can be seen without the SDK; the next test compares the whole text."""
    tree = json.loads((FOLDER / "dashboards" / f"{page.uid}.json").read_text(encoding="utf-8"))
    panels = [panel for panel in tree["panels"] if panel["type"] != "row"]
    assert [(p["title"], p["description"], p["type"]) for p in panels] == [
        (panel.title, panel.description, panel.kind) for panel in page.panels
    ]
    assert [[t["expr"] for t in p["targets"]] for p in panels] == [[q.expr for q in p.queries] for p in page.panels]
    assert [p["fieldConfig"]["defaults"]["unit"] for p in panels] == [panel.unit for panel in page.panels]
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])
    names = [variable["name"] for variable in tree["templating"]["list"]]
    assert names == ["datasource", "run", "actor", "name", *(name for name, _, _ in page.numbers)]


def test_there_is_no_page_that_the_code_does_not_make():
    """One that is renamed leaves no old file."""
    assert {path.stem for path in (FOLDER / "dashboards").iterdir()} == {page.uid for page in PAGES}


@pytest.mark.system
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_committed_page_is_what_the_sdk_makes_of_the_code(page):
    """`python -m grafana` writes it."""
    try:
        from grafana.render import render
    except ModuleNotFoundError as error:
        missing(f"{error.name} is not here: pip install -e '.[dashboards]'")
    assert (FOLDER / "dashboards" / f"{page.uid}.json").read_text(encoding="utf-8") == render(page)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("a", [("a", "")]),
        ('rate(a_total{x="}", y=~"b|c"}[5m])', [("a_total", 'x="}", y=~"b|c"')]),
        ("sum by (run, le) (a) / on(run) group_left() sum(b) by (run)", [("a", ""), ("b", "")]),
        ("histogram_quantile(0.5, sum without (le) (rate(run:a:b[1h])))", [("run:a:b", "")]),
        ('a offset 1h > 2.5e3 and b unless c{d="or e"} or up', [("a", ""), ("b", ""), ("c", 'd="or e"'), ("up", "")]),
        ("time() - 1000 * clamp_min(delta(a[15m]), 0)", [("a", "")]),
        ("sum(a) by (run) > bool NaN", [("a", "")]),
        ("rate(a[$__rate_interval]) * $gpus_per_rank", [("a", "")]),
    ],
)  # fmt: skip
def test_selectors_of_an_expression_are_found(expr, expected):
    """Functions, labels of by and on, words, numbers and strings are none."""
    assert selectors(expr) == expected


@pytest.mark.parametrize("expr", ['{__name__=~"a|b"}', 'sum({x="y"})'])
def test_selector_without_a_name_is_refused(expr):
    """It would read metrics that no list names."""
    with pytest.raises(ValueError, match="without the name"):
        selectors(expr)
