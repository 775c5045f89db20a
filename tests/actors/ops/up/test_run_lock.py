"""The claim to an output_dir; that `actors up` lives by it is tested in tests/ring/test_up.py."""

import os
import subprocess
import sys
import threading

import pytest

from actors.ops.up.run_lock import hold_run_lock
from schemas.errors import ConfigError
from tests.ring.harness import wait_until

WAITING = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def actor():
    """`actor(claim)` starts a process that inherits the claim and lives until its input ends."""
    started = []

    def start(run_lock: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", WAITING]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[run_lock])
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.communicate()


def test_output_is_claimed_once_and_the_holder_is_named(tmp_path):
    """The second one is told pid and ways out; after the first has ended it gets it."""
    with hold_run_lock(tmp_path), pytest.raises(ConfigError) as caught, hold_run_lock(tmp_path):
        pass
    assert str(caught.value).startswith(
        f"output_dir: {tmp_path}: a run is going on here (actors up, pid {os.getpid()}); "
    )
    with hold_run_lock(tmp_path):
        pass


def test_claim_waits_for_the_actors_of_the_one_before(tmp_path, actor, capsys):
    """They outlive their `actors up` for a moment; the next one begins when the last of them has gone."""
    with hold_run_lock(tmp_path) as run_lock:
        first, second = actor(run_lock), actor(run_lock)
    second.communicate()
    got = threading.Event()

    def claim_it() -> None:
        with hold_run_lock(tmp_path, patience_seconds=120.0):
            got.set()

    thread = threading.Thread(target=claim_it, daemon=True)
    thread.start()
    said = []
    wait_until(lambda: said.append(capsys.readouterr().err) or "".join(said), "it says that it waits")
    assert not got.wait(0.2), "one of them lives"
    first.communicate()
    assert got.wait(60.0)
    thread.join()
    assert "".join(said) + capsys.readouterr().err == "waiting for the actors of the previous run to exit\n"


def test_what_user_code_left_behind_does_not_block_for_ever(tmp_path, actor, capsys):
    """After the patience a warning; the actors of the new run are waited for as before."""
    with hold_run_lock(tmp_path) as run_lock:
        left = actor(run_lock)
    with hold_run_lock(tmp_path, patience_seconds=0.1) as run_lock:
        ours = actor(run_lock)
    assert "actors.lock is still held after 0.1 s; going on" in capsys.readouterr().err
    left.communicate()
    with hold_run_lock(tmp_path, patience_seconds=0.1):
        assert "still held" in capsys.readouterr().err
    ours.communicate()
    with hold_run_lock(tmp_path, patience_seconds=0.0):
        assert capsys.readouterr().err == ""


def test_full_disk_does_not_keep_anybody_from_the_claim(tmp_path, monkeypatch):
    """The pid is for people; the lock needs no space."""
    (tmp_path / ".up.lock").symlink_to("/dev/full")
    with hold_run_lock(tmp_path):
        pass
