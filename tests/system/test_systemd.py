"""The units of deploy/systemd, as systemd itself reads them, and the two scripts beside them.

No systemd runs them here: what they rely on in the actors, sd_notify and exit codes, is tested with real processes in
tests/ring/test_supervised.py.
"""

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from actors.ops.up.child import KEEP_FREED_MEMORY
from actors.ops.up.followers import CALLBACKS_END_SECONDS
from actors.process.exits import EXIT_CONFIG, EXIT_RUN_FAILED
from actors.process.membership import DRAIN_SECONDS
from bus.topology import MAX_IPC_PATH, Addresses
from schemas.config import load_config
from schemas.config.push_to_hub import PushToHubConfig
from tests.system.tools import tool

UNITS = Path(__file__).parents[2] / "deploy/systemd"
KINDS = ("packer", "trainer", "inference", "reward", "rollout", "callbacks", "uploader", "tracker")
EXPOSURE = 3.0
INSTALL = "apt-get install systemd"

system = pytest.mark.system


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of units after installation, and after grpo-run for a run called demo; the launcher is our own."""
    units = tmp_path / "etc/systemd/system"
    shutil.copytree(UNITS, units)
    shared = units / "grpo-.service.d/10-actor.conf"
    launcher = "/usr/local/lib/grpo-actors/grpo-actor"
    assert launcher in shared.read_text()
    shared.write_text(shared.read_text().replace(launcher, str(UNITS / "grpo-actor")))
    _grpo_run(tmp_path, "demo", "packer:0", "trainer:0", "inference:0", "reward:0-1", "rollout:0-3", "callbacks:0",
              "uploader:0", "tracker:0")  # fmt: skip
    return units


def _grpo_run(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"DESTDIR": str(root)}
    command = [str(UNITS / "grpo-run"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


def _analyze(units: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:/lib/systemd/system", "SYSTEMD_PAGER": ""}
    command = [tool("systemd-analyze", INSTALL), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@system
@pytest.mark.parametrize("unit", [*(f"grpo-{kind}@.service" for kind in KINDS), "grpo@demo.target"])
def test_systemd_has_nothing_to_say_against_a_unit(installed: Path, unit: str) -> None:
    """Drop-ins included: no unknown key, no value that it ignores, no program that is not there.

    A template is looked at as an instance of it; with the target of a run systemd loads those that it wants.
    """
    completed = _analyze(installed, "verify", installed / unit)
    assert (completed.returncode, completed.stdout + completed.stderr) == (0, "")


@system
@pytest.mark.parametrize(
    ("unit", "where", "line", "words"),
    [
        ("grpo-packer@.service", "grpo-.service.d/10-actor.conf", "ProtectAll=yes", "Unknown key 'ProtectAll'"),
        ("grpo-packer@.service", "grpo-packer@.service", "MemoryMax=much", "Invalid memory limit"),
        ("grpo-packer@.service", "grpo-packer@.service", "ExecStartPre=/nowhere/at/all", "is not executable"),
        ("grpo@demo.target", "grpo-rollout@demo:3.service.d/order.conf", "After=", "Unknown key 'After'"),
    ],
)
def test_what_is_wrong_in_a_unit_would_be_said(installed: Path, unit: str, where: str, line: str, words: str) -> None:
    """The test above can fail."""
    with (installed / where).open("a") as file:
        file.write(f"\n[Service]\n{line}\n")
    completed = _analyze(installed, "verify", installed / unit)
    assert words in completed.stderr


@system
@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_is_exposed_to_little(installed: Path, kind: str) -> None:
    """systemd's own measure, 0 to 10; those with a GPU have the devices of one besides."""
    instance = installed / f"grpo-{kind}@demo:0.service"
    shutil.copy(installed / f"grpo-{kind}@.service", instance)
    completed = _analyze(installed, "security", "--offline=true", f"--threshold={EXPOSURE * 10:.0f}", instance)
    found = re.search(r"exposure level for .*: ([\d.]+)", completed.stdout)
    assert found, completed.stderr
    assert float(found[1]) <= EXPOSURE, completed.stdout
    assert completed.returncode == 0


def _sections(*paths: Path) -> configparser.RawConfigParser:
    """All files as one; of keys that stand more than once the last one."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(paths)
    return parser


def _seconds(text: str) -> float:
    units = {"s": 1.0, "min": 60.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(min|s)", text))


@pytest.mark.parametrize("kind", KINDS)
def test_times_of_a_unit_are_longer_than_those_of_its_actor(kind: str) -> None:
    """With the defaults of run.yaml: a loop that waits as it may is not taken for one that hangs."""
    config = load_config(UNITS.parents[1] / "examples/quickstart/run.yaml")
    service = _sections(UNITS / f"grpo-{kind}@.service")["Service"]
    loop_seconds = {
        "packer": config.ledger.commit_timeout,
        "trainer": config.trainer.checkpoint.timeout,
        "inference": 2 * config.weights.timeout,
    }.get(kind, 1.0)
    assert _seconds(service["WatchdogSec"]) > loop_seconds
    assert _seconds(service["TimeoutStopSec"]) > (DRAIN_SECONDS if kind != "packer" else 0.0)
    ends = {
        "trainer": config.trainer.checkpoint.timeout,
        "callbacks": CALLBACKS_END_SECONDS,
        "tracker": CALLBACKS_END_SECONDS,
        "uploader": PushToHubConfig().end_timeout,
    }
    assert _seconds(service["TimeoutStopSec"]) > ends.get(kind, 0.0)


def test_reward_actors_may_confine_the_files_of_programs() -> None:
    """systemd's groups of system calls have none of Landlock's, without which `code_tests` confines no files."""
    calls = _sections(UNITS / "grpo-reward@.service")["Service"]["SystemCallFilter"].split()
    assert calls == ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"]


def test_ends_that_starting_again_does_not_mend_are_not_restarted() -> None:
    """The codes of actors/process/exits.py, and those of a shell that finds no program."""
    service = _sections(UNITS / "grpo-.service.d/10-actor.conf")["Service"]
    assert service["Restart"] == "on-failure"
    assert set(service["RestartPreventExitStatus"].split()) == {str(EXIT_CONFIG), str(EXIT_RUN_FAILED), "126", "127"}


@pytest.mark.parametrize("kind", ["trainer", "inference"])
def test_actors_that_compute_keep_freed_memory_as_under_actors_up(kind: str) -> None:
    """The same variables."""
    text = (UNITS / f"grpo-{kind}@.service").read_text()
    assert f"Environment={' '.join(f'{key}={value}' for key, value in KEEP_FREED_MEMORY.items())}\n" in text


def test_sockets_of_the_bus_fit_into_the_runtime_directory() -> None:
    """TMPDIR of the units, with the longest names that an actor may have."""
    text = (UNITS / "grpo-.service.d/10-actor.conf").read_text()
    found = re.search(r"TMPDIR=(\S+)", text)
    assert found
    config = load_config(UNITS.parents[1] / "examples/quickstart/run.yaml")
    folder = f"{found[1]}/grpo-actors-4294967294/{Addresses(config).folder.name}"
    assert len(f"{folder}/inference-9999.01234567") <= MAX_IPC_PATH


# --- the scripts -----------------------------------------------------------------------------------------------------


def test_grpo_run_names_the_actors_of_this_machine_and_who_stops_first(tmp_path: Path) -> None:
    """The target wants and stops all; rollouts stop before all others, everybody before the packer."""
    assert _grpo_run(tmp_path, "a-b.c", "packer:0", "trainer:0", "inference:1", "reward:0", "rollout:8-9").stderr == ""
    units = tmp_path / "etc/systemd/system"
    names = ["packer@a-b.c:0", "trainer@a-b.c:0", "inference@a-b.c:1", "reward@a-b.c:0"]
    names = [f"grpo-{name}.service" for name in [*names, "rollout@a-b.c:8", "rollout@a-b.c:9"]]
    target = _sections(units / "grpo@a-b.c.target.d/actors.conf")["Unit"]
    assert target["Wants"].split() == target["PropagatesStopTo"].split() == names
    after = {
        path.parent.name.removesuffix(".d"): _sections(path)["Unit"]["After"].split()
        for path in units.glob("*/order.conf")
    }
    packer, trainer, inference, reward, *rollouts = names
    assert after == {
        **{name: [packer] for name in (trainer, inference, reward)},
        **{name: [packer, inference, reward] for name in rollouts},
    }


def test_grpo_run_given_again_forgets_what_was_before(tmp_path: Path) -> None:
    """And leaves other runs alone. A machine without packer has nobody to wait for."""
    _grpo_run(tmp_path, "demo", "packer:0", "rollout:0-3")
    _grpo_run(tmp_path, "other", "packer:0", "rollout:0")
    assert _grpo_run(tmp_path, "demo", "rollout:4").returncode == 0
    units = tmp_path / "etc/systemd/system"
    assert [path.parent.name for path in units.glob("*/order.conf")] == ["grpo-rollout@other:0.service.d"]
    assert _sections(units / "grpo@demo.target.d/actors.conf")["Unit"]["Wants"] == "grpo-rollout@demo:4.service"


@pytest.mark.parametrize("arguments", [[], ["demo"], ["a/b", "packer:0"], ["demo", "packer"], ["demo", "judge:0"]])
def test_grpo_run_refuses_what_it_does_not_understand(tmp_path: Path, arguments: list[str]) -> None:
    """With its usage, and nothing written."""
    completed = _grpo_run(tmp_path, *arguments)
    assert completed.returncode == EXIT_CONFIG
    assert "grpo-run RUN KIND:NUMBER" in completed.stderr
    assert list(tmp_path.iterdir()) == []


def _launch(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The launcher, with a command `actors` that shows what it is given."""
    shown = folder / "bin/actors"
    shown.parent.mkdir()
    shown.write_text('#!/bin/sh\necho "$@" "key=${ENGINE_KEY:-}"\n')
    shown.chmod(0o755)
    environment = {"PATH": f"{shown.parent}:/usr/bin:/bin", "CONFIGURATION_DIRECTORY": str(folder)}
    command = [str(UNITS / "grpo-actor"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)


def test_the_launcher_becomes_the_actor_of_run_and_number(tmp_path: Path) -> None:
    """With the run's variables, where it has any."""
    config = f"--config {tmp_path}/a-b/run.yaml"
    (tmp_path / "a-b").mkdir()
    (tmp_path / "a-b/env").write_text("ENGINE_KEY='two words'\n")
    assert _launch(tmp_path, "rollout", "a-b:12").stdout == f"run rollout {config} --name rollout-12 key=two words\n"


@pytest.mark.parametrize("instance", ["demo", "demo:", ":0", "demo:x", "a:b:0", "../demo:0"])
def test_an_instance_that_is_no_run_and_number_is_refused(tmp_path: Path, instance: str) -> None:
    """As a configuration that can't be used, so systemd does not try again."""
    completed = _launch(tmp_path, "rollout", instance)
    assert completed.returncode == EXIT_CONFIG
    assert "an instance is RUN:NUMBER" in completed.stderr
