"""What `actors up` decides about a child that has ended; real children are tested in tests/ring/test_up.py."""

import time

import pytest

from actors.screen import describe
from actors.supervisor import Supervisor, _plan
from schemas.errors import ConfigError, RunFailedError
from tests.ring.harness import ring_config


@pytest.fixture
def supervisor(tmp_path):
    """Of a run with max_restarts 2 whose output_dir exists; its children have not been started."""
    config = ring_config(tmp_path, up={"max_restarts": 2}, telemetry={"metrics_port": 9100})
    (config.output / "logs").mkdir(parents=True)
    made = Supervisor(config, tmp_path / "run.yaml")
    for child in made.children:
        child.log.write_text("the last words\n")
        child.started = time.monotonic()
    return made


def test_child_that_ends_well_is_finished_only_when_the_run_is(supervisor):
    """Exit 0 without summary.json: somebody drained it, so it is started again; with it: finished."""
    packer = supervisor.children[0]
    supervisor._ended(packer, 0)
    assert not packer.finished
    assert packer.start_at > time.monotonic()
    (supervisor._config.output / "summary.json").write_text("{}")
    supervisor._ended(packer, 0)
    assert packer.finished


def test_crashes_in_a_row_pause_longer_and_then_fail_the_run(supervisor):
    """Pauses of 0.2 and 0.4 s; the third crash fails with name, signal, key and the end of the log."""
    child = supervisor.children[1]
    for pause in (0.2, 0.4):
        supervisor._ended(child, 1)
        assert child.start_at - time.monotonic() == pytest.approx(pause, abs=0.05)
    with pytest.raises(RunFailedError, match=r"(?s)trainer-0 ended 3 times.*SIGKILL.*max_restarts 2.*the last words"):
        supervisor._ended(child, -9)


def test_a_minute_of_life_forgives_earlier_crashes(supervisor):
    """Two crashes, then one after 61 s of life: it counts as the first."""
    child = supervisor.children[1]
    supervisor._ended(child, 1)
    supervisor._ended(child, 1)
    child.started = time.monotonic() - 61.0
    supervisor._ended(child, 1)
    assert child.restarts == 1


def test_start_over_is_no_crash(supervisor):
    """Exit 75, asked for by the packer, neither counts nor forgives."""
    child = supervisor.children[1]
    supervisor._ended(child, 1)
    for _ in range(10):
        supervisor._ended(child, 75)
    assert child.restarts == 1


def test_final_codes_end_the_run_at_once(supervisor):
    """2: the configuration can't be used; 3: the run can't go on; both with the child's last words."""
    with pytest.raises(ConfigError, match=r"(?s)reward-0: its configuration.*the last words"):
        supervisor._ended(next(c for c in supervisor.children if c.kind == "reward"), 2)
    with pytest.raises(RunFailedError, match=r"(?s)packer-0: the run can't go on.*the last words"):
        supervisor._ended(supervisor.children[0], 3)


def test_each_child_has_a_metrics_port_of_its_own(supervisor):
    """telemetry.metrics_port 9100 is the packer's; the others take 9101 to 9104."""
    ports = [supervisor._port_of(child)[0] for child in supervisor.children]
    assert ports == [f"telemetry.metrics_port={port}" for port in range(9100, 9105)]


def test_threads_of_computing_processes_share_the_cores(tmp_path, monkeypatch):
    """8 cores, a trainer and 3 engines: 2 threads each; all others 1; up.torch_threads wins."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = ring_config(tmp_path, up={"inference": 3, "torch_threads": {"trainer": 5}})
    threads = {(kind, i): environment["OMP_NUM_THREADS"] for kind, i, environment in _plan(config)}
    assert threads["trainer", 0] == "5"
    assert {threads["inference", i] for i in range(3)} == {"2"}
    assert threads["rollout", 0] == threads["reward", 0] == threads["packer", 0] == "1"


def test_progress_line_says_what_is_known_and_leaves_out_what_is_not():
    """Before the first step there is no reward to show; a restarted actor is named."""
    progress = {
        "phase": "starting", "step": 0, "max_steps": 9, "reward": None, "issued": 4, "settled": 0, "composed": 0,
        "peers": {"rollout": 1}, "restarts": {"rollout-0": 2},
    }  # fmt: skip
    assert describe(progress, 65.0) == (
        "01:05  starting  step 0/9  groups sampling 4 settled 0 packed 0  peers rollout 1  restarted rollout-0 ×2"
    )
    assert describe({}, 1.0) == "00:01  waiting for the packer"
