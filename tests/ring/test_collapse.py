"""The recovery that docs/reference/operations.md promises for a collapse (GrpoRewardCollapse), with a real model."""

import json
from pathlib import Path

import pytest

from schemas.config import RunConfig
from tests.conftest import ModelFolder
from tests.ring.harness import PATIENCE_SECONDS, Processes, check_promise, own_reward, processes, ring_config

HEALTHY, COLLAPSED, LAST = 4, 8, 12
GENTLE, ABSURD = "trainer.learning_rate=1e-5", "trainer.learning_rate=3.0"


def rewards(config: RunConfig) -> list[float]:
    """The mean reward of each recorded step."""
    lines = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [json.loads(line)["reward_mean"] for line in lines]


def train(started: Processes, last_step: int, rate: str) -> None:
    """`actors up` with a learning rate, to a step."""
    assert started.up(rate, f"trainer.max_steps={last_step}").wait(PATIENCE_SECONDS) == 0, started.text("up")


@pytest.mark.long
def test_a_run_that_has_collapsed_is_rewound_and_its_reward_comes_back(
    tmp_path: Path, model_folder: ModelFolder
) -> None:
    """An absurd learning rate ruins the policy; rewound and with a gentle one it samples anew what the ruin wrote."""
    config = ring_config(
        tmp_path,
        model={"path": str(model_folder()), "dtype": "float32", "device": "cpu"},
        rollout={"group_size": 8, "max_tokens": 12, "max_concurrent_groups": 4},
        reward=own_reward("different_letters"),
        packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0},
        trainer={"max_steps": LAST, "checkpoint": {"interval": 2, "keep_last": 9}},
        inference={"engine": {"type": "embedded", "max_sequence_len": 64}},
        eval={"num_prompts": 0},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )
    with processes(config, tmp_path) as started:
        train(started, HEALTHY, GENTLE)
        healthy = sum(rewards(config)) / HEALTHY
        train(started, COLLAPSED, ABSURD)
        ruined = rewards(config)[-1]
        assert ruined < healthy / 2, rewards(config)
        rewind = started.spawn("rewind", "rewind", str(config.output), "--step", str(HEALTHY))
        assert rewind.wait(PATIENCE_SECONDS) == 0, started.text("rewind")
        train(started, LAST, GENTLE)
        assert f"continuing run ring from step {HEALTHY};" in started.text("up")
    after = rewards(config)[HEALTHY:]
    assert len(after) == LAST - HEALTHY
    assert min(after) > 0.75 * healthy, f"healthy {healthy}, ruined {ruined}, then {after}"
    said = check_promise(config)
    assert set(said.dropped.values()) == {"forked"}
    assert len(said.dropped) >= 3 * (COLLAPSED - HEALTHY)
