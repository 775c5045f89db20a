"""Runs of the whole ring for tests: as threads of this process, as real processes, or mixed.

No model is loaded: `inference.engine.type: fake` makes the actors use FakeEngine and FakeLearner, so that a step takes
milliseconds. Tests wait on state (the ledger's file, an observer's directive, /metrics), never for a time.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.assembly import MAKERS
from actors.learner.fake import FakeLearner
from actors.ops.up.forked import ALL_KINDS, ForkedProcess, ForkServer
from actors.packer.loop import PackerActor
from actors.process.actor import Actor
from actors.process.membership import Membership
from actors.telemetry.metrics import ACTORS, Metrics
from bus.topology import Addresses
from schemas.config import RunConfig, dump_config
from schemas.config.load import check_tree
from schemas.errors import PeerRefusedError
from schemas.messages import ObserverDirective, ObserverHeartbeat, StepBatch
from tests.ports import free_port
from tests.processes import children as children_of
from tests.ring.witness_checker import Testimony, check_witnesses

REWARDS = Path(__file__).with_name("rewards.py")
TORCH = (
    "safetensors.torch",
    "actors.learner.learner",
    "actors.models.loading",
    "actors.engines.embedded.engine",
    "peft",
)
"""Modules of actors that compute, for the fork server of the tests."""
TRANSPORTS = ("tcp", "ipc", "inproc")
ALL = ("packer", "trainer", "inference", "reward", "rollout")
PATIENCE_SECONDS = 150.0
"""Limit of a wait for something that is known to come; only a hang reaches it, however busy the machine is."""

LEASE_SECONDS = 10.0
"""Longer than a busy machine holds a process up: nobody who lives is given up."""
SHORT_LEASE = {"lease": 1.5}
"""`bus` of a test that has to wait for the end of a lease, or for a packer that waits for one after its restart."""


def ring_config(folder: Path, transport: str = "ipc", **sections: Any) -> RunConfig:
    """A small fast run; `sections` are merged into it, e.g. `trainer={"max_steps": 20}`."""
    tree: dict[str, Any] = {
        "name": "ring",
        "output_dir": str(folder / "out"),
        "model": {"path": "fake"},
        "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 2, "max_tokens": 12, "max_concurrent_groups": 4},
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "packer": {"groups_per_step": 3, "sequence_len": 64},
        "trainer": {"max_steps": 8, "checkpoint": {"interval": 3}},
        "inference": {"engine": {"type": "fake"}},
        "weights": {"directory": str(folder / "weights")},
        "eval": {"num_prompts": 3},
        "bus": {
            "control": control_address(transport),
            "beat_interval": 0.2,
            "lease": LEASE_SECONDS,
            "resend_after": 2.0,
        },
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return check_tree(tree)


def held_reward(folder: Path, calls: int) -> dict[str, Any]:
    """The `reward` section for a run that stands still after so many groups, until the test lets it `go_on`."""
    return own_reward("held", folder=str(folder), calls=calls)


def go_on(folder: Path) -> None:
    """Let a run with `held_reward` go on to its end."""
    (folder / "go_on").touch()


def own_reward(function: str, **kwargs: Any) -> dict[str, Any]:
    """The `reward` section for a function of tests/ring/rewards.py."""
    return {"functions": [{"path": f"{REWARDS}:{function}", "kwargs": kwargs}]}


def control_address(transport: str) -> str:
    """`bus.control` of a transport; with tcp a port that is free now."""
    if transport != "tcp":
        return transport
    return f"tcp://127.0.0.1:{free_port()}"


def wait_until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_SECONDS) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout:g} s: {what}")


class Stand:
    """Stops the trainer before a step, so that the run can't end before the test has done what it came for."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.reached, self.go_on = threading.Event(), threading.Event()

    def learner(self) -> FakeLearner:
        """For `Ring.start("trainer-0", learner=...)`."""
        return FakeLearner(before_step=self.before_step)

    def before_step(self, batch: StepBatch) -> None:
        """For a learner of the test's own."""
        if batch.step == self._step:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_SECONDS)


class CrashError(Exception):
    """What `Ring.crash` raises inside an actor."""


class Running:
    """An actor in a thread."""

    def __init__(self, actor: Actor, metrics: Metrics) -> None:
        self.actor, self.metrics, self.name = actor, metrics, actor.name
        self.error: Exception | None = None
        self._crash_when: Callable[[], bool] = lambda: False
        actor.liveness.on_turn = self._crash_if_asked
        if isinstance(actor, PackerActor):
            self._crash_inside_rounds(actor)
        self.thread = threading.Thread(target=self._run, name=f"actor-{self.name}", daemon=True)
        self.thread.start()

    @property
    def turns(self) -> int:
        """Number of iterations of the main loop so far."""
        return self.actor.liveness.turns

    def value(self, metric: str, **labels: str) -> float:
        """A metric's value."""
        value = self.metrics.registry.get_sample_value(metric, labels)
        assert value is not None, f"{self.name} has no {metric} {labels}"
        return value

    def crash(self, when: Callable[[], bool] = lambda: True) -> None:
        """Have the main loop raise at its first turn at which `when()`, asked there, is true; wait for its end."""
        self._crash_when = when
        self.thread.join(PATIENCE_SECONDS)
        assert isinstance(self.error, CrashError), f"{self.name} has not crashed: {self.error}"

    def end(self) -> None:
        """Have the main loop raise at its next turn."""
        self._crash_when = lambda: True

    def _run(self) -> None:
        try:
            self.actor.run()
        except Exception as error:
            self.error = error

    def _crash_if_asked(self) -> None:
        if self._crash_when():
            raise CrashError(self.name)

    def _crash_inside_rounds(self, packer: PackerActor) -> None:
        """Crash a packer before the commit of its round: a crash after the commit would cost the run nothing."""
        record, method = packer.record, "follow"
        follow = getattr(record, method)

        def follow_or_crash(finished: Any) -> None:
            self._crash_if_asked()
            follow(finished)

        setattr(record, method, follow_or_crash)


class Ring:
    """A run whose actors are threads of this process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.actors: dict[str, Running] = {}

    def start(self, *names: str, **collaborators: Any) -> "Ring":
        """Start actors by name (`rollout-1`); without names one of each kind."""
        for name in names or tuple(f"{kind}-0" for kind in ALL):
            kind = next(kind for kind in ACTORS if kind == name.partition("-")[0])
            metrics = Metrics(kind)
            self.actors[name] = Running(MAKERS[kind](self.config, name, metrics, **collaborators), metrics)
        return self

    def __getitem__(self, name: str) -> Running:
        return self.actors[name]

    @property
    def packer(self) -> PackerActor:
        """The newest packer."""
        actor = self["packer-0"].actor
        assert isinstance(actor, PackerActor)
        return actor

    def crash(self, name: str, step: int) -> None:
        """Crash an actor at its first turn after the packer has heard of a step; such a turn comes before its end."""
        self[name].crash(lambda: self.packer.machine.trained_step >= step)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> None:
        """Until all actors have ended; none may have failed."""
        deadline = time.monotonic() + timeout
        for running in list(self.actors.values()):
            running.thread.join(max(0.0, deadline - time.monotonic()))
        failed = {r.name: r.error for r in self.actors.values() if r.error and not isinstance(r.error, CrashError)}
        late = [r.name for r in self.actors.values() if r.thread.is_alive()]
        assert not failed, failed
        assert not late, f"still running after {timeout:g} s: {late}"

    def stop(self) -> None:
        """End all actors that still run; the packer last, or the farewell of a peer would reach the next ring's."""
        for is_packer in (False, True):
            ending = [r for r in self.actors.values() if isinstance(r.actor, PackerActor) is is_packer]
            for running in ending:
                running.end()
            for running in ending:
                running.thread.join(30.0)


@contextlib.contextmanager
def ring(config: RunConfig) -> Iterator[Ring]:
    """A Ring whose threads end with the block."""
    made = Ring(config)
    try:
        yield made
    finally:
        made.stop()
        Addresses(config).remove()


class Watcher:
    """What an observer of the run sees."""

    def __init__(self, config: RunConfig) -> None:
        self._membership = Membership(config, ObserverHeartbeat, "watcher")
        self._membership.start(phase="running")

    def progress(self) -> dict[str, Any]:
        """The newest progress; empty before the first directive. A failed run shows its reason under `failure`."""
        try:
            directive = self._membership.latest()
        except PeerRefusedError as error:
            return {"failure": str(error)}
        return directive.progress if isinstance(directive, ObserverDirective) else {}

    def close(self) -> None:
        """Stop watching."""
        self._membership.close()


@contextlib.contextmanager
def watching(config: RunConfig) -> Iterator[Watcher]:
    """A Watcher that ends with the block."""
    watcher = Watcher(config)
    try:
        yield watcher
    finally:
        watcher.close()


class Forked(ForkedProcess):
    """A process from a fork server, with what tests want of a subprocess.Popen."""

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Wait for the exit; return the exit code."""
        wait_until(lambda: self.poll() is not None, f"the end of process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


Process = subprocess.Popen[bytes] | Forked


def start_actors(arguments: Sequence[str], log: Path) -> Process:
    """Start a command of `actors`, with one thread of torch: from the fork server of the tests of this process.

    The server has the environment of these tests. Where a test has changed that, the command is a program of its own.
    """
    environment = os.environ | ONE_THREAD
    with log.open("ab") as output:
        if _known(environment) == _ENVIRONMENT:
            forked = _fork_server().fork(arguments, environment, output.fileno())
            return Forked(forked.pid, forked.args)
        command = [sys.executable, "-m", "actors", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _known(environment: dict[str, str]) -> dict[str, str]:
    """The part of an environment that tells nothing about the tests themselves."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_ENVIRONMENT = _known(os.environ | ONE_THREAD)
_servers: list[ForkServer] = []
"""The fork server of this process's tests, once one of them has needed it."""


def _fork_server() -> ForkServer:
    """The fork server, with torch."""
    if not _servers or not _servers[0].is_ready():
        _servers[:] = [ForkServer((*ALL_KINDS, *TORCH))]
        wait_until(_servers[0].is_ready, "the fork server of the tests")
    return _servers[0]


class Processes:
    """Real processes of one run, killed at the end of the test whatever happens."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.config_path = folder / "run.yaml"
        self.config_path.write_text(dump_config(config), encoding="utf-8")
        self.processes: dict[str, Process] = {}

    def run(self, name: str, *arguments: str) -> Process:
        """`actors run KIND --name NAME`; output goes to NAME.log in the test's folder."""
        kind = name.partition("-")[0]
        return self.spawn(name, "run", kind, "--config", str(self.config_path), "--name", name, *arguments)

    def up(self, *arguments: str) -> Process:
        """`actors up`."""
        return self.spawn("up", "up", str(self.config_path), *arguments)

    def spawn(self, label: str, *arguments: str) -> Process:
        """Any command of `actors`."""
        process = self.processes[label] = start_actors(arguments, self.log(label))
        return process

    def log(self, label: str) -> Path:
        """Where a process writes."""
        return self.folder / f"{label}.log"

    def text(self, label: str) -> str:
        """What it has written."""
        return self.log(label).read_text(encoding="utf-8")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(PATIENCE_SECONDS)
        Addresses(self.config).remove()


@contextlib.contextmanager
def processes(config: RunConfig, folder: Path) -> Iterator[Processes]:
    """Processes that end with the block."""
    made = Processes(config, folder)
    try:
        yield made
    finally:
        made.end()


def rows(config: RunConfig, where: str) -> list[tuple[int, str, str | None, int]]:
    """(ordinal, state, holder, attempt) of groups in the ledger's file; none while there is no file yet."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{config.ledger_path}?mode=ro", uri=True)) as ledger:
            return ledger.execute(f"SELECT ordinal, state, holder, attempt FROM groups WHERE {where}").fetchall()
    except sqlite3.OperationalError:
        return []


def held_by(config: RunConfig, name: str) -> list[int]:
    """Ordinals that an actor is sampling or keeps unsettled, as the ledger has it."""
    return [ordinal for ordinal, *_ in rows(config, f"state = 'issued' AND holder LIKE '{name}/%'")]


def steps_recorded(config: RunConfig) -> int:
    """Lines of metrics.jsonl."""
    path = config.output / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def scrape(config: RunConfig, name: str) -> str:
    """/metrics of an actor, found through metrics_targets.json; empty while it can't be reached."""
    try:
        targets = json.loads((config.output / "metrics_targets.json").read_text(encoding="utf-8"))
        address = next(t["targets"][0] for t in targets if t["labels"]["name"] == name)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
            return str(answer.read(), "utf-8")
    except (OSError, StopIteration):
        return ""


def scraped(config: RunConfig, name: str, sample: str) -> float:
    """One sample of an actor's /metrics; 0 where it can't be reached."""
    lines = [line for line in scrape(config, name).splitlines() if line.startswith(f"{sample} ")]
    return float(lines[0].split()[-1]) if lines else 0.0


def children(parent: int) -> dict[str, int]:
    """Pids of the actors that `actors up` with this pid has started, by name."""
    commands = {child.pid: child.command for child in children_of(parent)}
    return {words[words.index("--name") + 1]: pid for pid, words in commands.items() if "--name" in words}


def summary_of(config: RunConfig) -> dict[str, Any]:
    """summary.json."""
    return json.loads((config.output / "summary.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def check_promise(config: RunConfig) -> Testimony:
    """Ledger and witnesses agree, on their own, that nothing was lost and nothing trained twice."""
    said, ledger = check_witnesses(config.output), summary_of(config)["ledger"]
    planned = config.trainer.max_steps * config.packer.groups_per_step
    assert said.steps == config.trainer.max_steps
    assert len(said.trained) == ledger["trained"] == planned
    assert ledger["trained_twice"] == 0
    assert ledger["in_flight"] == 0
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert len(said.dropped) == sum(ledger["dropped"].values())
    assert steps_recorded(config) == config.trainer.max_steps
    return said
