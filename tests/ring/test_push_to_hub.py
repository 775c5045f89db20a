"""push_to_hub in whole runs: a hub that hangs, fails or goes costs training nothing."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.config import RunConfig
from tests.model_hub import ModelHub, model_hub
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    go_on,
    held_reward,
    processes,
    ring_config,
    scraped,
    wait_until,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A hub that all processes of the run find."""
    with model_hub(tmp_path / "hub") as server:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        yield server


def pushing(folder: Path, *, sections: dict[str, Any] | None = None, **keys: Any) -> RunConfig:
    """A run that pushes whole checkpoints, since the fake learner has no model."""
    pushed = {"hub_model_id": "org/model", "hub_strategy": "all_checkpoints", "retry_pause": 0.2} | keys
    return ring_config(folder, push_to_hub=pushed, **(sections or {}))


def test_each_checkpoint_is_pushed_while_training_goes_on(tmp_path: Path, hub: ModelHub) -> None:
    """Also with a hub that fails once; the count is in /metrics, the result in the last line."""
    config = pushing(tmp_path, sections={"reward": held_reward(tmp_path, calls=18)})
    hub.failures = [500]
    with processes(config, tmp_path) as started:
        up = started.up()
        # checkpoints of steps 3 and 6 are there, and the run waits for its rewards
        pushed = 'grpo_uploader_pushes_total{outcome="pushed"}'
        wait_until(lambda: scraped(config, "uploader-0", pushed) >= 1, "a push in the middle of the run")
        assert scraped(config, "uploader-0", 'grpo_uploader_pushes_total{outcome="failed"}') == 1
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert started.text("up").splitlines()[-1] == "hub: step 8 is on org/model"
    check_promise(config)
    assert hub.titles("org/model") == [f"Step {step} of ring" for step in (3, 6, 8)]


@pytest.mark.long
def test_a_hub_that_never_answers_holds_no_step_up_and_is_said_at_the_end(tmp_path: Path, hub: ModelHub) -> None:
    """All steps are trained; what is not pushed is named, and the same command pushes it, once."""
    config = pushing(tmp_path, hub_strategy="checkpoint", end_timeout=1.0)
    hub.silent = True
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0
        text = started.text("up")
        assert "done: 8 steps" in text
        assert "hub: step 8 is NOT pushed: " in text
        assert "hub: the same command pushes what is missing" in text
        check_promise(config)
        hub.silent = False
        started.config_path.write_text(started.config_path.read_text().replace("end_timeout: 1.0", "end_timeout: 60.0"))
        assert started.up().wait(PATIENCE_SECONDS) == 0
        assert started.text("up").splitlines()[-1] == "hub: step 8 is on org/model"
        # and then there is nothing to do
        assert started.up().wait(PATIENCE_SECONDS) == 0
        assert started.text("up").splitlines()[-1].startswith("nothing to do: done at step 8")
    assert hub.titles("org/model") == ["Step 8 of ring"]


def test_up_killed_in_the_middle_of_a_push_pushes_what_was_missed_and_nothing_twice(
    tmp_path: Path, hub: ModelHub
) -> None:
    """kill -9 after the commit of step 3 and before its answer: the same command goes on with step 6."""
    config = pushing(tmp_path, sections={"reward": held_reward(tmp_path, calls=18), "bus": {"lease": 1.5}})
    hub.loses_answers = True
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: hub.commits("org/model"), "the commit")
        up.send_signal(signal.SIGKILL)
        up.wait(PATIENCE_SECONDS)
        hub.loses_answers = False
        go_on(tmp_path)
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    assert hub.titles("org/model") == [f"Step {step} of ring" for step in (3, 6, 8)]
    record = json.loads((config.output / "uploads.json").read_text())
    assert [one["commit"] for one in record["pushed"]] == [commit.id for commit in hub.commits("org/model")]


@pytest.mark.long
def test_a_stop_by_a_callback_is_an_end_for_the_strategy_end(tmp_path: Path, hub: ModelHub) -> None:
    """As `train()` of transformers ends after early stopping; the checkpoint of the stop is pushed."""
    stops = {"path": f"{Path(__file__).with_name('callbacks.py')}:Stops", "kwargs": {"step": 4}}
    sections = {
        "inference": {"engine": {"type": "fake", "token_seconds": 0.01}},
        "trainer": {"max_steps": 1000, "checkpoint": {"interval": 1000}},
        "callbacks": [stops],
    }
    config = pushing(tmp_path, sections=sections, hub_strategy="end")
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    [pushed] = json.loads((config.output / "uploads.json").read_text())["pushed"]
    assert (config.output / "checkpoints" / f"step_{pushed['step']}").is_dir()
    assert f"hub: step {pushed['step']} is on org/model" in started.text("up")


def test_a_start_without_a_token_is_refused(tmp_path: Path, hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, before anything is written; `actors check` warns."""
    monkeypatch.delenv("HF_TOKEN")
    config = pushing(tmp_path)
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 2
        words = "push_to_hub: there is no token of the hub; set HF_TOKEN, or run `hf auth login`"
        assert started.text("up") == f"{words}\n"
        assert started.spawn("check", "check", str(started.config_path)).wait(PATIENCE_SECONDS) == 0
        assert f"warning: {words}" in started.text("check")
    assert not config.output.exists()
