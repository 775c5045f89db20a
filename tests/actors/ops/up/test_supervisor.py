"""What `actors up` does about a child that has ended; real children are tested in tests/ring/test_up.py."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections import defaultdict

import pytest
from structlog.testing import capture_logs

from actors.ops.up import child as child_module
from actors.ops.up import scaler as scaler_module
from actors.ops.up import supervisor as supervisor_module
from actors.ops.up.child import Child, plan
from actors.ops.up.supervisor import MAX_START_OVERS, Supervisor, clean_up, supervise
from actors.process.exits import EXIT_DONE, EXIT_NAME_TAKEN
from bus.run_folder import weights_folder
from bus.topology import Addresses
from schemas.config import dump_config
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import ObserverDirective
from tests.ring.harness import ring_config

POLL_SECONDS = 0.02
LONG = 1e9
"""Seconds of a life beyond the end of every test."""


class OverError(Exception):
    """The time that a test gives to `actors up` is over."""


class Life:
    """Made-up process that ends after some seconds of the scene's clock."""

    pid = 1

    def __init__(self, scene, seconds, code):
        self._scene, self._code = scene, code
        self.ends_at = scene.now + seconds

    def poll(self):
        """Return the exit code; None before the end."""
        return self._code if self._scene.now >= self.ends_at else None

    def send_signal(self, number):
        """Let it run: a test ends it."""


class Scene:
    """`Supervisor.run` over children with made-up lives, on a clock of its own, beside a made-up packer.

    Stands for the modules' `time`, for `Child.start` (as `begin`) and for `Membership`.

    Attributes:
        lives: by child, (seconds, exit code) of each process in turn; further processes live long.
        words: by child, the log of each process.
        progress: function that returns what the packer tells about the run.
        starts: by child, the number of starts.
        pauses: by child, seconds between an end and the next start.
        commands: by child, the newest command.
    """

    silent_seconds = 0.0

    def __init__(self, config, fork):
        (config.output / "logs").mkdir(parents=True)
        self.config, self._screen = config, io.StringIO()
        with contextlib.redirect_stdout(self._screen):
            self._supervisor = Supervisor(config, config.output / "run.yaml", fork=fork)
        self.lives, self.words, self.progress = {}, {}, dict
        self.starts, self.pauses, self.commands = defaultdict(int), defaultdict(list), {}
        self._newest = {}
        self.now = self._over = time.monotonic()

    def run(self, seconds=1000.0):
        """Run for at most this time. Return the exit code; None: the run goes on."""
        self._over = self.now + seconds
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            with contextlib.redirect_stdout(self._screen), capture_logs():
                return self._supervisor.run()
        except OverError:
            return None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def end(self, name):
        """End the newest process of a child."""
        self._newest[name].ends_at = self.now

    def said(self):
        """Return the lines on the screen."""
        return self._screen.getvalue().splitlines()

    def begin(self, child, command, inherited, server):
        """Start a process of a child."""
        number = self.starts[child.name]
        if number:
            self.pauses[child.name].append(self.now - self._newest[child.name].ends_at)
        lives = self.lives.get(child.name, [])
        seconds, code = lives[number] if number < len(lives) else (LONG, 0)
        child.process = self._newest[child.name] = Life(self, seconds, code)
        child.started = self.now
        child.log.write_text(self.words.get(child.name, "the last words\n"))
        self.starts[child.name] += 1
        self.commands[child.name] = command
        return child.process.pid

    def monotonic(self):
        """Return the clock's seconds."""
        return self.now

    def sleep(self, seconds):
        """Let time pass."""
        self.now += seconds
        if self.now > self._over:
            raise OverError

    def start(self, phase):
        """Join the run as an observer."""

    def latest(self):
        """Return what the packer says."""
        told = {"phase": "running", "step": 0, "max_steps": 8}
        return ObserverDirective(run="ring", term=1, **told, progress=told | self.progress())

    def close(self):
        """Leave the run."""


@pytest.fixture
def make_scene(tmp_path, monkeypatch):
    """`make_scene(fork=False)`: of a run with max_restarts 2 and metrics from port 9100 on."""
    keys = {"up": {"max_restarts": 2, "fork_server": False}, "telemetry": {"metrics_port": 9100}}

    def make(fork=False, **sections):
        config = ring_config(tmp_path, **keys | sections)
        scene = Scene(config, fork)
        monkeypatch.setattr(Child, "start", lambda *arguments: scene.begin(*arguments))
        for module in (supervisor_module, child_module, scaler_module):
            monkeypatch.setattr(module, "time", scene)
        monkeypatch.setattr(supervisor_module, "Membership", lambda *_: scene)
        monkeypatch.setattr(supervisor_module, "POLL_SECONDS", POLL_SECONDS)
        return scene

    return make


@pytest.fixture
def scene(make_scene):
    """Of a run that is not forked."""
    return make_scene()


def pauses_of(*seconds):
    """These pauses; the end of a process and the end of a pause are each seen at the next look."""
    return pytest.approx([each + POLL_SECONDS for each in seconds], abs=POLL_SECONDS + 1e-6)


def test_child_that_ends_well_is_finished_only_when_the_run_is(scene):
    """Exit 0 without summary.json: somebody drained it, so it is started again; with it: finished."""
    scene.lives["packer-0"] = [(1.0, 0)]
    assert scene.run(10.0) is None
    assert scene.starts["packer-0"] == 2
    (scene.config.output / "summary.json").write_text(json.dumps({"steps": 8, "wall_seconds": 1.0}))
    scene.end("packer-0")
    assert scene.run(10.0) == EXIT_DONE
    assert scene.starts["packer-0"] == 2
    assert scene.said()[-1].startswith("done: 8 steps")


def test_a_parked_child_is_started_once_the_packer_wants_it_and_not_missed_afterwards(make_scene):
    """Its exit after it was given back is no crash, whatever the code, and no other child is started in its place."""
    scene = make_scene(scale={"reward": {"max": 2}})
    assert scene.run(10.0) is None
    assert scene.starts["reward-1"] == 0
    scene.progress = lambda: {"scale": {"wanted": {"reward": 2}, "because": "rewards are slow"}}
    assert scene.run(10.0) is None
    assert scene.starts["reward-1"] == 1
    scene.progress = lambda: {"scale": {"wanted": {"reward": 1}, "because": "rewards are fast"}}
    scene.lives["reward-1"] = [(LONG, 1)]
    assert scene.run(1.0) is None
    scene.end("reward-1")
    assert scene.run(1000.0) is None
    assert (scene.starts["reward-0"], scene.starts["reward-1"]) == (1, 1)
    assert "reward: 1 → 2, since rewards are slow" in scene.said()
    assert "reward: 2 → 1, since rewards are fast" in scene.said()


def test_crashes_in_a_row_pause_longer_and_then_fail_the_run(scene):
    """Pauses of 0.2 and 0.4 s; the third crash fails with name, signal, key and the end of the log."""
    scene.lives["trainer-0"] = [(1.0, 1), (1.0, 1), (1.0, -9)]
    with pytest.raises(RunFailedError, match=r"(?s)trainer-0 ended 3 times.*SIGKILL.*max_restarts 2.*the last words"):
        scene.run()
    assert scene.pauses["trainer-0"] == pauses_of(0.2, 0.4)


def test_a_minute_of_life_forgives_earlier_crashes(scene):
    """Two crashes, then one after 61 s of life: it counts as the first."""
    scene.lives["trainer-0"] = [(1.0, 1), (1.0, 1), (61.0, 1)]
    assert scene.run(100.0) is None
    assert scene.pauses["trainer-0"] == pauses_of(0.2, 0.4, 0.2)


def test_start_overs_without_progress_pause_longer_and_then_fail_the_run(scene):
    """As of a gang whose other rank never comes: 0.2 s, 0.4 s … 5 s, and after 20 in a row an end by name."""
    scene.lives["trainer-0"] = [(1.0, 75)] * (MAX_START_OVERS + 1)
    with pytest.raises(RunFailedError, match=r"(?s)trainer-0 started over 20 times in a row.*no progress.*last words"):
        scene.run()
    assert scene.pauses["trainer-0"] == pauses_of(0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * (MAX_START_OVERS - 5))


@pytest.mark.slow
def test_progress_forgives_start_overs(scene):
    """Ranks that die now and then make the others start over as often, and the run goes on."""
    scene.lives["trainer-0"] = [(0.0, 75)] * (10 * MAX_START_OVERS)
    scene.progress = lambda: {"step": scene.starts["trainer-0"] // (MAX_START_OVERS - 1)}
    assert scene.run() is None
    assert scene.starts["trainer-0"] == 10 * MAX_START_OVERS + 1


def test_a_follower_that_ends_for_days_ends_no_run(make_scene, monkeypatch):
    """As with no room for a tracker's files: started again each minute, however often it has been."""
    scene = make_scene(telemetry={"metrics_port": 9100, "trackers": ["tensorboard"]})
    monkeypatch.setattr(supervisor_module, "POLL_SECONDS", 20.0)
    scene.lives["tracker-0"] = [(0.0, 1)] * 1100
    assert scene.run(1200 * 80.0) is None
    assert scene.starts["tracker-0"] == 1101


def test_start_over_is_no_crash(scene):
    """Exit 75, asked for by the packer, neither counts nor forgives."""
    scene.lives["trainer-0"] = [(1.0, 1), *[(1.0, 75)] * 10, (1.0, 1), (1.0, 1)]
    with pytest.raises(RunFailedError, match="trainer-0 ended 3 times"):
        scene.run()
    assert scene.pauses["trainer-0"][::11] == pauses_of(0.2, 0.4)


def test_child_whose_name_is_taken_waits_and_never_ends_the_run(scene):
    """Somebody runs reward-0 by hand: however often the child is refused, it is started again 30 s later, and told.

    No refusal counts as a crash: the first crash afterwards is the first.
    """
    reason = "another process named reward-0 is alive (boot 1); give this one another --name"
    scene.words["reward-0"] = _error(reason=reason)
    scene.lives["reward-0"] = [(1.0, EXIT_NAME_TAKEN)] * 10 + [(1.0, 1)]
    assert scene.run(320.0) is None
    assert scene.pauses["reward-0"] == pauses_of(*[30.0] * 10, 0.2)
    assert scene.said().count(f"reward-0: {reason}. Tried again in 30 s") == 10


@pytest.mark.parametrize(
    ("name", "code", "error", "words"),
    [
        ("reward-0", 2, ConfigError, "reward-0: its configuration"),
        ("packer-0", 3, RunFailedError, "packer-0: the run can't go on"),
    ],
)
def test_final_codes_end_the_run_at_once(scene, name, code, error, words):
    """2: the configuration can't be used; 3: the run can't go on; both with the child's last words."""
    scene.lives[name] = [(1.0, code)]
    with pytest.raises(error, match=rf"(?s){words}.*the last words"):
        scene.run()
    assert scene.starts[name] == 1


def test_configuration_that_an_actor_refuses_is_quoted_in_plain_words(scene):
    """Of JSON lines the text of the last one is shown, as lines, with the name of the log; no JSON."""
    problems = ["reward.functions.0.path: no built-in reward 'x'", "eval.exact_match: no built-in reward 'y'"]
    scene.words["reward-0"] = json.dumps({"event": "up", "level": "info"}) + "\n" + _error(problems=problems)
    scene.lives["reward-0"] = [(1.0, 2)]
    with pytest.raises(ConfigError) as caught:
        scene.run()
    log = scene.config.output / "logs" / "reward-0.log"
    assert caught.value.problems == ["reward-0: its configuration can't be used", *problems, f"log: {log}"]


def test_reason_of_an_actor_that_ends_the_run_is_quoted_in_plain_words(scene):
    """As lines, with the name of the log."""
    scene.words["packer-0"] = _error(reason="the ledger is of another run")
    scene.lives["packer-0"] = [(1.0, 3)]
    with pytest.raises(RunFailedError) as failed:
        scene.run()
    log = scene.config.output / "logs" / "packer-0.log"
    assert str(failed.value).splitlines()[1:] == ["the ledger is of another run", f"log: {log}"]


def test_last_words_are_those_of_the_last_life(tmp_path, monkeypatch):
    """What an earlier process wrote to the same log is not why this one has ended; a traceback keeps its lines."""
    child = Child("trainer", "trainer-0", dict(os.environ), tmp_path / "trainer-0.log")
    child.log.write_text(_error(reason="long ago"))
    monkeypatch.setattr("actors.ops.up.child.PROGRAM", (sys.executable,))
    child.start(["-c", "print('nothing in JSON')"], ())
    child.process.wait()
    assert child.last_words() == ["nothing in JSON"]
    child.log_start = child.log.stat().st_size
    assert child.last_words() == []
    with child.log.open("a") as log:
        log.write(_error(exception="Traceback\n  File\nKeyError: 1"))
    assert child.last_words() == ["Traceback", "  File", "KeyError: 1"]


def _error(**fields):
    return json.dumps({"event": "the end", "level": "error", **fields}) + "\n"


def test_restart_is_told_on_the_screen_with_the_reason(scene):
    """Once it has been started again, and not at its first start."""
    scene.lives["rollout-0"] = [(1.0, -9)]
    scene.run(1.1)
    assert not [line for line in scene.said() if "started again" in line]
    scene.run(1.0)
    assert scene.said().count("rollout-0 ended by SIGKILL, started again") == 1


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


@pytest.mark.parametrize(("fork", "told"), [(True, ["packer-0"]), (False, [])])
def test_only_the_packer_is_told_to_fork(make_scene, fork, told):
    """It owns the ledger."""
    scene = make_scene(fork)
    scene.run(1.0)
    assert len(scene.commands) == 5
    assert [name for name, command in scene.commands.items() if "--fork" in command] == told


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


def test_each_child_has_a_metrics_port_of_its_own(scene):
    """telemetry.metrics_port 9100 is the packer's; the others take 9101 to 9104."""
    scene.run(1.0)
    overrides = {name: command[-1] for name, command in scene.commands.items()}
    assert overrides["packer-0"] == "telemetry.metrics_port=9100"
    assert sorted(overrides.values()) == [f"telemetry.metrics_port={port}" for port in range(9100, 9105)]


def test_threads_of_computing_processes_share_the_cores(tmp_path, monkeypatch):
    """8 cores, a trainer and 3 engines: 2 threads each; all others 1; up.torch_threads wins."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = ring_config(tmp_path, up={"inference": 3, "torch_threads": {"trainer": 5}})
    threads = {child.name: child.environment["OMP_NUM_THREADS"] for child in plan(config, None)}
    assert threads["trainer-0"] == "5"
    assert {threads[f"inference-{i}"] for i in range(3)} == {"2"}
    assert threads["rollout-0"] == threads["reward-0"] == threads["packer-0"] == "1"
