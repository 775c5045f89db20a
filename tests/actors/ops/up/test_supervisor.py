"""What `actors up` decides about a child that has ended; real children are tested in tests/ring/test_up.py."""

import io
import json
import sys
import time

import pytest

from actors.ops.up.child import Child, plan
from actors.ops.up.supervisor import EXIT_NAME_TAKEN, MAX_START_OVERS, Supervisor, clean_up, supervise
from actors.ops.view.screen import Screen
from bus.run_folder import weights_folder
from bus.topology import Addresses
from schemas.config import dump_config
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


def test_start_overs_without_progress_pause_longer_and_then_fail_the_run(supervisor):
    """As of a gang whose other rank never comes: 0.2 s, 0.4 s … 5 s, and after 20 in a row an end by name."""
    child, pauses = supervisor.children[1], []
    for _ in range(MAX_START_OVERS):
        supervisor._ended(child, 75)
        pauses.append(child.start_at - time.monotonic())
    assert pauses[:3] == pytest.approx([0.2, 0.4, 0.8], abs=0.05)
    assert pauses[-1] == pytest.approx(5.0, abs=0.05)
    with pytest.raises(RunFailedError, match=r"(?s)trainer-0 started over 20 times in a row.*no progress.*last words"):
        supervisor._ended(child, 75)


def test_progress_forgives_start_overs(supervisor):
    """Ranks that die now and then make the others start over as often, and the run goes on."""
    child = supervisor.children[1]
    for step in range(10 * MAX_START_OVERS):
        supervisor._made_progress = [step // (MAX_START_OVERS - 1)]
        supervisor._ended(child, 75)
    assert child.start_overs < MAX_START_OVERS


def test_start_over_is_no_crash(supervisor):
    """Exit 75, asked for by the packer, neither counts nor forgives."""
    child = supervisor.children[1]
    supervisor._ended(child, 1)
    for _ in range(10):
        supervisor._ended(child, 75)
    assert child.restarts == 1


def test_child_whose_name_is_taken_waits_and_never_ends_the_run(supervisor):
    """Somebody runs reward-0 by hand: however often the child is refused, it is started again 30 s later, and told."""
    reward = next(c for c in supervisor.children if c.kind == "reward")
    reason = "another process named reward-0 is alive (boot 1); give this one another --name"
    reward.log.write_text(json.dumps({"level": "error", "event": "name is taken", "reason": reason}) + "\n")
    out = io.StringIO()
    supervisor._screen = Screen(out, supervisor._config)
    for _ in range(10):
        supervisor._ended(reward, EXIT_NAME_TAKEN)
        assert reward.start_at - time.monotonic() == pytest.approx(30.0, abs=0.5)
    assert reward.restarts == 0
    assert f"reward-0: {reason}. Tried again in 30 s" in out.getvalue()


def test_final_codes_end_the_run_at_once(supervisor):
    """2: the configuration can't be used; 3: the run can't go on; both with the child's last words."""
    with pytest.raises(ConfigError, match=r"(?s)reward-0: its configuration.*the last words"):
        supervisor._ended(next(c for c in supervisor.children if c.kind == "reward"), 2)
    with pytest.raises(RunFailedError, match=r"(?s)packer-0: the run can't go on.*the last words"):
        supervisor._ended(supervisor.children[0], 3)


def test_actor_that_ends_by_itself_is_quoted_in_plain_words(supervisor):
    """Of JSON lines the text of the last one is shown, as lines, with the name of the log; no JSON."""
    packer, reward = supervisor.children[0], next(c for c in supervisor.children if c.kind == "reward")
    problems = ["reward.functions.0.path: no built-in reward 'x'", "eval.exact_match: no built-in reward 'y'"]
    reward.log.write_text(json.dumps({"event": "up", "level": "info"}) + "\n" + _error(problems=problems))
    with pytest.raises(ConfigError) as caught:
        supervisor._ended(reward, 2)
    assert caught.value.problems == ["reward-0: its configuration can't be used", *problems, f"log: {reward.log}"]
    packer.log.write_text(_error(reason="the ledger is of another run"))
    with pytest.raises(RunFailedError) as failed:
        supervisor._ended(packer, 3)
    assert str(failed.value).splitlines()[1:] == ["the ledger is of another run", f"log: {packer.log}"]


def test_last_words_are_those_of_the_last_life(supervisor):
    """What an earlier process wrote to the same log is not why this one has ended; a traceback keeps its lines."""
    child = supervisor.children[1]
    child.log.write_text(_error(reason="long ago"))
    child.start([sys.executable, "-c", "print('nothing in JSON')"], ())
    child.process.wait()
    assert child.last_words() == ["nothing in JSON"]
    child.log_start = child.log.stat().st_size
    assert child.last_words() == []
    with child.log.open("a") as log:
        log.write(_error(exception="Traceback\n  File\nKeyError: 1"))
    assert child.last_words() == ["Traceback", "  File", "KeyError: 1"]


def _error(**fields):
    return json.dumps({"event": "the end", "level": "error", **fields}) + "\n"


def test_restart_is_told_on_the_screen_with_the_reason(supervisor, monkeypatch):
    """Once it has been started again, and not at its first start."""
    child, stream = supervisor.children[-1], io.StringIO()
    supervisor._screen = Screen(stream, supervisor._config)
    monkeypatch.setattr(Child, "start", lambda self, command, inherited: 1)
    supervisor._start(child)
    supervisor._ended(child, -9)
    assert "started again" not in stream.getvalue()
    supervisor._start(child)
    assert stream.getvalue().splitlines()[1:] == ["rollout-0 ended by SIGKILL, started again"]


def test_configuration_of_another_run_is_refused_before_it_is_written_down(tmp_path):
    """Else the next start would compare with what was refused."""
    config = ring_config(tmp_path)
    config.output.mkdir()
    config.ledger_path.touch()
    resolved = config.output / "config.resolved.yaml"
    resolved.write_text(dump_config(config))
    with pytest.raises(ConfigError) as caught:
        supervise(config.model_copy(update={"seed": 1}))
    assert caught.value.problems == ["seed: 0 so far, 1 now; this makes another run (--fork, or another output_dir)"]
    assert resolved.read_text() == dump_config(config)


def test_only_the_packer_is_told_to_fork(tmp_path, monkeypatch):
    """It owns the ledger."""
    config = ring_config(tmp_path)
    commands = {}
    monkeypatch.setattr(Child, "start", lambda self, command, _: commands.update({self.name: command}))
    made = Supervisor(config, tmp_path / "run.yaml", fork=True)
    for child in made.children:
        made._start(child)
    assert [name for name, command in commands.items() if "--fork" in command] == ["packer-0"]


def test_weights_and_sockets_of_an_ended_run_are_removed(tmp_path):
    """Also those that a failed run has left in shared memory; and nothing else that lies in weights.directory."""
    config = ring_config(tmp_path)
    folder = weights_folder(config)
    folder.take()
    (folder.path / "1.4").mkdir()
    (tmp_path / "weights" / "1.4").mkdir()
    (tmp_path / "weights" / "thesis.txt").write_text("mine")
    assert Addresses(config).control.startswith("ipc://")
    assert Addresses(config).folder.is_dir()
    clean_up(config)
    assert not Addresses(config).folder.exists()
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1.4", "thesis.txt"]
    clean_up(config)


def test_each_child_has_a_metrics_port_of_its_own(supervisor):
    """telemetry.metrics_port 9100 is the packer's; the others take 9101 to 9104."""
    ports = [supervisor._port_of(child)[0] for child in supervisor.children]
    assert ports == [f"telemetry.metrics_port={port}" for port in range(9100, 9105)]


def test_threads_of_computing_processes_share_the_cores(tmp_path, monkeypatch):
    """8 cores, a trainer and 3 engines: 2 threads each; all others 1; up.torch_threads wins."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = ring_config(tmp_path, up={"inference": 3, "torch_threads": {"trainer": 5}})
    threads = {child.name: child.environment["OMP_NUM_THREADS"] for child in plan(config)}
    assert threads["trainer-0"] == "5"
    assert {threads[f"inference-{i}"] for i in range(3)} == {"2"}
    assert threads["rollout-0"] == threads["reward-0"] == threads["packer-0"] == "1"
