"""How one actor tells why it ends."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from schemas.config import dump_config
from tests.ring.harness import ring_config


def _read(terminal):
    """All that a terminal has, which the kernel may hand over in pieces: without a writer its end is an error."""
    said = b""
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 20_000):
            said += piece
    return said


@pytest.mark.slow
def test_on_a_terminal_an_actor_tells_its_problems_in_lines(tmp_path):
    """A reward function that is not there, with stderr on a terminal: no `problems=['…']`."""
    file = tmp_path / "mine.py"
    file.write_text("")
    config = ring_config(tmp_path, reward={"functions": [{"path": f"{file}:score"}]})
    (tmp_path / "run.yaml").write_text(dump_config(config))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "actors", "run", "reward", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, stderr=theirs, stdout=theirs, timeout=180, check=False)
    os.close(theirs)
    said = _read(ours).decode().replace("\r\n", "\n")
    os.close(ours)
    assert done.returncode == 2
    assert f"configuration can't be used:\nreward.functions.0.path: {file} has no function 'score'\n" in said
    assert "problems=" not in said
