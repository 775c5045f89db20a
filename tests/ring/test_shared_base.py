"""Trainer and engine hold the frozen base once (`up.share_base`): either may be killed, and nothing is lost."""

import os
import signal
from pathlib import Path

import pytest

from tests.models import build
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    go_on,
    held_reward,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.parametrize("victim", ["trainer-0", "inference-0"])
def test_a_run_with_a_shared_base_survives_the_death_of_owner_and_user(tmp_path: Path, victim: str) -> None:
    """The engine starts again with the trainer, and maps the memory of the next one."""
    build(tmp_path / "model")
    config = ring_config(
        tmp_path,
        model={"path": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "lora": {"rank": 4}},
        trainer={"max_steps": 8, "learning_rate": 1e-3, "checkpoint": {"interval": 3}},
        inference={"engine": {"type": "embedded", "max_sequence_len": 64}},
        reward=held_reward(tmp_path, calls=15),
        eval={"num_prompts": 0},
        up={"share_base": True, "torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 4, "step 4")
        before = children(up.pid)
        engine = before["inference-0"]
        maps = Path(f"/proc/{engine}/maps").read_text()
        assert "grpo-actors-weights" in maps
        os.kill(before[victim], signal.SIGKILL)
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    said = (config.output / "logs" / "inference-0.log").read_text()
    check_promise(config)
    assert ("the trainer with the shared base has ended" in said) == (victim == "trainer-0")
