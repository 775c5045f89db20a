"""The units of deploy/systemd, run by a real systemd: a user's manager in namespaces of its own.

It starts, watches, restarts and stops a ring without a model. Of what the units ask for it has all but the user `grpo`,
ProtectHome= (Python may live in a home) and two settings that hide parts of /proc, which namespaces may not do twice.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from schemas.config import RunConfig, dump_config
from tests.model_hub import ModelHub, model_hub
from tests.ring.harness import ring_config, steps_recorded, wait_until
from tests.system.tools import missing, tool

pytestmark = [pytest.mark.system, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "deploy/systemd"
CALLBACKS = REPOSITORY / "tests/ring/callbacks.py"
SYSTEMD = Path("/lib/systemd/systemd")
ACTORS = ("packer:0", "trainer:0", "inference:0", "reward:0", "rollout:0-1", "callbacks:0", "uploader:0")
SERVICES = [f"grpo-{name}.service" for name in ("packer@demo:0", "trainer@demo:0", "inference@demo:0", "reward@demo:0")]
SERVICES += ["grpo-rollout@demo:0.service", "grpo-rollout@demo:1.service"]
SERVICES += ["grpo-callbacks@demo:0.service", "grpo-uploader@demo:0.service"]
BEGIN = """
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user/0/systemd/user
cp -r {units}/. /run/user/0/systemd/user
XDG_RUNTIME_DIR=/run/user/0 HOME={home} {systemd} --user --log-target=null &
wait
"""
CHANGED = """[Service]
ExecStart=
ExecStart={units}/grpo-actor %j %i
User=
Group=
ProtectHome=no
ProtectKernelTunables=no
ProtectKernelLogs=no
PrivateTmp=no
WorkingDirectory={folder}
ReadWritePaths={folder}
Environment=PATH={bin}:/usr/bin:/bin PYTHONPATH={repository} TMPDIR=/run/user/0/grpo-actors HOME={home}
StandardOutput=append:{folder}/actors.log
StandardError=append:{folder}/actors.log
"""
"""After the units' own."""
REMEMBER = f"""[Unit]
After={" ".join(SERVICES)}
"""
"""For a target that stays: systemd forgets a unit that has ended and that nobody names."""
IMPATIENT = """[Service]
WatchdogSec=3s
TimeoutAbortSec=1s
"""
"""For the packer, so that a test sees these times pass."""


class Manager:
    """A systemd that the test talks to from outside of its namespaces."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self._install()
        text = BEGIN.format(units=folder / "units", home=self.home, systemd=SYSTEMD)
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", text]
        self._process = subprocess.Popen(command)

    def _install(self) -> None:
        units = self.folder / "units"
        shutil.copytree(UNITS, units)
        environment = os.environ | {"DESTDIR": str(self.folder)}
        subprocess.run([UNITS / "grpo-run", "demo", *ACTORS], env=environment, check=True, timeout=30)
        shutil.copytree(self.folder / "etc/systemd/system", units, dirs_exist_ok=True)
        places = {"units": units, "folder": self.folder, "home": self.home}
        changed = CHANGED.format(bin=Path(sys.executable).parent, repository=REPOSITORY, **places)
        (units / "grpo-.service.d/zz.conf").write_text(changed)
        (units / "remember.target").write_text(REMEMBER)
        (units / "grpo-packer@.service.d").mkdir()
        (units / "grpo-packer@.service.d/zzz.conf").write_text(IMPATIENT)

    def systemctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`systemctl --user` of that manager."""
        inside = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        command = ["nsenter", "--mount", "--pid", "--target", *inside, "systemctl", "--user", *arguments]
        environment = os.environ | {"XDG_RUNTIME_DIR": "/run/user/0"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def show(self, unit: str, key: str) -> str:
        """One property."""
        return self.systemctl("show", "--value", f"--property={key}", unit).stdout.strip()

    def is_up(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            return self.systemctl("list-units").returncode == 0
        return False

    def end(self) -> None:
        """Have it end its services and itself, or kill all of it."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.systemctl("exit")
            self._process.wait(30.0)
        self._process.kill()
        self._process.wait(10.0)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """Up, or the test is not run."""
    for name in ("unshare", "nsenter"):
        tool(name, "apt-get install util-linux")
    if not SYSTEMD.exists():
        missing("install systemd (apt-get install systemd)")
    if os.getuid() != 0:
        missing("namespaces need root: run the tests as root")
    made = Manager(tmp_path)
    try:
        with contextlib.suppress(AssertionError):
            wait_until(made.is_up, "systemd answers", 60.0)
        if not made.is_up():
            missing("no systemd in a namespace here: allow CAP_SYS_ADMIN, with cgroups")
        yield made
    finally:
        made.end()


@pytest.mark.timeout(900)
def test_systemd_starts_watches_restarts_and_stops_a_run(manager: Manager) -> None:
    """Started by its target; a killed actor and a frozen one come back; stopped, the packer is the last to leave."""
    notes = {"path": f"{CALLBACKS}:Notes", "kwargs": {"file": str(manager.folder / "notes.jsonl")}}
    config = ring_config(
        manager.folder, trainer={"max_steps": 1_000_000, "checkpoint": {"interval": 1_000_000}},
        eval={"num_prompts": 0}, callbacks=[notes],
        push_to_hub={"hub_model_id": "org/model", "hub_strategy": "all_checkpoints"},
    )  # fmt: skip
    folder = manager.home / ".config/grpo-actors/demo"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(dump_config(config))
    # of the run alone: the uploader reads the token here
    with model_hub(manager.folder / "hub") as hub:
        (folder / "env").write_text("".join(f"{key}='{value}'\n" for key, value in hub.variables().items()))
        _start_and_stop(manager, config, hub)


def _start_and_stop(manager: Manager, config: RunConfig, hub: ModelHub) -> None:

    started = manager.systemctl("start", "grpo@demo.target", "remember.target")
    assert started.returncode == 0, started.stderr
    assert {manager.show(one, "ActiveState") for one in SERVICES} == {"active"}, _log(manager)
    wait_until(lambda: steps_recorded(config) > 5, "the run goes on")

    for service, number in (("grpo-reward@demo:0.service", "SIGKILL"), ("grpo-packer@demo:0.service", "SIGSTOP")):
        manager.systemctl("kill", f"--signal={number}", "--kill-whom=main", service)
        wait_until(lambda one=service: manager.show(one, "NRestarts") == "1", f"{service} is restarted")
        wait_until(lambda one=service: manager.show(one, "ActiveState") == "active", f"{service} is up")
        before = steps_recorded(config)
        wait_until(lambda steps=before: steps_recorded(config) > steps + 5, f"the run goes on after {number}")

    told = (manager.folder / "notes.jsonl").read_text()
    assert '["on_train_begin"' in told
    assert '["on_step_end"' in told
    manager.systemctl("stop", "grpo@demo.target", *SERVICES)
    ends = {one: int(manager.show(one, "ExecMainExitTimestampMonotonic")) for one in SERVICES}
    assert {manager.show(one, "ActiveState") for one in SERVICES} == {"inactive"}
    assert {manager.show(one, "Result") for one in SERVICES} == {"success"}, _log(manager)
    assert max(ends, key=ends.__getitem__) == "grpo-packer@demo:0.service"
    assert max(ends[one] for one in SERVICES if "rollout" in one) < ends["grpo-reward@demo:0.service"]
    # the rank has saved its last step; the same service pushes it later
    manager.systemctl("start", "grpo-packer@demo:0.service", "grpo-uploader@demo:0.service")
    wait_until(lambda: hub.titles("org/model") if "org/model" in hub.repositories else [], "the checkpoint is pushed")
    manager.systemctl("stop", "grpo-packer@demo:0.service", "grpo-uploader@demo:0.service")


def test_systemd_does_not_try_again_what_the_configuration_forbids(manager: Manager) -> None:
    """Exit code 2, once: there is no run.yaml, or none that can be used."""
    folder = manager.home / ".config/grpo-actors/demo"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"name": "demo"}))
    for unit in ("grpo-rollout@demo:0.service", "grpo-rollout@none:0.service", "grpo-rollout@none.service"):
        assert manager.systemctl("start", unit).returncode != 0
        assert manager.show(unit, "ActiveState") == "failed"
        assert (manager.show(unit, "ExecMainStatus"), manager.show(unit, "NRestarts")) == ("2", "0")


def _log(manager: Manager) -> str:
    return (manager.folder / "actors.log").read_text()[-2000:]
