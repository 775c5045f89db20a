"""Alerts name what actors export, each has its section in the guide, and a case for firing and for silence."""

import re

import pytest
import yaml

from actors.cli import main
from grafana.promql import metrics
from tests.prometheus import (
    ALERT_FILE,
    DEPLOY,
    PROMETHEUS_OWN,
    RECORDING_FILE,
    ROOT,
    SPECIAL,
    known_series,
    rules_of,
    unknown_in,
)

GUIDE = (ROOT / "docs/reference/operations.md").read_text(encoding="utf-8")
ALERTS = {rule["alert"]: rule for rule in rules_of(ALERT_FILE)}
RULES = rules_of(RECORDING_FILE) + rules_of(ALERT_FILE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_names_metrics_and_labels_that_actors_export(rule):
    """Of every run, so nothing of a special configuration."""
    assert unknown_in(rule["expr"], known_series()) == []
    assert not set(metrics(rule["expr"])) & set(SPECIAL)


def test_recorded_series_are_used():
    """One that no alert reads costs and tells nothing."""
    read = {name for rule in ALERTS.values() for name in metrics(rule["expr"])}
    assert {rule["record"] for rule in rules_of(RECORDING_FILE)} <= read


def test_of_prometheus_own_series_alerts_read_up_alone():
    """What is excepted from the list of metrics is excepted for a reason."""
    assert {"up"} == PROMETHEUS_OWN


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_how_bad_it_is_what_to_do_and_where_to_read_on(name):
    """Severity, summary with the run's name, description with a thing to do, and the section of the guide."""
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "for" in rule
    assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 60
    assert rule["annotations"]["runbook"] == f"docs/reference/operations.md#{name.lower()}"


def test_guide_has_a_section_for_every_alert_and_for_no_other_with_a_command_in_it():
    """In the order of the rules."""
    sections = re.split(r"^### (\w+)$", GUIDE.partition("## Alerts")[2], flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(texts) == list(ALERTS)
    assert [name for name, text in texts.items() if "```\n" not in text] == []


def test_commands_of_the_guide_and_of_alerts_are_commands(capsys):
    """`actors NAME`: a renamed one would be called in vain at night."""
    texts = [GUIDE, *(rule["annotations"]["description"] for rule in ALERTS.values())]
    used = {found for text in texts for found in re.findall(r"(?:^|`)actors ([a-z]+)", text, re.MULTILINE)}
    assert used >= {"status", "top", "up", "rewind"}
    for name in sorted(used):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: actors {name} ")


def test_links_of_the_guide_lead_somewhere():
    """Files and sections."""
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", GUIDE, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        path, _, section = target.partition("#")
        assert (ROOT / "docs/reference" / path).exists() if path else section in headings, target


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_case_in_which_it_fires_and_one_in_which_all_are_silent(name):
    """`promtool test rules` runs them (tests/system/test_alerts.py)."""
    cases = {c["name"]: c for c in yaml.safe_load((DEPLOY / "tests" / "alerts.yml").read_text())["tests"]}
    fires, silent = cases[f"{name} fires"], cases[f"{name} is silent"]
    for case in (fires, silent):
        assert all('ALERTS{alertstate="firing"' in check["expr"] for check in case["promql_expr_test"])
        assert case["input_series"]
    assert all(
        f'alertname="{name}"' in sample["labels"]
        for check in fires["promql_expr_test"]
        for sample in check["exp_samples"]
    )
    assert all(check["exp_samples"] for check in fires["promql_expr_test"])
    assert not any(check["exp_samples"] for check in silent["promql_expr_test"])
    severity = ALERTS[name]["labels"]["severity"]
    assert f'severity="{severity}"' in fires["promql_expr_test"][0]["exp_samples"][0]["labels"]
