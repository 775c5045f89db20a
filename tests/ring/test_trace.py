"""`actors trace` over a whole run of real processes: running, killed in between, and done."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.ops.trace.timelines import all_spans
from tests.ring.harness import (
    ALL,
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
from tests.trace_format import problems_of

pytestmark = pytest.mark.slow


def trace(run: Path, steps: str, out: Path) -> tuple[int, str]:
    """(exit code, what it says)."""
    command = [sys.executable, "-m", "actors", "trace", str(run), "--step", steps, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_is_killed_in_the_middle_has_one_timeline_of_all_actors(tmp_path: Path) -> None:
    """Traced while it stands still; then its reward actor is killed, and it is traced again after its end."""
    config = ring_config(
        tmp_path,
        inference={"engine": {"type": "fake", "token_seconds": 0.01}},
        reward=held_reward(tmp_path, calls=15),
        trainer={"max_steps": 14},
    )
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 3, "step 3")
        wait_until(lambda: trace(config.output, "1..3", tmp_path / "early.json")[0] == 0, "the spans of step 3")
        os.kill(children(up.pid)["reward-0"], signal.SIGKILL)
        go_on(tmp_path)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        code, said = trace(config.output, "4..13", tmp_path / "ten.json")
    check_promise(config)
    assert code == 0, said
    assert said.startswith("steps 4 to 13: ")
    assert "  trainer-0 main " in said
    assert "for batch" in said
    for name in ("early.json", "ten.json"):
        document = json.loads((tmp_path / name).read_text())
        assert problems_of(document) == []
        events = document["traceEvents"]
        actors = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert actors == {f"{kind}-0" for kind in ALL}
    # each group of the ten steps has its way from the rollout to the trainer
    trained = [o for e in events if e["ph"] == "X" and e["name"] == "step" for o in e["args"]["ordinals"]]
    assert len(trained) >= 30
    assert {e["id"] for e in events if e["ph"] == "s"} == {e["id"] for e in events if e["ph"] == "f"}
    assert len({e["id"] for e in events if e["ph"] == "f"}) == 30
    # the waits of the trainer are marked as waits, one before each step
    trainer = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "trainer-0")
    waits = [e for e in events if e["ph"] == "X" and e["pid"] == trainer and e["name"] == "wait for batch"]
    assert {e["cat"] for e in waits} == {"wait"}
    assert sorted({e["args"]["step"] for e in waits} & set(range(4, 14))) == list(range(4, 14))
    assert 0.0 < sum(e["dur"] for e in waits) < max(e["ts"] + e["dur"] for e in waits)
    recorded = all_spans(config.output / "events")
    assert len([1 for actor, _, _ in recorded.processes if actor == "reward-0"]) == 2
    assert recorded.lost == {}
    kinds = {(span.actor, span.name) for span in recorded.spans}
    assert {
        ("packer-0", "commit"), ("packer-0", "pack"), ("packer-0", "wait for events"), ("packer-0", "evaluation"),
        ("trainer-0", "publish weights"), ("trainer-0", "save checkpoint"), ("inference-0", "load weights"),
        ("rollout-0", "group"), ("rollout-0", "request"), ("rollout-0", "wait for a reward actor"),
        ("reward-0", "score"),
    } <= kinds  # fmt: skip


def test_without_the_key_nothing_is_recorded(tmp_path: Path) -> None:
    """And the command says which key it is."""
    config = ring_config(tmp_path, telemetry={"events_bytes": 0}, trainer={"max_steps": 2}, eval={"num_prompts": 0})
    with processes(config, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 0, started.text("up")
    assert not (config.output / "events").exists()
    code, said = trace(config.output, "1", tmp_path / "one.json")
    assert code == 2
    assert "telemetry.events_bytes above 0" in said
