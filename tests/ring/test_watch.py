"""`actors top` and `actors status` beside real processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bus import keys
from bus.topology import Addresses
from schemas.config import RunConfig
from tests.marks import first_of
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    control_address,
    go_on,
    held_reward,
    processes,
    ring_config,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow


def status(run: Path, *overrides: str) -> tuple[int, str]:
    """(exit code, all that it says)."""
    command = [sys.executable, "-m", "actors", "status", str(run), *overrides]
    environment = dict(os.environ)  # not what readline has set beside it: COLUMNS
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60.0, env=environment)
    return done.returncode, done.stdout + done.stderr


def standing(folder: Path, transport: str = "ipc", **bus: object) -> RunConfig:
    """A run of 12 steps that stands still after some, until it is told to go on."""
    return ring_config(
        folder,
        transport,
        inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        reward=held_reward(folder, calls=9),
        trainer={"max_steps": 12, "checkpoint": {"interval": 2}},
        eval={"num_prompts": 0},
        bus={"control": control_address(transport), "lease": 5.0, **bus},  # that no busy machine outlasts
    )


def stand(config: RunConfig) -> None:
    """Wait until the run has come to where it stands."""
    wait_until(lambda: steps_recorded(config) >= 2, "step 2")


@pytest.mark.slow
@pytest.mark.parametrize("transport", first_of(["ipc", "tcp"]))
def test_status_and_top_of_a_living_run_leave_it_alone(tmp_path, transport):
    """With keys on tcp. Who is up, served and trained, exit 0; top ends on Ctrl-C with 0, another with the run."""
    keys.make(tmp_path / "keys")
    config = standing(tmp_path, transport, keys=str(tmp_path / "keys"))
    with processes(config, tmp_path) as started:
        up = started.up()
        stand(config)
        left, stayed = [started.spawn(name, "top", str(config.output)) for name in ("left", "stayed")]
        code, said = status(config.output)
        assert code == 0, said
        wait_until(lambda: "step" in started.text("left"), "the first line of top")
        left.send_signal(signal.SIGINT)
        assert left.wait(PATIENCE_SECONDS) == 0, started.text("left")
        wait_until(lambda: "step" in started.text("stayed"), "the first line of the other top")
        assert up.poll() is None
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert stayed.wait(PATIENCE_SECONDS) == 0, started.text("stayed")
    lines = said.splitlines()
    assert lines[0] == "healthy"
    assert lines[1].startswith("ring  running  step ")
    for name in ("packer-0", "trainer-0", "inference-0", "reward-0", "rollout-0"):
        assert any(line.startswith(f"{name} ") and " s ago  " in line for line in lines), said
    assert any(line.startswith("policy     version ") and line.endswith(" in a checkpoint") for line in lines), said
    assert any(re.match(r"limit      (sampling|scoring|packing|training): ", line) for line in lines), said
    assert started.text("stayed").endswith("\nthe run is done\n")
    assert "Traceback" not in started.text("left") + started.text("stayed")
    assert check_promise(config).dropped == {}
    assert summary_of(config)["ledger"]["reissued"] == 0


@pytest.mark.slow
def test_status_names_a_frozen_reward_actor_and_forgets_it_when_it_is_back(tmp_path):
    """SIGSTOP: exit 1, who is missing and since when; SIGCONT: exit 0 again, and the run ends as promised."""
    config = standing(tmp_path)
    with processes(config, tmp_path) as started:
        up = started.up()
        stand(config)
        frozen = children(up.pid)["reward-0"]
        os.kill(frozen, signal.SIGSTOP)
        said = wait_until(lambda: (told := status(started.config_path))[0] == 1 and told[1], "the status is 1")
        assert said.startswith("not healthy\n")
        assert "trouble    no reward actor is there: nothing is scored\n" in said
        assert "           reward-0 has not been heard for " in said
        assert "limit      scoring: stands still, since reward is not there\n" in said
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: status(started.config_path)[0] == 0, "it is well again")
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_status_of_a_run_that_was_killed_and_of_one_that_is_done_is_told_from_disk(tmp_path):
    """1 and the checkpoint to go on from; then 0. Nobody answers, and no socket folder is left behind."""
    config = standing(tmp_path)
    with processes(config, tmp_path) as started:
        up = started.up()
        stand(config)
        wait_until((config.output / "checkpoints" / "step_2").exists, "a checkpoint")
        up.kill()
        up.wait(PATIENCE_SECONDS)
        code, said = status(config.output)
        assert (code, said.splitlines()[0]) == (1, "not healthy")
        assert "the packer does not answer at bus.control ipc; it wrote " in " ".join(said.split())
        assert "the same command continues from step " in " ".join(said.split())
        go_on(tmp_path)
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        code, said = status(config.output)
        top = started.spawn("top", "top", str(config.output))
        assert top.wait(PATIENCE_SECONDS) == 0
    assert code == 0, said
    assert "\nended      done at step 12, after " in said
    assert started.text("top") == said
    assert not Addresses(config).folder.exists()
    assert json.loads((config.output / "progress.json").read_text())["phase"] == "done"


def test_where_there_is_no_run_status_ends_with_2_and_plain_words(tmp_path):
    """A folder with other things, none at all, and a configuration that has never run."""
    code, said = status(tmp_path)
    assert code == 2
    assert said.startswith(f"{tmp_path}: has no config.resolved.yaml; give a run's output_dir, or the run.yaml")
    assert status(tmp_path / "gone")[0] == 2
    config = ring_config(tmp_path)
    with processes(config, tmp_path) as started:
        code, said = status(started.config_path)
    assert code == 2
    assert f"{config.output}: nothing has run there" in said
