"""`actors samples RUN --follow`: a run in any state, from its first sample to its end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops.samples.follow import OUTCOME_SECONDS, Follower, outcome_seen
from actors.packer.progress import ALIVE_SECONDS
from actors.telemetry.reporter import Reporter
from tests.actors.ops.compare.test_compare import leave_run
from tests.actors.telemetry.test_samples_tail import record
from tests.ring.harness import ring_config, wait_until

SECONDS = 280.0


def follower(output: Path, outcomes: list[str]) -> Follower:
    """A follower to which each look shows the next state; the clock is at the next look each time."""
    times = iter(range(10_000))
    return Follower(output, lambda _: outcomes.pop(0), lambda: next(times) * OUTCOME_SECONDS)


def test_the_newest_step_comes_first_and_then_each_group(tmp_path: Path) -> None:
    """Of older steps nothing; nothing twice."""
    reporter = Reporter(tmp_path)
    for step, ordinal in ((1, 1), (2, 2), (2, 3)):
        record(reporter, step, ordinal)
    seen = follower(tmp_path, ["running"] * 3)
    assert [one["ordinal"] for one in seen.turn()] == [2, 3]
    record(reporter, 3, 4)
    assert [one["ordinal"] for one in seen.turn()] == [4]
    assert list(seen.turn()) == []


def test_each_change_of_the_run_is_said_once(tmp_path: Path) -> None:
    """From before its start over a kill to its end; the last line of a run that has ended is shown."""
    reporter = Reporter(tmp_path)
    seen = follower(
        tmp_path, ["not started", "not started", "running", "dead", "dead", "running", "stopped by SIGTERM", "done"]
    )
    news, told = [], []
    while not seen.has_ended:
        record(reporter, len(told), len(told))
        told += [one["ordinal"] for one in seen.turn()]
        news += [seen.news.removeprefix(f"{tmp_path}: ")] if seen.news else []
    assert news == [
        "no run has started here yet; waiting for it (Ctrl-C leaves)",
        "the run continues",
        "the run is dead; waiting until it continues (Ctrl-C leaves)",
        "the run continues",
        "the run is stopped by SIGTERM; waiting until it continues (Ctrl-C leaves)",
        "done",
    ]
    assert told == list(range(8))


@pytest.mark.parametrize(("events", "code", "words"), [([], 0, "done"), (["run failed"], 1, "failed: no space")])
def test_a_run_that_has_ended_is_shown_once(
    tmp_path: Path, capsys: Any, events: list[str], code: int, words: str
) -> None:
    """Its newest step, and how it ended."""
    output = leave_run(tmp_path, summary=not events)
    record(Reporter(output), 7, 41)
    record(Reporter(output), 8, 42)
    (output / "logs" / "up.log").write_text(
        "".join(json.dumps({"event": event, "reason": "no space"}) + "\n" for event in events)
    )
    assert main(["samples", str(output), "--follow"]) == code
    printed = capsys.readouterr()
    assert re.findall(r"ordinal (\d+)", printed.out) == ["42"]
    assert printed.err == f"{output}: {words}\n"


def test_a_run_on_another_machine_lives_while_its_progress_is_young(tmp_path: Path) -> None:
    """Its lock can't be seen from here."""
    output = leave_run(tmp_path, summary=False)
    for age, outcome in ((0.0, "running"), (2 * ALIVE_SECONDS, "dead")):
        (output / "progress.json").write_text(json.dumps({"time": time.time() - age, "phase": "running", "step": 3}))
        assert outcome_seen(output) == outcome


def test_a_mistyped_folder_is_refused_at_once(tmp_path: Path, capsys: Any) -> None:
    """No run is going to start where not even the folder above is there."""
    assert main(["samples", str(tmp_path / "outpust" / "mine"), "--follow"]) == 2
    assert "outpust/mine: is not there, and neither is" in capsys.readouterr().err


def test_a_step_and_new_samples_exclude_each_other(tmp_path: Path, capsys: Any) -> None:
    """The parser says so."""
    with pytest.raises(SystemExit, match="2"):
        main(["samples", str(tmp_path), "--follow", "--step", "3"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_run_is_followed_from_before_its_start_over_a_kill_to_its_end(tmp_path: Path) -> None:
    """Every group in samples.jsonl was printed once; Ctrl-C leaves a second follower at once."""
    config = ring_config(tmp_path, trainer={"max_steps": 6})
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "actors"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "out.txt").open("w") as out, (tmp_path / "err.txt").open("w") as err:
        following = subprocess.Popen(
            [*command, "samples", str(run), "--follow", "--num", "1"], stdout=out, stderr=err, env=environment
        )
        left = subprocess.Popen(
            [*command, "samples", str(run), "--follow"], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            wait_until(
                lambda: "no run has started here yet" in (tmp_path / "err.txt").read_text(), "the follower", SECONDS
            )
            assert left.stderr is not None
            assert "waiting for it" in left.stderr.readline()
            left.send_signal(signal.SIGINT)
            assert left.wait(timeout=SECONDS) == 0
            metrics = config.output / "metrics.jsonl"
            first = subprocess.Popen([*command, "up", str(run)], stdout=subprocess.DEVNULL, env=environment)
            wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, "two steps", SECONDS)
            first.kill()
            first.wait(timeout=SECONDS)
            subprocess.run(
                [*command, "up", str(run)], check=True, stdout=subprocess.DEVNULL, timeout=SECONDS, env=environment
            )
            assert following.wait(timeout=SECONDS) == 0
        finally:
            for process in (following, left):
                process.kill()
                process.wait()
    lines = [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]
    recorded = [(str(one["step"]), one["purpose"], str(one["ordinal"])) for one in lines]
    printed = re.findall(r"^step (\d+)  (\w+) ordinal (-?\d+) ", (tmp_path / "out.txt").read_text(), re.MULTILINE)
    assert len(recorded) >= 6
    assert set(printed) >= set(recorded)
    assert (tmp_path / "err.txt").read_text().endswith(": done\n")
