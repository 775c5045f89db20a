"""A run of the whole ring whose reward is a model, which is killed in the middle of the run."""

import json
import os
import signal
from pathlib import Path

import pytest

from actors.telemetry.reporter import read_lines
from tests.actors.reward.test_reward_model import worker
from tests.reward_models import build_reward_model, direct_logit
from tests.ring.harness import ALL, ring, ring_config, wait_until


@pytest.mark.slow
def test_a_run_trains_on_a_reward_model_that_is_killed(tmp_path: Path) -> None:
    """Every step is trained, and each reward is the model's logit of prompt and completion."""
    build_reward_model(tmp_path / "judge")
    functions = [{"model": str(tmp_path / "judge"), "device": "cpu"}]
    config = ring_config(tmp_path, reward={"functions": functions, "advantage": {"type": "zscore"}})
    metrics = config.output / "metrics.jsonl"
    with ring(config) as run:
        run.start(*ALL)
        wait_until(lambda: metrics.exists() and len(read_lines(metrics)) >= 2, "two steps")
        os.kill(worker(), signal.SIGKILL)
        run.wait()
    assert [line["step"] for line in read_lines(metrics)] == list(range(1, 9))
    records = read_lines(config.output / "samples.jsonl")
    assert records
    for record in records:
        assert record["reward"] == record["rewards"]["judge"]
        expected = [direct_logit(tmp_path / "judge", record["prompt"] + text) for text in record["completions"]]
        assert record["reward"] == pytest.approx(expected, abs=1e-5)
    ledger = json.loads((config.output / "summary.json").read_text())["ledger"]
    assert ledger["trained"] == 8 * config.packer.groups_per_step
    assert not any(ledger["dropped"].values())
