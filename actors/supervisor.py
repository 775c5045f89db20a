"""`actors up`: all actors of a run on one machine.

Claims the output_dir, starts a process per actor, and again what ends before the run does (with a pause that doubles,
then a clear failure), shows progress, and ends when the run has: by itself at max_steps, or with the reason of the
failure. The children are killed by the kernel when this process dies, however it dies.

SIGTERM or SIGINT stop the run: groups under way are finished, the trainer saves a checkpoint, the packer goes last. The
exit code is then 128 + the signal's number, since the run is not done and a script must not go on as if it were; the
same command goes on with it. A second signal ends everything at once.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from actors.children import Child, how_it_ended, plan, wait_for
from actors.claim import claimed
from actors.membership import DRAIN_SECONDS, Membership, PackerSilentError, StartOverError
from actors.preflight import preflight
from actors.remains import is_done, newest_checkpoint, run_so_far
from actors.telemetry.logs import bind_everywhere, configure_logs
from actors.view.screen import Screen
from bus.topology import Addresses
from schemas.config import RunConfig, warnings
from schemas.config.resolved import write_resolved
from schemas.config.resume import differences, refusal
from schemas.errors import ConfigError, PeerRefusedError, RunFailedError
from schemas.messages import ObserverBeat, ObserverState

log = structlog.get_logger("up")

EXIT_DONE, EXIT_FAILED = 0, 1
EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_START_OVER = 2, 3, 75
"""Of actors: see `actors.runtime`, which is not imported here, since it loads what the actors need."""
POLL_SECONDS = 0.1
STEADY_SECONDS = 60.0
"""A process that lived this long is not in a crash loop."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
END_SECONDS = 5.0
"""For the children to leave by themselves once the packer has; who has not heard of the end by then is told."""
STOP_STAGES = (
    (("trainer", "rollout"), ("rollout",), DRAIN_SECONDS + 5.0, 1.0),
    (("reward",), ("reward",), DRAIN_SECONDS + 5.0, 1.0),
    (("inference", "inference-pool"), ("inference", "inference-pool", "trainer"), 120.0, 60.0),
    (("packer",), ("packer",), 10.0, 10.0),
)
"""Who is told to leave, who is waited for, how long, and how long when the run has failed. Rollouts need rewards to get
rid of their groups, all need the packer, and the trainer may be in the middle of a long step."""


def supervise(config: RunConfig, fork: bool = False) -> int:
    """Run everything; returns the exit code.

    Args:
        config: of the run.
        fork: whether a configuration of another identity may go on with the run that lies in its output_dir (P23).

    Raises:
        ConfigError: a run is going on in the output_dir, or the configuration can't be used.
    """
    preflight(config)
    output = config.output
    (output / "logs").mkdir(parents=True, exist_ok=True)
    with claimed(output) as claim, (output / "logs" / "up.log").open("a", encoding="utf-8") as up_log:
        refused = [] if fork else refusal(differences(run_so_far(config), config))
        if refused:
            raise ConfigError(*refused)  # before config.resolved.yaml says otherwise
        if is_done(config):
            print(f"run {config.name}: {output}\nnothing to do: done at step {config.trainer.max_steps}")
            return EXIT_DONE
        resolved = write_resolved(config)
        for warning in warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        configure_logs(config.telemetry, up_log)
        bind_everywhere(actor="up")
        supervisor = Supervisor(config, resolved, (claim,), fork)
        try:
            return supervisor.run()
        except (RunFailedError, PeerRefusedError) as error:
            log.error("run failed", reason=str(error))
            where = "" if isinstance(error, RunFailedError) else f"\nlogs: {output / 'logs'}"  # it names the one log
            print(f"\nrun failed: {error}{where}", file=sys.stderr)
            return EXIT_FAILED
        finally:
            supervisor.stop()
            clean_up(config)


def clean_up(config: RunConfig) -> None:
    """Remove what only a run under way has a use for: sockets, and weights in shared memory."""
    from actors.assembly import weights_directory  # here: it loads what the actors need

    Addresses(config).remove()
    shutil.rmtree(weights_directory(config), ignore_errors=True)


class Supervisor:
    """The children of one run. They inherit the descriptors given; `fork` is for the packer."""

    def __init__(self, config: RunConfig, config_path: Path, inherited: Sequence[int] = (), fork: bool = False) -> None:
        self._config, self._config_path, self._inherited, self._fork = config, config_path, inherited, fork
        self._started_at = time.time()
        self.children = list(plan(config))
        self._screen = Screen(sys.stdout, config)
        self._continues = config.ledger_path.exists()
        self._stopping = 0

    def run(self) -> int:
        """Until the packer has ended."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        membership = Membership(self._config, ObserverBeat, f"up-{os.getpid()}")
        membership.start(phase="running")
        try:
            while not self._stopping:
                progress = self._progress(membership)  # first, since it tells the reason of a failure in words
                self._tend()
                if self._packer.finished:
                    wait_for(self.children, END_SECONDS)
                    self._screen.close(self._progress(membership))
                    return EXIT_DONE
                self._screen.show(progress, membership.silent_seconds)
                time.sleep(POLL_SECONDS)
            log.info("stopping", signal=signal.Signals(self._stopping).name)
            self._screen.close(self._progress(membership))
            print(
                "stopping; once more ends everything at once. The same command goes on from where it stopped",
                file=sys.stderr,
            )
            return 128 + self._stopping
        finally:
            membership.close()

    def stop(self) -> None:
        """Let the children that still run drain, stage by stage, then kill what does not go."""
        for told, awaited, seconds, seconds_when_failed in STOP_STAGES:
            for child in self._of(told):
                child.signal(signal.SIGTERM)
            # a run that is done has no work left: who is still there does not hear
            limit = END_SECONDS if self._packer.finished else seconds if self._stopping else seconds_when_failed
            for child in wait_for(self._of(awaited), limit):
                child.signal(signal.SIGKILL)
            wait_for(self._of(awaited), END_SECONDS)
        for child in self.children:
            if child.process is not None and child.process.returncode is not None:
                log.info("ended", child=child.name, how=how_it_ended(child.process.returncode))
        if self._stopping:
            step = newest_checkpoint(self._config)
            saved = f"saved step {step}" if step else "no step has been saved"
            print(f"{saved}; the same command goes on", file=sys.stderr)

    def _tend(self) -> None:
        for child in self.children:
            if child.finished or self._stopping:
                continue
            if child.process is None:
                if time.monotonic() >= child.start_at:
                    self._start(child)
            elif (code := child.process.poll()) is not None:
                self._ended(child, code)

    def _start(self, child: Child) -> None:
        command = [
            sys.executable,
            "-m",
            "actors",
            "run",
            child.kind,
            "--config",
            str(self._config_path),
            "--name",
            child.name,
            "--parent",
            str(os.getpid()),
            "--started-at",
            str(self._started_at),
            *(["--fork"] if self._fork and child is self._packer else []),
            *self._port_of(child),
        ]
        log.info("started", child=child.name, pid=child.start(command, self._inherited), restarts=child.restarts)
        if child.ended:
            self._screen.say(f"{child.name} ended {child.ended}, started again")

    def _port_of(self, child: Child) -> list[str]:
        """A configured port is the first child's; the others take the next ones."""
        first = self._config.telemetry.metrics_port
        return [f"telemetry.metrics_port={first + self.children.index(child)}"] if first else []

    def _ended(self, child: Child, code: int) -> None:
        """Decide about a child that has ended: finished, start again, or give up.

        The packer writes the summary before it tells anybody that the run is done, and a run under way has none; so a
        child that ends well without it has been drained by somebody else, and is missed.
        """
        lived = time.monotonic() - child.started
        child.process, child.ended = None, how_it_ended(code)
        log.info("ended", child=child.name, how=child.ended, lived_seconds=round(lived, 1))
        if code == 0 and (self._config.output / "summary.json").exists():
            child.finished = True
            return
        where = f"log: {child.log}"
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name}: its configuration can't be used", *child.last_words(), where)
        if code == EXIT_RUN_FAILED:
            raise RunFailedError("\n".join([f"{child.name}: the run can't go on", *child.last_words(), where]))
        if lived > STEADY_SECONDS:
            child.restarts = 0
        child.restarts += code != EXIT_START_OVER
        if child.restarts > self._config.up.max_restarts:
            what = (
                f"{child.name} ended {child.restarts} times within {STEADY_SECONDS:.0f} s of its start, last "
                f"{child.ended} (up.max_restarts {self._config.up.max_restarts})"
            )
            raise RunFailedError("\n".join([what, *child.last_words(), where]))
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** max(0, child.restarts - 1))
        child.start_at = time.monotonic() + pause
        log.info("pause", child=child.name, seconds=pause)

    def _progress(self, membership: Membership) -> dict[str, Any]:
        with contextlib.suppress(PackerSilentError, StartOverError):
            state = membership.latest()
            if isinstance(state, ObserverState):
                if self._continues:
                    self._screen.say(f"continuing run {self._config.name} from step {state.step}")
                self._continues = False
                restarts = {child.name: child.restarts for child in self.children if child.restarts}
                return state.progress | {"restarts": restarts | state.progress.get("restarts", {})}
        return {}

    @property
    def _packer(self) -> Child:
        return next(child for child in self.children if child.kind == "packer")

    def _of(self, kinds: Sequence[str]) -> list[Child]:
        return [child for child in self.children if child.kind in kinds]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + number)  # the kernel takes the children along
        self._stopping = number
