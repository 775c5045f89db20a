"""The process that keeps a catalogue: it follows the run, ends with its viewer, and is replaced if it dies."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.view import keeper
from actors.view.catalogue import Catalogue, connect
from actors.view.keeper import CatalogueKeeper
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeRun

pytestmark = pytest.mark.timeout(1200)
PATIENCE_SECONDS = 300.0
"""Limit of a wait for something that is known to come: a process of the lowest priority on a busy machine."""


def until(test: Callable[[], bool]) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not test():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def catalogue_of(run: MadeRun, folder: Path) -> Path:
    """An empty catalogue."""
    with closing(Catalogue(run.config, folder)) as made:
        return made.path


def groups(path: Path) -> int:
    """Groups in a catalogue."""
    with closing(connect(path)) as database:
        return int(database.execute("SELECT COUNT(*) FROM groups").fetchone()[0])


def test_the_process_follows_a_run_and_is_replaced_when_it_is_killed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue has each new step; after a kill the page says so, until the next process is at work."""
    monkeypatch.setattr(keeper, "RESTART_SECONDS", 0.2)
    run = make(1)
    path = catalogue_of(run, tmp_path / "cache")
    kept = CatalogueKeeper(run.config, tmp_path / "cache")
    until(lambda: groups(path) == 3)
    first = kept._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: "has ended with -9" in kept.problem)
    run.add_step()
    until(lambda: groups(path) == 6)
    until(lambda: kept.problem == "")
    kept.close()
    assert kept._process is not None
    assert kept._process.wait(PATIENCE_SECONDS) is not None
    run.add_step()
    assert groups(path) == 6


def test_a_viewer_that_is_killed_leaves_no_process(make: Make, tmp_path: Path) -> None:
    """The end of the viewer closes the pipe, whatever its end was."""
    run = make(1)
    path = catalogue_of(run, tmp_path / "cache")
    code = (
        "import sys, time; from pathlib import Path; from actors.view.keeper import CatalogueKeeper, Files\n"
        "kept = CatalogueKeeper(Files(Path(sys.argv[2]), Path(sys.argv[3])), Path(sys.argv[1]))\n"
        "while kept._process is None: time.sleep(0.01)\n"
        "print(kept._process.pid, flush=True); time.sleep(1000)"
    )
    files = [str(path.parent), str(run.config.output), str(run.config.ledger_path)]
    with subprocess.Popen([sys.executable, "-c", code, *files], stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        pid = int(viewer.stdout.readline())
        until(lambda: groups(path) == 3)
        viewer.kill()
    # a zombie of a parent that is gone is taken by init
    until(lambda: not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text())


def test_a_process_that_can_not_be_started_is_tried_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with too many processes: the page says so, until there is room."""
    monkeypatch.setattr(keeper, "RESTART_SECONDS", 0.2)
    has_room, started = threading.Event(), subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        if not has_room.is_set():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return started(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    run = make(1)
    kept = CatalogueKeeper(run.config, tmp_path / "cache")
    until(lambda: "can't be started now" in kept.problem)
    has_room.set()
    until(lambda: kept.problem == "")
    until(lambda: groups(catalogue_of(run, tmp_path / "cache")) == 3)
    kept.close()
