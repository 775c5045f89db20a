"""The table of metrics is what actors export, from the first scrape on."""

from itertools import product
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from actors.telemetry.metrics import ACTORS, SPECS, Metrics, document
from bus.counts import DROP_REASONS, REFUSALS, EdgeCounts

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("actor", ACTORS)
def test_every_metric_is_there_at_the_start_with_all_label_values_and_counters_at_0(actor):
    """A rate over the first event is right only if the counter was 0 before."""
    registry = Metrics(actor).registry
    mine = [spec for spec in SPECS if spec.actor == actor]
    assert mine
    for spec in mine:
        names = [name for name, _ in spec.labels]
        suffix = "_count" if spec.kind == "histogram" else ""
        for values in product(*(values for _, values in spec.labels)):
            value = registry.get_sample_value(spec.name + suffix, dict(zip(names, values, strict=True)))
            assert value is not None, (spec.name, values)
            if spec.kind != "gauge":
                assert value == 0.0


def test_names_follow_the_rules():
    """grpo_<actor>_<noun>…; counters and nothing else end in _total; times and sizes carry their base unit."""
    for spec in SPECS:
        assert spec.name.split("_")[0] == "grpo"
        assert spec.actor in ACTORS
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert not {"step", "ordinal"} & {name for name, _ in spec.labels}
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_edges_of_the_same_name_are_exported_as_their_sum():
    """A rollout with two sockets to reward actors has one edge: 3 + 4 messages, 30 + 40 bytes, 1 bad frame.

    Refused peers are summed over all edges.
    """
    edges = [EdgeCounts("groups", num_messages=3, num_bytes=30), EdgeCounts("groups", num_messages=4, num_bytes=40)]
    edges[0].dropped["oversize"] += 1
    edges[0].refused["plaintext"] += 1
    edges[1].refused.update({"plaintext": 2, "unlisted_key": 1})
    metrics = Metrics("rollout")
    metrics.watch_bus(lambda: edges, lambda: 2.5)
    value = metrics.registry.get_sample_value
    assert value("grpo_bus_messages_total", {"edge": "groups"}) == 7
    assert value("grpo_bus_bytes_total", {"edge": "groups"}) == 70
    dropped = {r: value("grpo_bus_dropped_frames_total", {"edge": "groups", "reason": r}) for r in DROP_REASONS}
    assert dropped.pop("oversize") == 1
    assert set(dropped.values()) == {0}
    assert value("grpo_bus_packer_silent_seconds") == 2.5
    refused = {reason: value("grpo_bus_refused_connections_total", {"reason": reason}) for reason in REFUSALS}
    assert refused == dict.fromkeys(REFUSALS, 0) | {"plaintext": 3, "unlisted_key": 1}
    refused = {reason: value("grpo_bus_refused_connections_total", {"reason": reason}) for reason in REFUSALS}
    assert refused == dict.fromkeys(REFUSALS, 0) | {"plaintext": 3, "unlisted_key": 1}
    assert b"grpo_bus_messages_total" in generate_latest(metrics.registry)


def test_document_is_what_the_repository_has():
    """docs/reference/metrics.md is made from the table; `make docs` writes it."""
    assert (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8") == document()
