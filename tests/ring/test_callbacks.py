"""Callbacks of run.yaml in whole runs: real processes, and transformers' own EarlyStoppingCallback."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.process.stop_wish import StopWish, ask_to_stop
from schemas.config import RunConfig
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    children,
    go_on,
    held_reward,
    own_reward,
    processes,
    ring_config,
    scraped,
    steps_recorded,
    summary_of,
    wait_until,
)

pytestmark = pytest.mark.slow

FILE = Path(__file__).with_name("callbacks.py")


def callback(name: str, required: bool = False, **kwargs: Any) -> dict[str, Any]:
    """An item of `callbacks`."""
    return {"path": f"{FILE}:{name}", "kwargs": kwargs, "required": required}


def notes(folder: Path) -> list[tuple[str, int]]:
    """Events and steps that `Notes` has written."""
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(event, step) for event, step, _ in map(json.loads, lines)]


def of(told: list[tuple[str, int]], *events: str) -> list[int]:
    """Steps of some events."""
    return [step for event, step in told if event in events]


def newest_step(config: RunConfig) -> int:
    """Step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step_")) for path in (config.output / "checkpoints").glob("step_*"))


def test_each_event_is_told_once_in_order_with_the_state_of_its_step(tmp_path: Path) -> None:
    """A step begins, ends and is logged; evaluations and checkpoints come when they are there."""
    config = ring_config(
        tmp_path,
        eval={"num_prompts": 3, "every_steps": 4},
        callbacks=[callback("Notes", file=str(tmp_path / "notes"))],
    )
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    told = notes(tmp_path)
    check_promise(config)
    assert told[0] == ("on_train_begin", 0)
    assert told[-1] == ("on_train_end", 8)
    steps = [one for one in told if one[0] in ("on_step_begin", "on_step_end", "on_log")]
    assert steps == [(event, step) for step in range(1, 9) for event in ("on_step_begin", "on_step_end", "on_log")]
    # versions 0, 4 and 8; steps 3, 6 and 8
    assert len(of(told, "on_evaluate")) == 3
    assert len(of(told, "on_save")) == 3
    remembered = json.loads((config.output / "callbacks.json").read_text())
    assert (remembered["told"]["step"], remembered["told"]["evaluated"], remembered["told"]["saved"]) == (8, 8, 8)


def test_a_killed_process_loses_no_event_and_an_exception_no_step(tmp_path: Path) -> None:
    """One callback kills the process, another one raises in each step: both are told, and training goes on."""
    config = ring_config(
        tmp_path,
        reward=held_reward(tmp_path, calls=15),
        callbacks=[
            callback("Raises"),
            callback("Notes", file=str(tmp_path / "notes")),
            callback("Kills", file=str(tmp_path / "killed"), step=3),
        ],
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: ("on_log", 4) in notes(tmp_path), "events after the kill")
        failures = wait_until(
            lambda: scraped(config, "callbacks-0", 'grpo_callbacks_failures_total{event="on_log"}'), "the count"
        )
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    told = notes(tmp_path)
    assert list(dict.fromkeys(of(told, "on_log"))) == list(range(1, 9))
    # the step of the kill was begun twice, and no event was left out
    assert of(told, "on_step_begin").count(3) == 2
    assert sorted(set(of(told, "on_step_end"))) == list(range(1, 9))
    assert failures >= 1
    assert "callbacks-0 ended by SIGKILL; training goes on" in started.text("up")
    log = (config.output / "logs" / "callbacks-0.log").read_text()
    assert log.count("Traceback") == 2, "once in each of the two processes"
    assert "no_such_metric" in log


def test_up_that_is_killed_goes_on_telling_where_it_was(tmp_path: Path) -> None:
    """kill -9 of `actors up`: the same command tells what is missing, and begins no step twice but the last one."""
    config = ring_config(
        tmp_path,
        bus={"lease": 1.5},
        reward=held_reward(tmp_path, calls=15),
        callbacks=[callback("Notes", file=str(tmp_path / "notes"))],
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: ("on_log", 3) in notes(tmp_path), "three steps")
        up.send_signal(signal.SIGKILL)
        up.wait(PATIENCE_SECONDS)
        go_on(tmp_path)
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    told = of(notes(tmp_path), "on_log")
    assert list(dict.fromkeys(told)) == list(range(1, 9))
    # the process may have died between a call and its note
    assert len(told) <= 9
    assert of(notes(tmp_path), "on_train_end") == [8]


def test_a_required_callback_that_raises_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """Exit code 1, and the words of the exception; the same command goes on when it is repaired."""
    config = ring_config(tmp_path, trainer={"max_steps": 100_000}, callbacks=[callback("Raises", required=True)])
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 1
        text = started.text("up")
    assert f"callbacks.0: on_log of {FILE}:Raises failed: KeyError: 'no_such_metric'" in text


def test_a_callback_that_can_not_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    """As an error of the configuration, with its key."""
    config = ring_config(tmp_path, callbacks=[callback("Stops", steps=3)], reward=held_reward(tmp_path, calls=0))
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 2
        assert "callbacks.0: " in started.text("up")
        assert "unexpected keyword argument 'steps'" in started.text("up")


def test_a_callback_that_hangs_holds_no_step_up(tmp_path: Path) -> None:
    """All steps are trained while it waits in its first event, and it is told all of them afterwards."""
    gate = tmp_path / "gate"
    config = ring_config(
        tmp_path, callbacks=[callback("Hangs", file=str(gate)), callback("Notes", file=str(tmp_path / "notes"))]
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until((config.output / "summary.json").exists, "the end of training")
        assert steps_recorded(config) == 8
        assert notes(tmp_path) == []
        gate.touch()
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert of(notes(tmp_path), "on_log") == list(range(1, 9))
    assert of(notes(tmp_path), "on_train_end") == [8]


@pytest.mark.long
def test_the_wish_to_stop_is_a_stop_in_order_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A checkpoint is saved, on_train_end is called, the exit code is 0; the next start trains on from there."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.01}},
        trainer={"max_steps": 30, "checkpoint": {"interval": 100}},
        callbacks=[callback("Stops", step=4), callback("Notes", file=str(tmp_path / "notes"))],
    )
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
        first, saved = started.text("up"), newest_step(config)
        assert 4 <= saved < 30
        assert "stopping: the callback Stops wishes so after step 4" in first
        assert f"saved step {saved}; the same command continues the run" in first
        assert notes(tmp_path)[-1] == ("on_train_end", saved)
        assert not (config.output / "stop.json").exists()
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(config)
    assert of(notes(tmp_path), "on_train_end") == [saved, 30]
    assert of(notes(tmp_path), "on_log") == list(range(1, 31))


@pytest.mark.long
def test_a_wish_that_was_not_carried_out_is_carried_out_at_the_next_start(tmp_path: Path) -> None:
    """`actors up` was killed while it stopped; a wish for another run counts for nothing."""
    config = ring_config(
        tmp_path,
        bus={"lease": 1.5},
        trainer={"max_steps": 8},
        reward=held_reward(tmp_path, calls=9),
        callbacks=[callback("Notes", file=str(tmp_path / "notes"))],
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 1, "a step")
        ask_to_stop(config.output, StopWish("another", "Old", 1))
        assert children(up.pid)
        wait_until(lambda: ("on_log", 1) in notes(tmp_path), "its events")
        up.send_signal(signal.SIGKILL)
        up.wait(PATIENCE_SECONDS)
        run = json.loads((config.output / "callbacks.json").read_text())["run"]
        ask_to_stop(config.output, StopWish(run, "Mine", 1))
        go_on(tmp_path)
        assert started.up().wait(PATIENCE_SECONDS) == 0
        text = started.text("up")
        assert "Old" not in text
        assert "stopping: the callback Mine wishes so after step 1" in text
        assert started.up().wait(PATIENCE_SECONDS) == 0
    assert summary_of(config)["steps"] == 8


def test_early_stopping_of_transformers_ends_a_run_that_learns_nothing(tmp_path: Path) -> None:
    """With its own code, as it comes from the package, and its patience kept across a restart of its process."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.01}},
        trainer={"max_steps": 100_000, "checkpoint": {"interval": 5}},
        reward=own_reward("constant"),
        eval={"num_prompts": 2, "every_steps": 1, "exact_match": None},
        callbacks=[
            {"path": "transformers:EarlyStoppingCallback", "kwargs": {"early_stopping_patience": 3}},
            callback("Notes", file=str(tmp_path / "notes")),
        ],
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert "stopping: the callback EarlyStoppingCallback wishes so" in started.text("up")
    # the first evaluation is the best, and the next three are no better
    assert len(of(notes(tmp_path), "on_evaluate")) >= 4
    states = json.loads((config.output / "callbacks.json").read_text())["states"]
    counter = states["0 transformers:EarlyStoppingCallback"]["early_stopping_patience_counter"]
    assert counter >= 3
