"""Trackers themselves: whole runs that are killed, resumed and rewound, read back with each tracker's own reader."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from actors.trackers.loop import NICENESS
from schemas.config import RunConfig, dump_config
from tests.chaos.disk import filled, small_disk
from tests.ring.harness import PATIENCE_SECONDS, check_promise, children, go_on, held_reward, ring_config, wait_until
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
OTHERS = ("trackio", "mlflow", "wandb", "swanlab")
KINDS = ("tensorboard", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS))
STEPS = 12
OFFLINE = ("wandb", "swanlab")


def _python() -> str:
    python = ROOT / ".venv-extras/bin/python"
    if not python.is_file():
        missing("make system-deps brings the trackers")
    return str(python)


class Run:
    """A run with one tracker, by real processes."""

    def __init__(self, folder: Path, kind: str, keys: dict[str, Any] | None = None, **sections: Any) -> None:
        keys = keys or {"type": kind} | ({"mode": "offline"} if kind in OFFLINE else {})
        telemetry = {"trackers": [keys], "sample_groups_per_step": 1}
        self.kind, self.folder = kind, folder
        self.config: RunConfig = ring_config(
            folder, trainer={"max_steps": STEPS, "checkpoint": {"interval": 3}}, telemetry=telemetry, **sections
        )
        self.path = folder / "run.yaml"
        self.path.write_text(dump_config(self.config))
        self.environment = os.environ | {
            "TRACKIO_DIR": str(self.config.output / "trackers/trackio"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = folder / "up.txt"

    def start(self) -> "subprocess.Popen[bytes]":
        """Start `actors up`."""
        with self.log.open("ab") as log:
            command = [_python(), "-m", "actors", "up", str(self.path)]
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=ROOT)

    def end(self, up: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of `actors up`; what a slow tracker has not taken by then, the same command sends."""
        assert up.wait(PATIENCE_SECONDS) == 0, self.log.read_text()
        if self.journal()[-1] != {"finished": True}:
            assert self.start().wait(PATIENCE_SECONDS) == 0, self.log.read_text()

    def rewind(self, step: int) -> None:
        """Return to a checkpoint."""
        command = [_python(), "-m", "actors", "rewind", str(self.config.output), "--step", str(step)]
        subprocess.run(command, check=True, env=self.environment, cwd=ROOT, capture_output=True)

    def journal(self) -> list[dict[str, Any]]:
        """Lines of the tracker's journal; none before it is there."""
        path = self.config.output / f"trackers/{self.kind}.jsonl"
        return read_lines(path) if path.exists() else []

    def held(self) -> int:
        """Newest step that the tracker surely has."""
        return max((line["held"] for line in self.journal() if "held" in line), default=-1)

    def shown(self, folder: Path | None = None) -> dict[str, list[tuple[str, int, float]]]:
        """What the tracker's own reader shows, by run; `folder` by default as without `logging_dir`."""
        command = [_python(), str(ROOT / "tests/system/tracker_reader.py"), self.kind]
        command.append(str(folder or self.config.output / "trackers" / self.kind))
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    def check(self, points: list[tuple[str, int, float]]) -> None:
        """Each step once, with the values of metrics.jsonl, evaluations at their versions, a table per step."""
        counts = Counter((name, step) for name, step, _ in points)
        assert [key for key, number in counts.items() if number > 1] == []
        values = {(name, step): value for name, step, value in points}
        lines = {line["step"]: line for line in read_lines(self.config.output / "metrics.jsonl")}
        assert sorted(lines) == list(range(1, STEPS + 1))
        for name in ("reward_mean", "reward/characters_in_place", "tokens", "loss"):
            if name in lines[1]:
                told = {step: value for (found, step), value in values.items() if found == name}
                assert told == pytest.approx({step: line[name] for step, line in lines.items()}, rel=1e-6), name
        evaluated = {line["version"] for line in read_lines(self.config.output / "evals.jsonl")}
        assert {step for name, step in values if name == "eval/reverse_text/mean_reward"} == evaluated
        tables = {step: rows for (name, step), rows in values.items() if name == "completions"}
        assert tables == dict.fromkeys(range(1, STEPS + 1), self.config.rollout.group_size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_and_rewound_shows_each_step_once(tmp_path: Path, kind: str) -> None:
    """kill -9 of the tracker's process, then of the whole run, then a return to an older step."""
    run = Run(tmp_path, kind, reward=held_reward(tmp_path, calls=26), bus={"lease": 3.0}, eval={"every_steps": 4})
    up = run.start()
    try:
        wait_until(lambda: run.held() >= 2, "two steps in the tracker")
        os.kill(children(up.pid)["tracker-0"], signal.SIGKILL)
        wait_until(lambda: run.held() >= 6, "steps after the death of the tracker's process")
        up.send_signal(signal.SIGKILL)
        up.wait(PATIENCE_SECONDS)
        before = {line["step"]: line["weights"] for line in read_lines(run.config.output / "metrics.jsonl")}
        run.rewind(3)
        go_on(tmp_path)
        up = run.start()
        assert up.wait(PATIENCE_SECONDS) == 0, run.log.read_text()
    finally:
        up.kill()
    check_promise(run.config)
    assert run.journal()[-1] == {"finished": True}, run.log.read_text()
    assert 6 in before
    shown = run.shown()
    newest = max(shown, key=lambda name: (len(name), name))
    run.check(shown[newest])
    # TensorBoard forgets the given-up steps; others have them in a run of their own
    assert len(shown) == (1 if kind == "tensorboard" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tracker_holds_up_nothing_and_catches_up(tmp_path: Path, kind: str) -> None:
    """SIGSTOP of its process: the run trains to its end meanwhile, and the tracker then gets what it missed."""
    run = Run(tmp_path, kind, reward=held_reward(tmp_path, calls=9))
    up = run.start()
    frozen = 0
    try:
        wait_until(lambda: run.held() >= 1, "a step in the tracker")
        actors = children(up.pid)
        frozen = actors["tracker-0"]
        # while it works, the run goes first
        niceness = {name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in actors.items()}
        assert niceness["tracker-0"] == min(19, niceness["trainer-0"] + NICENESS)
        os.kill(frozen, signal.SIGSTOP)
        go_on(tmp_path)
        wait_until((run.config.output / "summary.json").exists, "the end of training")
        assert run.held() < STEPS
        os.kill(frozen, signal.SIGCONT)
        assert up.wait(PATIENCE_SECONDS) == 0, run.log.read_text()
    finally:
        up.kill()
    check_promise(run.config)
    (points,) = run.shown().values()
    run.check(points)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_of_a_tracker_holds_up_nothing_and_it_catches_up(tmp_path: Path, kind: str) -> None:
    """The run trains to its end meanwhile and counts the failures; with room again the tracker gets what it missed."""
    run = Run(tmp_path, kind, reward=held_reward(tmp_path, calls=9))
    # all that the tracker writes, its journal too
    disk = run.config.output / "trackers"
    with small_disk(disk) as why:
        if why:
            missing(why)
        up = run.start()
        try:
            wait_until(lambda: run.held() >= 1, "a step in the tracker")
            with filled(disk):
                go_on(tmp_path)
                wait_until((run.config.output / "summary.json").exists, "the end of training")
                log = run.config.output / "logs/tracker-0.log"
                wait_until(lambda: "tracker failed; training goes on" in log.read_text(), "a failure in the log")
                assert {"finished": True} not in run.journal()
                check_promise(run.config)
            run.end(up)
        finally:
            up.kill()
        assert all(path.stat().st_size for path in disk.rglob("events.*"))
        (points,) = run.shown().values()
        run.check(points)


def test_what_a_frozen_tracker_missed_is_sent_by_the_same_command(tmp_path: Path) -> None:
    """Killed with the run that is done: the next `actors up` trains nothing and sends the rest."""
    run = Run(tmp_path, "tensorboard", reward=held_reward(tmp_path, calls=9))
    up = run.start()
    try:
        wait_until(lambda: run.held() >= 1, "a step in the tracker")
        os.kill(children(up.pid)["tracker-0"], signal.SIGSTOP)
        go_on(tmp_path)
        wait_until((run.config.output / "summary.json").exists, "the end of training")
        time.sleep(1.0)  # the packer tells the others of the end
        up.kill()
        up.wait(PATIENCE_SECONDS)
        up = run.start()
        assert up.wait(PATIENCE_SECONDS) == 0, run.log.read_text()
    finally:
        up.kill()
    assert "sending the rest to the tracker" in run.log.read_text()
    (points,) = run.shown().values()
    run.check(points)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_benchmark_measures_each_tracker_that_it_is_given(tmp_path: Path) -> None:
    """In a few steps, whose rates say nothing: one row without a tracker, and one for each state of each tracker."""
    figures = tmp_path / "figures.json"
    command = [_python(), "-m", "benchmarks.trackers", "--trackers", "tensorboard,mlflow", "--json", str(figures)]
    done = subprocess.run([*command, "--steps", "60", "--rounds", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["trackers"]
    states = ("sending", "frozen") if "full: left out" in done.stdout else ("sending", "frozen", "full")
    found = [(row["tracker"], row["state"]) for row in rows]
    assert found == [("none", ""), *((tracker, state) for tracker in ("tensorboard", "mlflow") for state in states)]
    assert all(row["completions_per_second"] > 0 for row in rows)
    shares = {(row["tracker"], row["state"]): row["cpu_share"] for row in rows}
    # a stopped process uses nothing, and one that sends uses something
    assert all(shares[tracker, "frozen"] < shares[tracker, "sending"] for tracker in ("tensorboard", "mlflow"))
