"""A real model trained by real processes on conversations with branches, whose common prefixes are computed once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.ops.recorded_steps import RecordedSteps
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.models import build
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    go_on,
    held_reward,
    processes,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
WORLDS = Path(__file__).with_name("worlds.py")
TEMPLATE = "<bos>{% for message in messages %}{{ message.content }}<eos>{% endfor %}"
STEPS, INTERVAL, KILLED = 6, 2, 4


def config_of(folder: Path, model: Path) -> RunConfig:
    """Six steps of three groups at level 0, the deterministic engine and two ranks; a checkpoint after two steps."""
    folder.mkdir()
    environment: dict[str, Any] = {"type": "python", "name": "agent", "path": f"{WORLDS}:Agent"}
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu", "chat_template": TEMPLATE},
        environments=[environment],
        # in addition to the environment's: the run stands still before the step in which the trainer is killed
        reward=held_reward(folder, calls=3 * (KILLED - 1)),
        # a turn that is cut off is the last one, so most end at a letter
        rollout={"group_timeout": 300.0, "stop": list("abcdefghijkl")},
        packer={"groups_per_step": 3, "sequence_len": 96, "max_async_level": 0},
        trainer={
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "loss": {"type": "gspo"},
            "reference": {"beta": 0.1},
            "num_iterations": 2,
            "num_ranks": 2,
            "checkpoint": {"interval": INTERVAL},
        },
        inference={"engine": {"type": "embedded", "max_sequence_len": 96, "deterministic": True}},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        bus={"control": "ipc", "lease": 3.0},
    )


def weights_of(config: RunConfig) -> bytes:
    """The last checkpoint's model."""
    return (config.output / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_trainer_killed_in_a_step_of_branches_trains_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL between backward pass and update, two steps behind a checkpoint; and replays have the same bits."""
    build(tmp_path / "model")
    quiet, killed = (config_of(tmp_path / name, tmp_path / "model") for name in ("quiet", "killed"))
    faults = tmp_path / "faults"
    faults.mkdir()
    fault = faults / "trainer-0@trainer.gradients"
    for config in (quiet, killed):
        folder = config.output.parent
        with processes(config, folder) as started:
            if config is killed:
                monkeypatch.setenv("GRPO_FAULTS", str(faults))
            up = started.up()
            wait_until(lambda config=config: steps_recorded(config) >= KILLED - 1, "the step before")
            if config is killed:
                fault.write_text("SIGKILL")
            go_on(folder)
            if config is killed:
                wait_until(fault.with_name(f"{fault.name}.hit").exists, "the fault")
            assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert check_promise(config).dropped == {}
    assert weights_of(killed) == weights_of(quiet)

    lines = read_lines(quiet.output / "metrics.jsonl")
    # three that continue the first answer, and one that leaves the answer out
    assert all(3.0 < line["samples_per_completion"] <= 4.0 for line in lines)
    for batches in RecordedSteps(killed).batches(0, STEPS):
        sampled_before = [(batch.sample_shared[1:] > batch.prompt_lengths[:-1]).sum() for batch in batches]
        assert sum(sampled_before) > 0, "no branch shares tokens that were sampled"
    for step in (KILLED, STEPS):
        command = [sys.executable, "-m", "actors", "replay", str(killed.output), "--step", str(step)]
        replayed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert replayed.stdout.count("same bits") == 3
