"""Runs of the whole ring with environments in worker processes, to the rewards that are trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests.ring.harness import ALL, ring, ring_config

WORLDS = Path(__file__).with_name("worlds.py")


def config_of(folder: Path, world: str, reward: dict[str, Any] | None = None, **environment: Any) -> RunConfig:
    """A run of eight steps with an environment of worlds.py, in groups of four."""
    one = {"type": "python", "name": "letters", "path": f"{WORLDS}:{world}"} | environment
    return ring_config(
        folder,
        environments=[one],
        rollout={"group_size": 4, "group_timeout": 300.0},
        reward=reward or {"functions": []},
        packer={"sequence_len": 512},
    )


@pytest.mark.slow
def test_rewards_of_turns_and_of_the_end_are_trained(tmp_path: Path) -> None:
    """Each trajectory of three turns has one sample; the reward is the sum of its turns and three for the end."""
    config = config_of(tmp_path, "Letters")
    with ring(config) as run:
        run.start(*ALL).wait()
    lines = read_lines(config.output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["reward/turns_taken"] == line["turns_mean"] == 3.0 for line in lines)
    assert all(line["samples_per_completion"] == 1.0 and line["failed_fraction"] == 0.0 for line in lines)
    assert all(abs(line["reward_mean"] - line["reward/turns"] - 3.0) < 1e-9 for line in lines)
    records = read_lines(config.output / "samples.jsonl")
    for record in records:
        assert record["turns"] == [3, 3, 3, 3] or record["purpose"] == "eval"
        assert set(record["stop_conditions"]) == {"done"}
        assert record["columns"]["asked"] in range(7)
        assert record["info"] == [{"turn": 3}] * len(record["turns"])
        for messages, completion in zip(record["messages"], record["completions"], strict=True):
            roles = [message["role"] for message in messages]
            assert roles == ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
            assert messages[-2]["content"] == completion
        # the same question for the whole group
        assert len({messages[0]["content"] for messages in record["messages"]}) == 1
    # evaluations too, whose default `eval.exact_match` reads a column that this environment does not have
    assert "eval" in {record["purpose"] for record in records}
    summary = json.loads((config.output / "summary.json").read_text())
    assert summary["ledger"]["trained_twice"] == 0
    # the environment's tokens are neither sampled nor trained
    assert summary["goodput"] == 1.0


@pytest.mark.slow
def test_a_worker_that_dies_costs_an_attempt_and_nothing_else(tmp_path: Path) -> None:
    """Its group is sampled again; all steps are trained."""
    config = config_of(tmp_path, "DiesOnce", options={"folder": str(tmp_path)})
    with ring(config) as run:
        run.start(*ALL).wait()
    assert (tmp_path / "died").exists()
    lines = read_lines(config.output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["reward/turns_taken"] == 3.0 for line in lines)


@pytest.mark.slow
def test_a_failed_trajectory_is_unscorable_and_its_group_goes_on(tmp_path: Path) -> None:
    """With `on_failure: unscorable`: no reward, not 0, and the words of the failure are in the samples."""
    config = config_of(tmp_path, "FailsHalf", on_failure="unscorable")
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"num_prompts": 0})})
    with ring(config) as run:
        run.start(*ALL).wait()
    records = read_lines(config.output / "samples.jsonl")
    failed = [
        (record["reward"][g], record["advantages"][g], failure)
        for record in records
        for g, failure in enumerate(record["failures"])
        if failure
    ]
    assert failed
    assert all(reward is None and advantage == 0.0 for reward, advantage, _ in failed)
    assert all("the board is broken" in failure for _, _, failure in failed)
    assert all(r >= 3.0 for record in records for r in record["reward"] if r is not None)


@pytest.mark.slow
def test_an_environment_that_can_not_be_loaded_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """Asked by the packer before anything is written."""
    config = config_of(tmp_path, "Missing")
    with ring(config) as run, pytest.raises(ConfigError, match="Missing"):
        run.start("packer")


def test_without_functions_and_rewards_of_its_own_a_dataset_is_refused(tmp_path: Path) -> None:
    """Nothing could be learnt."""
    with pytest.raises(ConfigError, match=r"reward\.functions: is empty, and reverse_text has no rewards"):
        ring_config(tmp_path, reward={"functions": []})
