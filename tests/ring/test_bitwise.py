"""Real weights, bit by bit: a tiny transformers model, trained by real processes that are killed on the way."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from schemas.config import RunConfig
from tests.marks import first_of
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

pytestmark = pytest.mark.slow
Channel = Literal["filesystem", "rendezvous", "device"]


def model_config(folder: Path, model: Path, channel: Channel = "filesystem", **trainer: object) -> RunConfig:
    """Eight steps at level 0 with the deterministic engine; those after the first five or six when told to go on."""
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0},
        trainer={"max_steps": 8, "learning_rate": 1e-2, "checkpoint": {"interval": 3}} | trainer,
        inference={"engine": {"type": "embedded", "max_sequence_len": 64, "deterministic": True}},
        weights={"channel": channel},
        eval={"num_prompts": 0},
        ledger={"keep_steps": 100},
        up={"torch_threads": {"trainer": 1, "inference": 1}},
        reward=held_reward(folder, calls=18),
        bus={"control": "ipc", "lease": 3.0},
    )


def weights_of(config: RunConfig) -> bytes:
    """The last checkpoint's model."""
    return (config.output / "checkpoints" / "step_8" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    folder = tmp_path_factory.mktemp("model")
    build(folder)
    return folder


MOVES = {"sync": {"every_steps": 2, "alpha": 0.3}}
"""Reference that follows the policy."""


@pytest.mark.parametrize(
    "trainer", first_of([{}, {"reference": {"beta": 0.1, **MOVES}}]), ids=["no reference", "moving reference"]
)
def test_killed_processes_leave_the_same_weights(tmp_path: Path, model: Path, trainer: dict[str, object]) -> None:
    """Packer, rollout, trainer and engine get SIGKILL in turn; the model is that of an undisturbed run, to the bit."""
    quiet, disturbed = (model_config(tmp_path / name, model, **trainer) for name in ("quiet", "disturbed"))
    for config in (quiet, disturbed):
        config.output.parent.mkdir()
        with processes(config, config.output.parent) as started:
            up = started.up()
            for step, name in enumerate(("packer-0", "rollout-0", "trainer-0", "inference-0"), start=1):
                if config is quiet:
                    break
                wait_until(lambda step=step, config=config: steps_recorded(config) >= step, f"step {step}")
                old = children(up.pid)[name]
                os.kill(old, signal.SIGKILL)
                wait_until(lambda up=up, name=name, old=old: children(up.pid).get(name, old) != old, f"{name} is back")
            go_on(config.output.parent)
            assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert check_promise(config).dropped == {}
    assert weights_of(disturbed) == weights_of(quiet)


SEVERAL_UPDATES = {
    "num_iterations": 2,
    "num_minibatches": 3,
    "loss": {"type": "dapo"},
    "reference": {"beta": 0.1, **MOVES},
    "entropy_coef": 0.01,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "channel"),
    [(SEVERAL_UPDATES, "filesystem"), ({}, "rendezvous"), ({}, "device")],
    ids=["six updates, files", "one update, broadcast", "one update, mapped memory"],
)
def test_two_ranks_train_a_real_model_and_every_step_is_replayed_to_the_bit(
    tmp_path: Path, model: Path, trainer: dict[str, object], channel: Channel
) -> None:
    """`actors replay` in one process has the loss, gradient norm and weights that two processes had."""
    config = model_config(tmp_path, model, channel, num_ranks=2, **trainer)
    go_on(tmp_path)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    for step in (2, 7):
        command = [sys.executable, "-m", "actors", "replay", str(config.output), "--step", str(step)]
        replayed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert replayed.stdout.count("same bits") == 3
