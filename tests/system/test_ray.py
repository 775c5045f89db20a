"""The quickstart on a real Ray of two nodes: a task, a node's daemon and the whole job are killed.

Both nodes are this machine, each with an address of its own: no network between machines, no GPUs.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.config import RunConfig, load_config
from tests.processes import has_ended
from tests.ring.harness import check_promise, steps_recorded, wait_until
from tests.system.quickstart import MAX_STEPS, ROOT, pid_of_node, quickstart
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.long]
PYTHON = ROOT / ".venv-extras/bin/python"
CLUSTER = Path(__file__).with_name("ray_cluster.py")
PATIENCE_SECONDS = 300.0


class Ray:
    """The cluster, and a run on it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "launch.log"
        self._environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        with (folder / "cluster.log").open("wb") as log:
            self._cluster = subprocess.Popen(
                [PYTHON, CLUSTER], cwd=folder, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True,
            )  # fmt: skip
        self.path = quickstart(folder, bus={"allow_plaintext": True}, launch={"nodes": 2})
        self.config: RunConfig = load_config(self.path)
        address = self._answer()
        assert re.fullmatch(r"[\d.]+:\d+", address), (folder / "cluster.log").read_text()
        self._environment["RAY_ADDRESS"] = address
        self.launched: subprocess.Popen[bytes] | None = None

    def _answer(self) -> str:
        assert self._cluster.stdout is not None
        return self._cluster.stdout.readline().strip()

    def lose_node(self) -> None:
        """Kill the daemon of the second node; a third one joins."""
        assert self._cluster.stdin is not None
        self._cluster.stdin.write("\n")
        self._cluster.stdin.flush()
        assert self._answer() == "lost", (self._folder / "cluster.log").read_text()

    def launch(self) -> "subprocess.Popen[bytes]":
        """`actors launch`."""
        command = [PYTHON, "-m", "actors", "launch", "--on", "ray", str(self.path)]
        with self._log.open("ab") as log:
            self.launched = subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log)
        return self.launched

    def text(self) -> str:
        """What it has written, with what its nodes have."""
        return self._log.read_text()

    def wait_for_steps(self, more: int = 1) -> None:
        """More steps than now."""
        at = steps_recorded(self.config)
        wait_until(
            lambda: steps_recorded(self.config) >= min(at + more, MAX_STEPS),
            f"{more} steps after {at}: {self.text()[-4000:]}",
            PATIENCE_SECONDS,
        )

    def end(self) -> None:
        """The run, then the cluster."""
        if self.launched is not None and self.launched.poll() is None:
            self.launched.kill()
            self.launched.wait(30.0)
        assert self._cluster.stdin is not None
        self._cluster.stdin.close()
        try:
            self._cluster.wait(60.0)
        except subprocess.TimeoutExpired:
            self._cluster.kill()
            self._cluster.wait(10.0)


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Ray]:
    """A cluster of two nodes; the test is not run without Ray."""
    if not PYTHON.exists():
        missing("install Ray (make .venv-extras/stamp)")
    made = Ray(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.timeout(1500)
def test_the_quickstart_on_ray_survives_the_death_of_task_node_and_job(ray: Ray) -> None:
    """In turn, each followed by further steps; then stopped in order, and resumed to its end."""
    launched = ray.launch()
    ray.wait_for_steps(2)

    for rank in (1, 0):  # a task
        old = pid_of_node(rank, ray.path)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda r=rank, o=old: pid_of_node(r, ray.path) not in (0, o), f"node {rank} again: {ray.text()}")
        ray.wait_for_steps()
    assert ray.text().count("killed by SIGKILL; started again") == 2

    ray.lose_node()
    wait_until(lambda: "its wrapper is gone" in ray.text(), f"the loss is noticed: {ray.text()}")
    ray.wait_for_steps(2)

    nodes = [pid_of_node(rank, ray.path) for rank in (0, 1)]  # the whole job
    launched.kill()
    launched.wait(30.0)
    wait_until(lambda: all(map(has_ended, nodes)), f"its nodes have ended: {ray.text()[-2000:]}")
    assert steps_recorded(ray.config) < MAX_STEPS
    launched = ray.launch()
    ray.wait_for_steps()

    launched.terminate()
    assert launched.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM, ray.text()[-4000:]
    assert "saved step" in ray.text()
    launched = ray.launch()
    assert launched.wait(PATIENCE_SECONDS) == 0, ray.text()[-4000:]
    said = check_promise(ray.config)
    assert said.trained == list(range(MAX_STEPS * ray.config.packer.groups_per_step))
    assert said.dropped == {}
