"""One long real run under `actors up`, the faults that meet it, and the judgement of its witnesses.

start ─▶ [ fault ─▶ its actor works again ─▶ a step more ] × N ─▶ SIGTERM ─▶ the same command, few steps ─▶ judge
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from actors.ops.up.child import plan
from actors.process.fault_points import LOOPS
from actors.telemetry.reporter import read_lines
from bus.topology import Addresses
from schemas.config import RunConfig, dump_config
from tests.actors.engines.sglang.stub import serving
from tests.chaos.disk import filled, small_disk
from tests.chaos.faults import Fault, draw
from tests.chaos.neighbour import ports_of, send_strange_messages, stand_in
from tests.chaos.network import PORT, Network, network
from tests.chaos.threads import thread_at
from tests.chaos.watch import LateError, Mark, UpEndedError, Watch
from tests.ring.witness_checker import Testimony, WitnessError, check_witnesses

START_SECONDS = 240.0
HIT_SECONDS = 60.0
RECOVERY_SECONDS = 150.0
END_SECONDS = 240.0
BEYOND_LEASE_SECONDS = 0.5
SAID_SECONDS = 60.0
FULL_SECONDS = 3.0
TOKEN_SECONDS = 0.01
"""Of a stub of a server, as of the fake engine."""
NOBODY = "nobody"
HARM = "harm"
"""Folder in which the harm to a worker of an environment is armed."""
LAST_STEPS = 3
"""Trained undisturbed at the end, so that the last checkpoint testifies to all faults."""


TURNS = ("trainer.turn_ends", "inference.before_wake", "inference.rests")
"""Points of trainer and engine that take turns on a device."""


@dataclass(frozen=True)
class Plan:
    """A kind of run: how it is configured, and what besides signals may happen to it."""

    name: str
    configure: Callable[[Path, str], RunConfig]
    ranks: int = 1
    others: tuple[Fault, ...] = ()
    others_per_round: int = 1
    networked: bool = False
    never_passed: tuple[str, ...] = ("inference.receiving", *TURNS)
    """Points that no process of this run comes by: without the rendezvous channel nobody is in a broadcast, and without
    turns nobody gives a device back."""
    least_reward: float | None = None
    """Least reward that is honest; a lower one is a failure that became a reward."""


@dataclass
class Outcome:
    """How a run took one fault; `seconds` from the fault to work again, None where that did not come."""

    fault: Fault
    plan: str
    seconds: float | None = None
    restart_seconds: float | None = None
    """Of these, until the process that works again was started."""
    problem: str = ""

    def __str__(self) -> str:
        started = f", its process started after {self.restart_seconds:.1f} s" if self.restart_seconds else ""
        return f"{self.fault}: {self.problem or f'{self.seconds:.1f} s{started}'}"


@dataclass
class Result:
    """All of one run."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    testimony: Testimony | None = None
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> Counter[str]:
        """Groups dropped, by reason."""
        return Counter(self.testimony.dropped.values() if self.testimony else ())


class Stage:
    """Runs one plan in a folder."""

    def __init__(self, plan_: Plan, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._plan, self._folder, self._say = plan_, folder, say
        self._result = Result(plan_)
        self._net: Network | None = None
        self._disk = False
        self._last = 0
        self._up: subprocess.Popen[bytes] | None = None

    def run(self, seed: int, number: int, points: Sequence[str], these: Sequence[Fault] | None = None) -> Result:
        """So many faults from this seed, at these points; or just `these`."""
        points = [point for point in points if point not in self._plan.never_passed]
        with ExitStack() as stack:
            others = self._places(stack)
            if others is None:
                return self._result
            self._config = self._configure()
            if self._config.inference.pool:
                port = int(self._config.inference.pool.urls[0].rpartition(":")[2])
                stack.enter_context(serving(port=port, token_seconds=TOKEN_SECONDS))
            stack.callback(self._end)
            order = [child.name for child in plan(self._config, None)]
            armed = self._folder / "faults"
            armed.mkdir()
            self._watch = Watch(self._config, order, self._host, armed)
            if these is None:
                faults = draw(seed, number, self._plan.ranks, points, others, self._plan.others_per_round)
            else:
                faults = [fault for fault in these if fault in others]
            try:
                self._meet(faults)
                self._finish()
            except (LateError, UpEndedError) as error:
                self._result.problems.append(f"{error}; see {self._folder}")
            self._judge()
        return self._result

    # --- where it runs -------------------------------------------------------------------------------------------

    def _places(self, stack: ExitStack) -> list[Fault] | None:
        """Make disk and network; returns the faults that this machine allows, None where the run makes no sense."""
        others = list(self._plan.others)
        if any(fault.kind == "full disk" for fault in others):
            why = stack.enter_context(small_disk(self._folder / "disk"))
            self._disk = not why
            if why:
                others = [fault for fault in others if fault.kind != "full disk"]
                self._result.skipped.append(f"full disk: {why}")
        if self._plan.networked:
            names = [child.name for child in plan(self._plan.configure(self._folder, "ipc"), None)]
            made = stack.enter_context(network(names))
            if isinstance(made, str):
                self._result.skipped.append(f"partition: {made}")
                return None
            self._net = made
        return others

    def _configure(self) -> RunConfig:
        control = f"tcp://{self._net.host('packer-0')}:{PORT}" if self._net else "ipc"
        config = self._plan.configure(self._folder / "disk" if self._disk else self._folder, control)
        (self._folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
        return config

    def _host(self, name: str) -> str:
        return self._net.host(name) if self._net else "127.0.0.1"

    def _start(self, *overrides: str) -> None:
        module = ["actors"]
        if self._net:
            module = ["tests.chaos.network", str(self._net.launcher(self._folder))]
        environment = os.environ | {"GRPO_FAULTS": str(self._folder / "faults")}
        with (self._folder / "up.log").open("ab") as log:
            command = [sys.executable, "-m", *module, "up", str(self._folder / "run.yaml"), *overrides]
            self._up = self._watch.up = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _end(self) -> None:
        if self._up is not None and self._up.poll() is None:
            self._up.kill()
            self._up.wait(60.0)
            time.sleep(0.5)  # the kernel is killing its children
        Addresses(self._config).remove()
        shutil.rmtree(self._config.weights.directory, ignore_errors=True)

    # --- what happens to it --------------------------------------------------------------------------------------

    def _meet(self, faults: Sequence[Fault]) -> None:
        self._start()
        self._watch.wait(lambda: self._watch.steps() >= 1, "the first step", START_SECONDS)
        for number, fault in enumerate(faults, start=1):
            outcome = Outcome(fault, self._plan.name)
            self._result.outcomes.append(outcome)
            try:
                self._inject(outcome)
            except LateError as error:
                outcome.problem = str(error)
            except UpEndedError as error:
                outcome.problem = f"{error}; its last words: {self._last_words()}"
                self._start()
            self._watch.disarm()
            self._say(f"{self._plan.name} {number}/{len(faults)} {outcome}")
            self._wait_for_step(f"a step after {fault}, fault {number} of {len(faults)}")  # else no other makes sense

    def _wait_for_step(self, what: str) -> None:
        steps = self._watch.steps()
        self._watch.wait(lambda: self._watch.steps() > steps, what, RECOVERY_SECONDS)

    def _last_words(self) -> str:
        return " | ".join((self._folder / "up.log").read_text(encoding="utf-8").splitlines()[-4:])

    def _inject(self, outcome: Outcome) -> None:
        fault = outcome.fault
        if fault == Fault("SIGKILL", "up"):
            self._kill_up(outcome)
        elif fault.kind == "full disk":
            self._fill_disk(outcome)
        elif fault.kind == "partition":
            self._cut_off(outcome)
        elif fault.kind == "exception":
            self._raise(outcome)
        elif fault.kind == "foreign run":
            self._give_ports_away(outcome)
        elif fault.kind == "environment worker":
            self._harm_worker(outcome)
        elif fault.kind == "SIGSTOP":
            self._stop(outcome)
        else:
            self._kill(outcome)

    def _kill(self, outcome: Outcome) -> None:
        pid, began = self._arm(outcome.fault, "SIGKILL")
        mark = Mark(pid, self._watch.steps(), self._watch.issued())
        self._recovered(outcome, mark, began, anew=True)

    def _raise(self, outcome: Outcome) -> None:
        """In a thread: the log says so, and its process ends and is started again, or goes on, as the table has it."""
        fault, watch = outcome.fault, self._watch
        thread, logged = thread_at(fault.actor, fault.point), watch.log_size(fault.actor)
        pid, began = self._arm(fault, "SystemExit" if fault.point in LOOPS else "RuntimeError")
        mark = Mark(pid, watch.steps(), watch.issued())
        what = f"{fault.actor} says {' or '.join(thread.says)!r} after {fault}"
        watch.wait(lambda: watch.has_said(fault.actor, logged, thread), what, SAID_SECONDS)
        if thread.ends:
            self._recovered(outcome, mark, began, anew=True)
        else:
            self._recovered(outcome, watch.mark(fault.actor), began, anew=False)
            if watch.pid(fault.actor) != pid:
                outcome.problem = "its process has ended, and should have gone on"

    def _stop(self, outcome: Outcome) -> None:
        _, began = self._arm(outcome.fault, "SIGSTOP")
        pid = self._watch.pid(outcome.fault.actor)
        time.sleep(self._config.bus.lease + BEYOND_LEASE_SECONDS)
        self._watch.signal(pid, signal.SIGCONT)
        self._recovered(outcome, self._watch.mark(outcome.fault.actor), began, anew=False)

    def _arm(self, fault: Fault, harm: str) -> tuple[int, float]:
        """Returns the victim's pid, and when it was hit."""
        pid = self._wait_for_pid(fault.actor)
        self._watch.arm(fault.actor, fault.point, harm)
        if fault.by is not None:
            pid = self._provoke(fault.by, fault.actor, pid)
        what = f"{fault.actor} passes the point {fault.point}"
        began = self._watch.wait(lambda: self._watch.hit(fault.actor, fault.point), what, HIT_SECONDS)
        return pid, began

    def _provoke(self, by: Fault, actor: str, pid: int) -> int:
        """Bring an actor to where a fault is armed; returns its pid then."""
        if by.kind == "exception":
            self._watch.arm(by.actor, by.point, "RuntimeError")
        else:
            self._watch.signal(self._wait_for_pid(by.actor), signal.SIGKILL)
        if by.kind != "SIGKILL" or by.actor != actor:
            return pid
        self._watch.wait(lambda: self._watch.pid(actor) not in (0, pid), f"a new process of {actor}", HIT_SECONDS)
        return self._watch.pid(actor)

    def _wait_for_pid(self, actor: str) -> int:
        return int(self._watch.wait(lambda: self._watch.pid(actor), f"a process of {actor}", HIT_SECONDS))

    def _kill_up(self, outcome: Outcome) -> None:
        assert self._up is not None
        term, began = self._watch.term(), time.time()
        self._up.kill()
        self._up.wait()
        self._start()
        self._watch.wait(lambda: self._watch.term() > term, "a new packer after SIGKILL of actors up", RECOVERY_SECONDS)
        self._wait_for_step("a step after SIGKILL of actors up")
        outcome.seconds = time.time() - began

    def _fill_disk(self, outcome: Outcome) -> None:
        actor = outcome.fault.actor
        with filled(self._folder / "disk"):
            if actor != NOBODY:  # dies while there is no room, and its successor starts so
                self._watch.signal(self._wait_for_pid(actor), signal.SIGKILL)
            time.sleep(FULL_SECONDS)
        began = time.time()
        self._wait_for_step("a step after the disk was full")
        outcome.seconds = time.time() - began

    def _cut_off(self, outcome: Outcome) -> None:
        assert self._net is not None
        actor, began = outcome.fault.actor, time.time()
        with self._net.cut_off(actor):
            time.sleep(self._config.bus.lease + BEYOND_LEASE_SECONDS)
        self._recovered(outcome, self._watch.mark(actor), began, anew=False)

    def _give_ports_away(self, outcome: Outcome) -> None:
        """Kill an actor, let another run have its ports for a while, and have that run's processes send to the next."""
        actor, own_metrics = outcome.fault.actor, self._config.telemetry.metrics_port
        control = int(self._config.bus.control.rpartition(":")[2])
        pid, metrics = self._wait_for_pid(actor), range(own_metrics, own_metrics + len(list(plan(self._config, None))))
        mark, began = self._watch.mark(actor), time.time()
        ports = ports_of(pid).difference(metrics)
        self._watch.signal(pid, signal.SIGKILL)
        stand_in(control, ports)
        what = f"a new process of {actor}"
        self._watch.wait(lambda: self._watch.pid(actor) not in (0, pid), what, RECOVERY_SECONDS)
        successor = self._watch.pid(actor)
        found = self._watch.wait(
            lambda: ports_of(successor).difference(metrics, [control]), f"ports of {what}", RECOVERY_SECONDS
        )
        send_strange_messages(found)
        self._recovered(outcome, mark, began, anew=True)
        what = f"{actor} drops what another run has sent it"
        self._watch.wait(lambda: self._watch.num_foreign(actor), what, RECOVERY_SECONDS)

    def _harm_worker(self, outcome: Outcome) -> None:
        """In the middle of a step: a worker is lost or stands still, and its rollout actor goes on."""
        fault, folder = outcome.fault, self._folder / HARM
        pid = self._wait_for_pid(fault.actor)
        (folder / "hit").unlink(missing_ok=True)
        staged = folder / ".armed"
        staged.write_text(fault.point, encoding="utf-8")
        staged.rename(folder / "armed")
        self._watch.wait((folder / "hit").exists, f"a step of an environment takes {fault}", HIT_SECONDS)
        began = time.time()
        self._recovered(outcome, self._watch.mark(fault.actor), began, anew=False)
        if self._watch.pid(fault.actor) != pid:
            outcome.problem = "its process has ended, and should have gone on"

    def _recovered(self, outcome: Outcome, mark: Mark, began: float, *, anew: bool) -> None:
        """Wait until the actor works again, and note how long that took."""
        actor, watch = outcome.fault.actor, self._watch
        if anew:
            watch.wait(lambda: watch.pid(actor) not in (0, mark.pid), f"a new process of {actor}", RECOVERY_SECONDS)
            outcome.restart_seconds = time.time() - began
        what = f"new work of {actor} after {outcome.fault}"
        watch.wait(lambda: watch.has_worked_since(actor, mark, anew=anew), what, RECOVERY_SECONDS)
        outcome.seconds = time.time() - began

    # --- how it ends ---------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Stop softly, then let the same command train a few steps more, to its end."""
        self._watch.disarm()
        self._stop_up()
        last = max(self._watch.steps(), _newest_witness(self._config)) + LAST_STEPS
        self._start(f"trainer.max_steps={last}")
        code = self._wait_for_up("actors up ends at max_steps")
        if code != 0:
            self._result.problems.append(f"the last actors up ended with {code}; see {self._folder}")
        self._last = last

    def _stop_up(self) -> None:
        assert self._up is not None
        self._up.terminate()
        code = self._wait_for_up("actors up ends after SIGTERM")
        if code != 128 + signal.SIGTERM:
            self._result.problems.append(f"actors up ended with {code} after SIGTERM; see {self._folder}")

    def _wait_for_up(self, what: str) -> int:
        assert self._up is not None
        try:
            return self._up.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise LateError(f"not within {END_SECONDS:g} s: {what}") from error

    def _judge(self) -> None:
        """By the witness files alone."""
        try:
            said = self._result.testimony = check_witnesses(self._config.output)
        except WitnessError as error:
            self._result.problems.append(f"the promise is broken: {error}; see {self._folder}")
            self._keep()
            return
        groups = self._config.packer.groups_per_step
        if len(said.trained) != said.steps * groups or said.steps < self._last:
            self._result.problems.append(f"{said.steps} steps have {len(said.trained)} groups of {groups} each")
        if low := self._unearned():
            self._result.problems.append(f"rewards that no environment gave: {low}; see {self._folder}")
        if said.dropped:
            self._result.problems.append(f"dropped: {dict(self._result.dropped)}; see {self._folder}")
        if self._result.problems:
            self._keep()

    def _unearned(self) -> list[float]:
        """Return the rewards below the least that an honest trajectory earns."""
        if (least := self._plan.least_reward) is None:
            return []
        records = read_lines(self._config.output / "samples.jsonl")
        return [reward for record in records for reward in record["reward"] if reward is not None and reward < least]

    def _keep(self) -> None:
        """A disk of memory goes with the run; what explains a problem does not."""
        if self._disk:
            shutil.copytree(self._config.output, self._folder / "kept", dirs_exist_ok=True)


def _newest_witness(config: RunConfig) -> int:
    folder = config.output / "checkpoints" / "witness"
    return max((int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.json")), default=0)
