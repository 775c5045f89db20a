"""Metrics of environments exist before the first trajectory."""

from itertools import product

from actors.rollout.environments import SERIES
from actors.telemetry.metrics import SPECS


def test_every_counter_of_an_environment_exists_from_the_start() -> None:
    """With all values of its other labels: a series that appears later would look like a jump to Prometheus."""
    expected = []
    for spec in SPECS:
        labels = dict(spec.labels)
        if spec.actor == "rollout" and spec.kind == "counter" and "environment" in labels:
            del labels["environment"]
            expected += [(spec.name, dict(zip(labels, values, strict=True))) for values in product(*labels.values())]
    assert sorted(SERIES, key=str) == sorted(expected, key=str)
