"""A real Slurm of several nodes on this machine: munged, slurmctld and a slurmd for each node, ended with the test.

The nodes share host name, disk and cores; each has an address of loopback and a port of its own. Of a cluster it lacks
a network between machines, cgroups, GPUs (gres) and accounting.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.system.tools import missing, tool

DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=60
SlurmdTimeout={slurmd_timeout}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Cluster of nodes n1, n2 and so on.

    Args:
        folder: of all files; its path must be short, for Unix sockets.
        nodes: number of nodes.
        slurmd_timeout: seconds until a node that does not answer is given up.
    """

    def __init__(self, folder: Path, nodes: int = 2, slurmd_timeout: int = 300) -> None:
        self.folder, self.names = folder, [f"n{number}" for number in range(1, nodes + 1)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.{number} Port={free_port()} CPUs=2 RealMemory=1000"
            for number, name in enumerate(self.names, 1)
        ]
        text = CONF.format(
            host=host, port=free_port(), folder=folder, slurmd_timeout=slurmd_timeout, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)

    def start(self) -> None:
        """All daemons; returns when every node is idle."""
        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        self._spawn("munged", "--force", "--foreground", f"--key-file={key}", f"--socket={munge}",
                    f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                    f"--seed-file={self.folder}/munged.seed")  # fmt: skip
        _until(munge.exists, "munged listens")
        self._spawn("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for name in self.names:
            self.start_node(name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """No job has a node any more."""
        _until(lambda: self.states() == dict.fromkeys(self.names, "idle"), "all nodes are idle", 120.0)

    def start_node(self, name: str) -> None:
        """The slurmd of a node."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._spawn("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), label=name)

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node; what it has started stays."""
        self.processes[name].kill()
        self.processes[name].wait(30.0)

    def call(self, *words: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """States of the nodes."""
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], env=self.environment, capture_output=True,
                              text=True, check=False, timeout=60)  # fmt: skip
        return dict(line.split() for line in done.stdout.splitlines())  # type: ignore[misc]

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "-o", "show", "job", number)))

    def end(self) -> None:
        """Cancel all jobs, and end the daemons."""
        subprocess.run(["scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root"], env=self.environment,
                       capture_output=True, check=False, timeout=60)  # fmt: skip
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True, check=False, timeout=60)
        time.sleep(1.0)
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)

    def _spawn(self, program: str, *words: str, label: str = "") -> None:
        path = shutil.which(program, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
        assert path is not None
        with (self.folder / f"{label or program}.out").open("ab") as log:
            self.processes[label or program] = subprocess.Popen(
                [path, *words], stdout=log, stderr=log, env=self.environment, start_new_session=True
            )


def _until(condition: object, what: str, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


@contextmanager
def slurm(folder: Path, nodes: int = 2, slurmd_timeout: int = 300) -> Iterator[Slurm]:
    """A running cluster; the test is not run where its programs are missing."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin" if "/usr/sbin" not in os.environ["PATH"] else ""
    for program in DAEMONS:
        tool(program, "apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        missing("Slurm's daemons need root here: run the tests as root")
    made = Slurm(folder, nodes, slurmd_timeout)
    try:
        made.start()
        yield made
    finally:
        made.end()
