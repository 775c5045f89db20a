"""Descriptors: raised at the start of every actor, and said where they are too few for the run."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.process.descriptors import needed, problem_of
from tests.ring.harness import ring_config

ROOT = Path(__file__).parents[3]


def _limits_after(soft: int, hard: int) -> tuple[int, int]:
    """Soft limit of descriptors, and ZeroMQ's sockets, of a process that began with these limits and raised them."""
    program = (
        "import resource, sys, zmq\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from pathlib import Path\n"
        "from actors.process.descriptors import raise_limits\n"
        "from tests.ring.harness import ring_config\n"
        "raise_limits(ring_config(Path('/nowhere')))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], zmq.Context.instance().get(zmq.MAX_SOCKETS))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    soft_then, sockets = answer.stdout.splitlines()[-1].split()
    return int(soft_then), int(sockets)


@pytest.mark.slow
def test_soft_limit_becomes_the_hard_one_and_sockets_follow() -> None:
    """1 024 are what a login gives; the packer of a run of thousands of peers needs as many as the system allows."""
    assert _limits_after(256, 3000) == (3000, 3000)


@pytest.mark.parametrize("keys", ["", "keys"])
def test_too_few_for_the_configured_peers_is_said_with_both_numbers(tmp_path: Path, keys: str) -> None:
    """A rollout actor has a socket for each reward actor; with keys also the socket's monitor, with both ends."""
    config = ring_config(tmp_path)
    config = config.model_copy(
        update={
            "up": config.up.model_copy(update={"reward": 400}),
            "bus": config.bus.model_copy(update={"keys": keys}),
        }
    )
    wanted = needed(config)
    assert wanted > (3200 if keys else 2000)
    problem = problem_of(config, 1024)
    assert "may have 1024 open files and sockets (ulimit -n)" in problem
    assert f"up to {wanted}" in problem
    assert problem_of(config, wanted) == ""
