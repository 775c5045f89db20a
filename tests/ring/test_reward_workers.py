"""A run of the whole ring whose reward function is in a worker process and does what ends processes."""

import json
from pathlib import Path

import pytest

from actors.telemetry.reporter import read_lines
from tests.ring.harness import ALL, REWARDS, ring, ring_config
from tests.ring.rewards import checksum


@pytest.mark.slow
def test_a_worker_that_hangs_dies_and_prints_costs_no_step_and_invents_no_reward(tmp_path: Path) -> None:
    """Every step is trained, and each reward is that of the same function called here."""
    function = {"path": f"{REWARDS}:troubled", "python": "same", "kwargs": {"folder": str(tmp_path)}}
    config = ring_config(tmp_path, reward={"functions": [function], "timeout": 6.0, "on_timeout": "none"})
    with ring(config) as run:
        run.start(*ALL).wait()
        failed = run["reward"].value("grpo_reward_failures_total", reason="reward_lost")
        late = run["reward"].value("grpo_reward_timeouts_total", outcome="retried")
    assert (tmp_path / "hung").exists()
    assert (tmp_path / "died").exists()
    # the only call on a worker that dies fails its attempt; among others it is called again
    assert failed <= 1.0
    assert late == 1.0
    lines = read_lines(config.output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    records = read_lines(config.output / "samples.jsonl")
    assert records
    for record in records:
        assert record["reward"] == checksum(record["completions"], record["completions"], modulus=5)
    ledger = json.loads((config.output / "summary.json").read_text())["ledger"]
    assert ledger["trained"] == 8 * config.packer.groups_per_step
    assert not any(ledger["dropped"].values())
