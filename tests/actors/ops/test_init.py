"""Process number 1, in a namespace of its own as a container has it."""

import subprocess
import sys

import pytest

WORK = """
import os, pathlib, signal, subprocess, sys, time
from actors.ops.init import run_as_init

run_as_init()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
shell = ["sh", "-c", "sleep 0.2 >/dev/null & echo $!"]
orphan = pathlib.Path("/proc", subprocess.run(shell, check=True, capture_output=True, text=True).stdout.strip())
deadline = time.monotonic() + 60.0
while orphan.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
stats = [path.joinpath("stat").read_text() for path in pathlib.Path("/proc").glob("[0-9]*")]
states = [stat.rpartition(")")[2].split()[0] for stat in stats]
print(os.getpid() != 1, states.count("Z"), flush=True)
if sys.argv[1] == "signal":
    os.kill(1, signal.SIGTERM)
    time.sleep(60.0)
sys.exit(7)
"""


@pytest.mark.parametrize(("how", "code"), [("leave", 7), ("signal", 9)])
def test_orphans_are_buried_and_signals_and_the_exit_code_passed_on(how, code):
    """The command has another number than 1, leaves no zombie behind, hears SIGTERM, and its exit code is ours."""
    namespace = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces of processes on this machine")
    command = [*namespace, sys.executable, "-c", WORK, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180.0, check=False)
    assert (done.stdout.split(), done.returncode) == (["True", "0"], code), done.stderr
