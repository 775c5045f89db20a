"""What a step and an evaluation are summed up to, by hand."""

import math

import numpy as np

from actors.ledger import Changes, Machine, Store
from actors.packer import settings_of
from actors.record import RunRecord, evaluate, step_values
from actors.telemetry.metrics import Metrics
from actors.telemetry.reporter import Reporter
from schemas.messages import InferenceBeat, Policy, ScoredGroup
from tests.actors.test_reward import group
from tests.ring.harness import ring_config

NAN = math.nan


def scored(rewards: list[float], advantages: list[float], version: int = 0, last: list[float] | None = None):
    """The group of completions `a` (1 token) and `bb` (2 tokens) with these rewards."""
    values = np.array([rewards, last or rewards], np.float64)
    return ScoredGroup(
        **group().__dict__ | {"segments": np.array([[0, 1, version], [1, 1, version]], np.int64)},
        scorer="reward-0", reward_names=["f", "g"], rewards_FG=values, rewards_G=np.array(rewards, np.float64),
        advantages_G=np.array(advantages, np.float32),
    )  # fmt: skip


def test_step_values_are_those_of_its_completions():
    """Step 3 of groups with rewards (0, 1) of version 2 and (1, none) of version 1: lags 0 and 1, 3 scored."""
    values = step_values(3, [scored([0.0, 1.0], [-1, 1], 2), scored([1.0, NAN], [0, 0], 1)])
    assert values["reward_mean"] == 2 / 3
    assert values["reward_unscorable"] == 0.25
    assert values["groups_without_variance"] == 0.5
    assert values["completion_tokens_mean"] == 1.5
    assert values["completion_tokens_max"] == 2.0
    assert values["truncated_fraction"] == 0.0
    assert (values["lag_mean"], values["lag_max"]) == (0.5, 1.0)
    assert values["num_completions"] == 4.0
    assert values["reward/f"] == values["reward/g"] == 2 / 3


def test_evaluation_counts_matches_of_the_last_function_over_all_completions():
    """exact_match (1, 0) and (1, none): 2 of 4; rewards (0.5, 0.5) and (1, none): mean 2/3 of those scored."""
    results = evaluate([scored([0.5, 0.5], [0, 0], last=[1.0, 0.0]), scored([1.0, NAN], [0, 0], last=[1.0, NAN])])
    assert results == {"e": {"exact_match": 0.5, "mean_reward": 2 / 3, "num_prompts": 2}}


def beat(tokens: int, boot_id: str = "b") -> InferenceBeat:
    """An engine that has generated so many tokens since its start."""
    return InferenceBeat(
        run="r", name="inference-0", boot_id=boot_id, sequence=1, phase="running", url="http://x",
        engine_state="clean", policy=Policy(lineage=1, version=0), load=0, generated_tokens=tokens,
        holds_two_versions=False, update_seconds={},
    )  # fmt: skip


def test_generated_tokens_are_counted_once_over_restarts_of_engine_and_packer(tmp_path):
    """100, then 150; the packer restarts and hears 180; the engine restarts and has 20: 200 in all."""
    config, store = ring_config(tmp_path, "inproc"), Store(":memory:")

    def record() -> RunRecord:
        machine = Machine(settings_of(config), store.run, store.term, 0.0, draw=lambda: None)
        return RunRecord(config, store, machine, Metrics("packer"), Reporter(config.output), lambda o: None, None)

    first = record()
    first.heard("inference-0/b", beat(100))
    first.heard("inference-0/b", beat(150))
    store.commit(Changes(values=first.take_values()), {})
    second = record()
    second.heard("inference-0/b", beat(180))
    second.heard("inference-0/c", beat(20, "c"))
    assert second.take_values()["tokens"]["generated"] == 200
    store.close()
