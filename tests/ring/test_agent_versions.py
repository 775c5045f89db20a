"""Runs in which a session stays open while the weights change: versions of its calls, and what is too old."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.ring.harness import ALL, check_promise, ring, ring_config, steps_recorded, wait_until
from tests.ring.test_agent_crashes import AGENTS

pytestmark = pytest.mark.slow


def config_of(folder: Path, **packer: Any) -> RunConfig:
    """A run of ten steps that take groups in the order of their arrival."""
    one = {"type": "agent", "name": "helper", "path": f"{AGENTS}:Staged", "options": {"folder": str(folder)}}
    return ring_config(
        folder,
        environments=[one],
        rollout={"group_size": 2, "group_timeout": 300.0, "max_concurrent_groups": 6},
        reward={"functions": []},
        packer={"sequence_len": 512, "order": "arrival", "max_async_level": 1} | packer,
        trainer={"max_steps": 10},
        eval={"num_prompts": 0},
        telemetry={"sample_groups_per_step": 100},
    )


def run_with_an_open_session(config: RunConfig, folder: Path, steps: int) -> list[Any]:
    """Run while a trajectory stands between its calls for so many steps; return the log."""
    (folder / "armed").write_text("between")
    with capture_logs() as logs, ring(config) as run:
        run.start(*ALL)
        wait_until((folder / "hit").exists, "a session stands between its calls")
        seen = steps_recorded(config)
        wait_until(lambda: steps_recorded(config) >= seen + steps, "the others are trained")
        (folder / "go").touch()
        run.wait()
    return logs


def test_a_session_that_stays_open_is_trained_with_the_version_of_each_call(tmp_path: Path) -> None:
    """Its age counts from its oldest token."""
    config = config_of(tmp_path, max_off_policy_steps=8)
    run_with_an_open_session(config, tmp_path, 4)
    assert check_promise(config).dropped == {}
    spans = [record["versions"] for record in read_lines(config.output / "samples.jsonl")]
    assert max(max(versions) - min(versions) for versions in spans) >= 3
    assert max(line["lag_max"] for line in read_lines(config.output / "metrics.jsonl")) >= 3


def test_a_session_that_outlives_the_largest_lag_is_dropped_in_words_and_sampled_again(tmp_path: Path) -> None:
    """Counted as `stale`, with the version, the step and the key; no other group is."""
    config = config_of(tmp_path, max_off_policy_steps=2)
    logs = run_with_an_open_session(config, tmp_path, 4)
    said = check_promise(config)
    stale = [line for line in logs if line["event"] == "group dropped as stale"]
    assert [(line["ordinal"], line["environment"]) for line in stale] == [
        (ordinal, "helper") for ordinal in said.dropped
    ]
    assert list(said.dropped.values()) == ["stale"]
    assert "more than 2 steps before step" in stale[0]["detail"]
    assert "packer.max_off_policy_steps" in stale[0]["detail"]
    assert all(line["lag_max"] <= 2 for line in read_lines(config.output / "metrics.jsonl"))
