"""Names of metrics as other systems have them."""

import pytest

from actors.telemetry.names import TABLES, renamed, renamed_evaluation
from schemas.config.trackers import MetricNames


@pytest.mark.parametrize("names", ["trl", "prime-rl", "areal"])
def test_no_two_metrics_have_one_name(names: MetricNames) -> None:
    """Also not with a metric that keeps its own."""
    values = dict.fromkeys([*TABLES["trl"], *TABLES["prime-rl"], *TABLES["areal"], "reward/mine", "ess"], 1.0)
    assert len(renamed(values, names)) == len(values)


def test_reward_functions_and_evaluations_have_trl_names() -> None:
    """With one environment its name is left out, as in TRL."""
    assert renamed({"reward_mean": 1, "reward/mine": 2, "x": 3}, "trl") == {"reward": 1, "rewards/mine/mean": 2, "x": 3}
    results = {"sums": {"mean_reward": 1, "reward/mine": 2, "exact_match": 3}}
    assert renamed_evaluation(results, "trl") == {"eval_reward": 1, "eval_rewards/mine/mean": 2, "eval_exact_match": 3}
    assert renamed_evaluation(results | {"b": {"mean_reward": 4}}, "trl")["eval_b_reward"] == 4
    assert renamed_evaluation(results, "ours")["eval/sums/mean_reward"] == 1
