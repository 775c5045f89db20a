"""Metrics of environments exist before the first trajectory."""

from itertools import product

from actors.rollout.environments import SERIES
from actors.telemetry.metrics import SPECS


def test_every_counter_of_an_environment_exists_from_the_start() -> None:
    """With all values of its other labels: a series that appears later would look like a jump to Prometheus."""
    expected = []
    for spec in SPECS:
        labels = dict(spec.labels)
        # prompts are cut where a data set makes them; that series exists only where they may be cut
        of_environments = "environment" in labels and spec.name != "grpo_rollout_cut_prompts_total"
        if spec.actor == "rollout" and spec.kind == "counter" and of_environments:
            del labels["environment"]
            expected += [(spec.name, dict(zip(labels, values, strict=True))) for values in product(*labels.values())]
    assert sorted(SERIES, key=str) == sorted(expected, key=str)
