"""What alerts, dashboards and rules name, for the tests that hold them to the code and to a live run."""

import re
from pathlib import Path
from typing import Any

import yaml

from actors.telemetry.metrics import ALL_SPECS
from grafana.promql import Selector, selectors

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "prometheus"
ALERT_FILE, RECORDING_FILE = DEPLOY / "rules" / "alerts.yml", DEPLOY / "rules" / "recording.yml"
TARGET_LABELS = ("run", "actor", "name", "job", "instance")
"""That Prometheus gives every series of a target; a metric that had one of them itself would have it renamed."""
PROMETHEUS_OWN = {"up"}
VLLM = "a vLLM server's own, scraped by the job vllm where inference.engine.urls names one"
SPECIAL = {
    "vllm:kv_cache_usage_perc": VLLM,
    "vllm:num_requests_running": VLLM,
    "vllm:num_requests_waiting": VLLM,
    "vllm:prefix_cache_hits_total": VLLM,
    "vllm:prefix_cache_queries_total": VLLM,
}
"""Metrics that a run has in special configurations only, with the reason why no live run of the tests has them."""


def exported() -> dict[str, set[str]]:
    """By name of a series that actors export: the labels that it has besides those of its target."""
    found = {}
    for spec in ALL_SPECS:
        labels = {name for name, _ in spec.labels}
        if spec.kind == "histogram":
            found |= {spec.name + "_bucket": labels | {"le"}, spec.name + "_sum": labels, spec.name + "_count": labels}
        else:
            found[spec.name] = labels
    return found


def rules_of(path: Path) -> list[dict[str, Any]]:
    """All rules of a file."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def unknown_in(expr: str, known: dict[str, set[str]]) -> list[Selector]:
    """Selectors of an expression that name no known metric, or a label that it does not have."""
    labels = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
    return [
        (name, matchers)
        for name, matchers in selectors(expr)
        if name not in known or not set(labels.findall(re.sub(r'"[^"]*"', "", matchers))) <= known[name]
    ]


def known_series() -> dict[str, set[str]]:
    """Everything that an expression may name: what actors export, Prometheus' own, recorded series, and SPECIAL."""
    names = exported() | {name: set() for name in (*PROMETHEUS_OWN, *SPECIAL)}
    series = {name: labels | set(TARGET_LABELS) for name, labels in names.items()}
    return series | {rule["record"]: {"run"} for rule in rules_of(RECORDING_FILE)}
