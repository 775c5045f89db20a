"""Runs with environments under what else a run may be asked for: replay, rewind, fork, pools, limits."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actors.assembly import make_learner
from actors.ledger import LedgerReader
from actors.ops.replay import replay
from actors.ops.resume import rewind
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests.marks import first_of
from tests.ring.harness import check_promise, ring, ring_config, summary_of, wait_until
from tests.ring.test_environments import WORLDS
from tests.ring.test_resume import resolved, weights_of

pytestmark = pytest.mark.slow

HOSTILE = Path(__file__).with_name("hostile_worlds.py")


def config_of(folder: Path, environment: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A run of nine steps at level 0 with games of three turns, whose result is a function of the configuration."""
    one = {"type": "python", "name": "letters", "path": f"{WORLDS}:Letters"} | (environment or {})
    values: dict[str, Any] = {
        "environments": [one],
        "reward": {"functions": []},
        "rollout": {"group_timeout": 300.0},
        "packer": {"sequence_len": 512, "max_async_level": 0},
        "trainer": {"max_steps": 9, "checkpoint": {"interval": 3}},
        "eval": {"num_prompts": 0},
        "ledger": {"keep_steps": 100},
    }
    merged = {
        name: {**values[name], **section} if isinstance(section, dict) and name in values else section
        for name, section in sections.items()
    }
    return ring_config(folder, **values | merged)


def run_whole(config: RunConfig) -> None:
    """Run to the end, and check that nothing was lost."""
    with ring(config) as run:
        run.start().wait()
    resolved(config)
    check_promise(config)


def test_a_run_with_turns_is_replayed_rewound_and_forked(tmp_path: Path) -> None:
    """The same bits in a replay, the same weights after a rewind with the same groups, and new groups after a fork."""
    config = config_of(tmp_path)
    run_whole(config)
    weights = weights_of(config)
    for step in (2, 8):
        assert all(replay(config, step, make_learner(config)).same.values())
    rewind(config.output, 6, same_groups=True)
    run_whole(config)
    assert weights_of(config) == weights
    dropped = summary_of(config)["ledger"]["dropped"]
    assert dropped == {}
    rewind(config.output, 3)
    run_whole(config)
    assert summary_of(config)["ledger"]["dropped"] == {"forked": 18}
    # sampled from the same weights, with other seeds
    assert weights_of(config) != weights
    assert all(replay(config, 8, make_learner(config)).same.values())


def test_a_run_with_turns_has_the_same_weights_again(tmp_path: Path) -> None:
    """At level 0 with a deterministic engine, whichever worker plays first."""
    configs = [config_of(tmp_path / name, {"workers": 2}) for name in ("a", "b")]
    for config in configs:
        config.output.parent.mkdir()
        run_whole(config)
    assert len({json.dumps(weights_of(config)) for config in configs}) == 1


def test_another_environment_is_another_run(tmp_path: Path) -> None:
    """Refused by the key that differs, and taken by a fork, after which the groups are of the new environment."""
    run_whole(config_of(tmp_path))
    other = config_of(tmp_path, {"max_turns": 2}, trainer={"max_steps": 12})
    with ring(other) as run:
        with pytest.raises(ConfigError, match=r"environments\.0\.max_turns: 10 so far, 2 now"):
            run.start("packer-0")
        run.start("packer-0", fork=True, started_at=1.0)
        run.start("trainer-0", "inference-0", "reward-0", "rollout-0").wait()
    lines = read_lines(other.output / "metrics.jsonl")
    assert [line["turns_mean"] for line in lines] == [3.0] * 9 + [2.0] * 3


def test_easy_examples_of_an_environment_are_set_aside(tmp_path: Path) -> None:
    """Difficulty pools know an example by its number; a reward of 3 and more is easy, so each example comes once."""
    config = config_of(
        tmp_path,
        {"num_examples": 20},
        packer={"pools": {"easy_threshold": 3.0, "hash_keys": ["task", "index"]}},
        trainer={"max_steps": 6},
    )
    run_whole(config)
    ledger = LedgerReader.of(config.ledger_path)
    drawn = Counter(group.example.index for group in ledger.groups())
    assert set(drawn.values()) == {1}
    assert set(ledger.pools().values()) == {"easy"}
    assert len(ledger.pools()) == 18
    ledger.close()


def test_pools_name_a_column_that_an_environment_does_not_have(tmp_path: Path) -> None:
    """The columns of an example without rows are `index` and `split`."""
    config = config_of(tmp_path, {"num_examples": 20}, packer={"pools": {"easy_threshold": 3.0, "hash_keys": ["id"]}})
    with ring(config) as run, pytest.raises(ConfigError, match="not every example of letters has a column 'id'"):
        run.start("packer-0")


@pytest.mark.parametrize("advantage", [{"type": "norm"}, {"type": "norm", "std_level": "none"}])
def test_groups_of_one_learn_by_an_advantage_over_the_step(tmp_path: Path, advantage: dict[str, Any]) -> None:
    """With the mean of the step as baseline a single trajectory has an advantage."""
    config = config_of(tmp_path, rollout={"group_size": 1}, reward={"advantage": advantage})
    run_whole(config)
    lines = read_lines(config.output / "metrics.jsonl")
    assert any(line["advantage_std"] > 0 for line in lines)
    assert all(line["num_completions"] == 3 for line in lines)


def test_a_single_turn_ends_at_its_limit(tmp_path: Path) -> None:
    """`max_turns: 1`: the game is cut after the first answer, and scored."""
    config = config_of(tmp_path, {"max_turns": 1}, telemetry={"sample_groups_per_step": 3})
    run_whole(config)
    lines = read_lines(config.output / "metrics.jsonl")
    assert all(line["turns_mean"] == line["reward/turns_taken"] == 1.0 for line in lines)
    conditions = {one for record in read_lines(config.output / "samples.jsonl") for one in record["stop_conditions"]}
    assert conditions == {"max_turns"}


@pytest.mark.parametrize("number", first_of([7_000, 20_000]))
def test_more_rewards_than_a_message_holds_are_refused_by_name(tmp_path: Path, number: int) -> None:
    """Thousands are trained; beyond the limit the run fails, and its words name environment, number and limit."""
    config = config_of(
        tmp_path,
        {"name": "names", "path": f"{HOSTILE}:Names", "options": {"number": number}, "rewards": {"reward_1": 1.0}},
        trainer={"max_steps": 2},
        packer={"groups_per_step": 1},
        telemetry={"sample_groups_per_step": 0},
    )
    with ring(config) as run:
        run.start()
        if number < 8_000:
            run.wait()
            assert read_lines(config.output / "metrics.jsonl")[-1]["reward/reward_6999"] == 6999.0
            return
        machine = run.packer.machine
        wait_until(lambda: machine.failure, "the end of the run")
        assert "names" in machine.failure
        assert "environment names gave 20000 rewards with different names, and at most 8000 travel" in machine.failure


@pytest.mark.parametrize("characters", first_of([2_000_000, 2_000]))
def test_long_texts_of_an_environment_lose_their_middle(tmp_path: Path, characters: int) -> None:
    """`max_message_tokens: 40`: three turns fit into a sequence of 512 tokens, whatever the environment says."""
    config = config_of(
        tmp_path,
        {"name": "talks", "path": f"{HOSTILE}:Talks", "max_message_tokens": 40, "options": {"characters": characters}},
        trainer={"max_steps": 2},
    )
    run_whole(config)
    lines = read_lines(config.output / "metrics.jsonl")
    assert all(line["turns_mean"] == 3.0 for line in lines)


def test_a_first_message_without_end_fails_with_the_key_to_change(tmp_path: Path) -> None:
    """Without `max_message_tokens` nothing is left for a turn: the attempt fails, and its words say so."""
    config = config_of(
        tmp_path, {"name": "talks", "path": f"{HOSTILE}:Talks", "options": {"characters": 100_000}}, trainer={}
    )
    with ring(config) as run:
        run.start()
        words = wait_until(lambda: run.packer.machine.groups.last_failure, "a failed attempt")
    assert "talks" in words
    assert "env_reset: its first messages leave no room for a turn in packer.sequence_len" in words
    assert "max_message_tokens" in words
