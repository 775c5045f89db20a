"""The quickstart on a real Slurm of two nodes: its tasks, a node's daemon and the whole job are killed.

Slurm's daemons are real, the two nodes are this machine twice: no network between machines, no cgroups, no GPUs.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.config import RunConfig, load_config
from tests.processes import has_ended
from tests.ring.harness import check_promise, steps_recorded, wait_until
from tests.system.quickstart import MAX_STEPS, pid_of_node, quickstart
from tests.system.slurm import Slurm, slurm

pytestmark = [pytest.mark.system, pytest.mark.long]
PATIENCE_SECONDS = 300.0


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    """Two idle nodes; in a folder of a short name, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder, slurm(Path(folder)) as made:
        yield made


class Job:
    """A submitted run."""

    def __init__(self, cluster: Slurm, folder: Path, path: Path) -> None:
        self.cluster, self._folder, self._path = cluster, folder, path
        self.config: RunConfig = load_config(path)
        self.number = ""

    def launch(self) -> str:
        """`actors launch`; returns what it prints."""
        command = [sys.executable, "-m", "actors", "launch", "--on", "slurm", str(self._path)]
        environment = self.cluster.environment | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        self.number = re.findall(r"submitted job (\d+)", done.stdout)[0]
        return done.stdout

    def state(self) -> str:
        """As Slurm tells."""
        return self.cluster.job(self.number)["JobState"]

    def log(self) -> str:
        """What the job has written."""
        return "".join(path.read_text() for path in sorted((self.config.output / "logs").glob("slurm-*.log")))

    def node(self, rank: int) -> int:
        """Pid of `actors node`; 0 if there is none."""
        return pid_of_node(rank, self._path)

    def wait_for_steps(self, more: int = 1) -> None:
        """More steps than now."""
        at = steps_recorded(self.config)
        wait_until(
            lambda: steps_recorded(self.config) >= min(at + more, MAX_STEPS),
            f"{more} steps after {at}, {self.state()}: {self.log()[-3000:]}",
            PATIENCE_SECONDS,
        )

    def wait_for_state(self, *states: str) -> None:
        """One of these."""
        try:
            wait_until(lambda: self.state() in states, "the state", PATIENCE_SECONDS)
        except AssertionError:
            why = self.cluster.call("squeue", "-o", "%i %T %r"), self.cluster.states()
            raise AssertionError(f"{states}, not {self.state()}: {why} {self.log()[-3000:]}") from None


@pytest.mark.timeout(1500)
def test_the_quickstart_on_slurm_survives_the_death_of_task_daemon_and_job(cluster: Slurm, tmp_path: Path) -> None:
    """In turn, each followed by further steps; then drained before the end of its time, requeued, and done."""
    subprocess.run([sys.executable, "-m", "actors", "keys", "new", tmp_path / "keys"], check=True, timeout=60)
    path = quickstart(tmp_path, bus={"keys": str(tmp_path / "keys"), "resend_after": 5.0}, launch={"nodes": 2})
    job = Job(cluster, tmp_path, path)
    told = job.launch()
    assert {"watch:", "stop:", "resume:"} <= set(told.split())
    job.wait_for_steps(2)

    for rank in (1, 0):  # a task
        old = job.node(rank)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda r=rank, o=old: job.node(r) not in (0, o), f"node {rank} is started again: {job.log()}")
        job.wait_for_steps()
    assert job.log().count("node ended with 137, started again") == 2

    cluster.kill_node("n2")  # a daemon
    job.wait_for_steps()
    cluster.start_node("n2")
    job.wait_for_steps()

    nodes = [job.node(rank) for rank in (0, 1)]  # the whole job
    cluster.call("scancel", "--signal=KILL", "--full", job.number)
    job.wait_for_state("FAILED", "CANCELLED", "NODE_FAIL")
    wait_until(lambda: all(map(has_ended, nodes)), "its processes have ended")
    before = steps_recorded(job.config)
    assert before < MAX_STEPS
    cluster.wait_until_idle()
    job.launch()
    job.wait_for_steps()

    cluster.call("scancel", "--batch", "--signal=USR1", job.number)  # as before the end of its time
    job.wait_for_state("PENDING", "COMPLETED", "FAILED")
    assert "the job's time is over: requeued" in job.log()
    assert "saved step" in job.log()
    cluster.call("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.wait_for_state("COMPLETED", "FAILED")
    assert job.state() == "COMPLETED", job.log()[-3000:]
    assert int(cluster.job(job.number)["Restarts"]) == 1
    said = check_promise(job.config)
    assert said.trained == list(range(MAX_STEPS * job.config.packer.groups_per_step))
    assert said.dropped == {}


@pytest.mark.timeout(900)
def test_a_stopped_job_drains_and_the_same_command_resumes_it(cluster: Slurm, tmp_path: Path) -> None:
    """The command that `actors launch` prints; the job ends as completed, with a checkpoint of its last step."""
    path = quickstart(tmp_path, bus={"allow_plaintext": True}, launch={"nodes": 2})
    job = Job(cluster, tmp_path, path)
    stop = re.findall(r"^stop:    (.*) \(", job.launch(), re.MULTILINE)[0]
    job.wait_for_steps(3)
    cluster.call(*stop.split())
    job.wait_for_state("COMPLETED", "FAILED")
    assert job.state() == "COMPLETED", job.log()[-3000:]
    assert re.search(r"saved step \d+; the same command continues the run", job.log())
    cluster.wait_until_idle()
    job.launch()
    job.wait_for_state("COMPLETED", "FAILED")
    assert check_promise(job.config).dropped == {}
