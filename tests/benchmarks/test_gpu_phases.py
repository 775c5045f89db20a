"""Phases of the GPU benchmark: limits of time, errors as results, and a rehearsal of all of them on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import phases
from benchmarks.gpu.__main__ import PHASES, main
from benchmarks.gpu.phases import (
    CUT_OFF,
    DONE,
    NOT_HERE,
    RAISED,
    NotHereError,
    Report,
    problems,
    run_apart,
    run_guarded,
)
from benchmarks.machine import ROOT
from tests.processes import has_ended, running
from tests.ring.harness import wait_until

STUCK = """
import signal, sys, time
from pathlib import Path
from benchmarks.gpu import phases

phases.GRACE_SECONDS = 0.3

def stuck():
    report.put("before", 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as in a call that never comes back to Python
    time.sleep(60)

report = phases.Report(Path(sys.argv[1]), {"phase": "stuck"})
phases.run_guarded(report, 5.0, stuck)
"""
DEAF = """
import subprocess, sys, time
from pathlib import Path

child = subprocess.Popen(["sleep", "600"])
Path(sys.argv[1]).with_name("pid").write_text(str(child.pid))
time.sleep(600)
"""


def ended(folder: Path, work: Callable[[Report], object], seconds: float = 240.0) -> dict[str, Any]:
    """Run a phase in this process; return the contents of its file."""
    path = folder / "phase.json"
    report = Report(path, {"phase": "phase"})
    run_guarded(report, seconds, lambda: work(report))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_phase_writes_its_results(tmp_path: Path) -> None:
    """Beside them no other file is left."""
    found = ended(tmp_path, lambda report: report.put("value", 3))
    assert (found["ended"], found["results"]) == (DONE, {"value": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["phase.json"]


def test_an_error_is_a_result_with_type_words_and_frames(tmp_path: Path) -> None:
    """Values written before stay."""

    def work(report: Report) -> None:
        report.put("value", 3)
        raise ZeroDivisionError("three by none")

    found = ended(tmp_path, work)
    assert (found["ended"], found["results"]) == (RAISED, {"value": 3})
    assert (found["error"]["type"], found["error"]["words"]) == ("ZeroDivisionError", "three by none")
    assert "three by none" in found["error"]["frames"][-1]
    assert [path.name for path in tmp_path.iterdir()] == ["phase.json"]


def test_a_phase_that_can_not_run_says_why(tmp_path: Path) -> None:
    """A result in words, and no error."""

    def work(report: Report) -> None:
        raise NotHereError("no such package")

    found = ended(tmp_path, work)
    assert (found["ended"], found["error"]) == (NOT_HERE, {"words": "no such package"})


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    """The failed case, and the case whose check fails, are named as problems."""

    def work(report: Report) -> None:
        for number in range(4):
            with report.case("cases", {"number": number}) as found:
                if number == 1:
                    raise ValueError("one")
                if number == 2:
                    raise NotHereError("no GPU")
                found["ok"] = number != 3

    found = ended(tmp_path, work)
    rows = found["results"]["cases"]
    assert found["ended"] == DONE
    assert [row["number"] for row in rows] == [0, 1, 2, 3]
    assert rows[1][RAISED]["words"] == "one"
    assert rows[2][NOT_HERE] == "no GPU"
    assert list(problems(found["results"])) == ["cases[1].raised", "cases[3].ok"]


def test_the_limit_cuts_a_phase_off_and_keeps_its_rows(tmp_path: Path) -> None:
    """The case in which the limit came is marked, and the frames name its line."""

    def work(report: Report) -> None:
        report.put("value", 3)
        with report.case("cases", {"number": 0}):
            # the limit comes now, and not while this test is held up before
            _ = signal.setitimer(signal.ITIMER_REAL, 0.2), time.sleep(60)

    found = ended(tmp_path, work, seconds=60.0)
    assert found["ended"] == CUT_OFF
    assert found["results"] == {"value": 3, "cases": [{"number": 0, CUT_OFF: True}]}
    assert found["error"]["words"] == "not done within 60 s"
    assert any("time.sleep(60)" in frame for frame in found["error"]["frames"])
    assert list(problems(found["results"])) == ["cases[0].cut off"]


@pytest.mark.slow
def test_a_phase_that_hears_no_alarm_is_ended_with_its_frames(tmp_path: Path) -> None:
    """As inside a compiler: the process is ended from a thread of its own, and the record written by its parent."""
    path = tmp_path / "stuck.json"
    found = run_apart([sys.executable, "-c", STUCK, str(path)], path, 5.0, os.environ | {"PYTHONPATH": str(ROOT)})
    assert found == json.loads(path.read_text(encoding="utf-8"))
    assert (found["ended"], found["results"], found["error"]["type"]) == (CUT_OFF, {"before": 1}, "stuck")
    assert any("in stuck" in frame for frame in found["error"]["frames"])
    assert [path.name for path in tmp_path.iterdir()] == ["stuck.json"]


@pytest.mark.slow
def test_a_process_that_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has written nothing."""
    monkeypatch.setattr(phases, "GRACE_SECONDS", 0.3)
    path, pid = tmp_path / "deaf.json", tmp_path / "pid"

    class Begun(subprocess.Popen[bytes]):
        """Its limit begins once it has started its child: on a busy machine that takes seconds."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            wait_until(lambda: pid.exists() and pid.read_text(), "the process's child")

    monkeypatch.setattr(subprocess, "Popen", Begun)
    found = run_apart([sys.executable, "-c", DEAF, str(path)], path, 0.1, os.environ)
    assert (found["ended"], found["error"]["words"]) == (CUT_OFF, "did not end and was killed")
    # a killed process is listed until the kernel has come to it
    wait_until(lambda: has_ended(int(pid.read_text())), "the end of the killed process's child", 60.0)


def test_a_process_that_dies_in_the_middle_is_a_result(tmp_path: Path) -> None:
    """Its exit code is told."""
    path = tmp_path / "dead.json"
    found = run_apart([sys.executable, "-c", "import os; os._exit(7)"], path, 60.0, os.environ)
    assert found["error"] == {"type": "ended", "words": "ended with exit code 7 in the middle", "frames": []}


def test_an_unknown_phase_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs."""
    with pytest.raises(SystemExit):
        main(["--phases", "env,colour", "--out", str(tmp_path / "out")])
    assert "colour: no such phase; there are env, kernels, learner" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_benchmark_that_is_stopped_leaves_no_phase_behind(tmp_path: Path) -> None:
    """SIGTERM reaches the process that has started the phase, whose own process ends with it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--phases", "learner", "--tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path), "--keep", str(tmp_path / "kept")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "learner.json").exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    # a killed process is listed until the kernel has come to it
    wait_until(
        lambda: not any(str(tmp_path) in word for process in running() for word in process.command),
        "the end of the phase",
        60.0,
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_phase_can_be_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """With toy sizes: each has a result, and no case an error or a failed check; what needs a GPU says so.

    `make rehearsal` makes the environment of a GPU machine: torch, transformers, peft and the wheels brought along.
    """
    # without what a developer's shell adds to the search path
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    bare = ROOT / ".venv-bare" / "bin" / "python"
    python = str(bare) if bare.exists() else sys.executable
    command = [python, "-m", "benchmarks.gpu", "--phases", "all", "--tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in PHASES:
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
        assert found["ended"] == (NOT_HERE if name == "vllm_probe" else DONE), found["error"]
        assert found["results"] or found["error"]["words"]
        assert found["machine"]["commit"]
