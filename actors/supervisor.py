"""`actors up`: all actors of a run on one machine.

Starts a process per actor, and again what ends before the run does (with a pause that doubles, then a clear failure),
shows progress, and ends when the run has: by itself at max_steps, or with the reason of the failure. The children are
killed by the kernel when this process dies, however it dies.

SIGTERM or SIGINT stop the run: groups under way are finished, the trainer saves a checkpoint, the packer goes last. The
exit code is then 128 + the signal's number, since the run is not done and a script must not go on as if it were; the
same command goes on with it. A second signal ends everything at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from actors.membership import DRAIN_SECONDS, Membership, PackerSilentError, StartOverError
from actors.screen import Screen
from schemas.config import RunConfig, dump_config, warnings
from schemas.errors import ConfigError, PeerRefusedError, RunFailedError
from schemas.messages import ObserverBeat, ObserverState

EXIT_DONE, EXIT_FAILED = 0, 1
EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_START_OVER = 2, 3, 75
"""Of actors: see `actors.runtime`, which is not imported here, since it loads what the actors need."""
POLL_SECONDS = 0.1
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
"""For glibc, in processes that compute: a step frees and takes the same large tensors again and again."""
STEADY_SECONDS = 60.0
"""A process that lived this long is not in a crash loop."""
FIRST_PAUSE_SECONDS = 0.2
END_SECONDS = 5.0
"""For the children to leave by themselves once the packer has; who has not heard of the end by then is told."""
STOP_STAGES = (
    (("trainer", "rollout"), ("rollout",), DRAIN_SECONDS + 5.0, 1.0),
    (("reward",), ("reward",), DRAIN_SECONDS + 5.0, 1.0),
    (("inference",), ("inference", "trainer"), 120.0, 60.0),
    (("packer",), ("packer",), 10.0, 10.0),
)
"""Who is told to leave, who is waited for, how long, and how long when the run has failed. Rollouts need rewards to get
rid of their groups, all need the packer, and the trainer may be in the middle of a long step."""


@dataclass
class Child:
    """One actor's process and its history."""

    kind: str
    name: str
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    restarts: int = 0
    start_at: float = field(default_factory=time.monotonic)
    finished: bool = False


def supervise(config: RunConfig) -> int:
    """Run everything; returns the exit code."""
    output = config.output
    (output / "logs").mkdir(parents=True, exist_ok=True)
    resolved = output / "config.resolved.yaml"
    resolved.write_text(dump_config(config), encoding="utf-8")
    for warning in warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    supervisor = Supervisor(config, resolved)
    try:
        return supervisor.run()
    except (RunFailedError, PeerRefusedError) as error:
        print(f"\nrun failed: {error}\nlogs: {output / 'logs'}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        supervisor.stop()


class Supervisor:
    """The children of one run."""

    def __init__(self, config: RunConfig, config_path: Path) -> None:
        self._config, self._config_path = config, config_path
        self._started_at = time.time()
        self.children = [
            Child(kind, f"{kind}-{i}", environment, config.output / "logs" / f"{kind}-{i}.log")
            for kind, i, environment in _plan(config)
        ]
        self._stopping = 0

    def run(self) -> int:
        """Until the packer has ended."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        membership = Membership(self._config, ObserverBeat, f"up-{os.getpid()}")
        membership.start(phase="running")
        screen = Screen(sys.stdout, self._config)
        try:
            while not self._stopping:
                progress = self._progress(membership)  # first, since it tells the reason of a failure in words
                self._tend()
                if self._packer.finished:
                    _wait_for(self._running([child.kind for child in self.children]), END_SECONDS)
                    screen.close(self._progress(membership))
                    return EXIT_DONE
                screen.show(progress)
                time.sleep(POLL_SECONDS)
            screen.close(self._progress(membership))
            print("stopping; once more ends everything at once", file=sys.stderr)
            return 128 + self._stopping
        finally:
            membership.close()

    def stop(self) -> None:
        """Let the children that still run drain, stage by stage, then kill what does not go."""
        for told, awaited, seconds, seconds_when_failed in STOP_STAGES:
            for process in self._running(told):
                process.terminate()
            _wait_for(self._running(awaited), seconds if self._stopping else seconds_when_failed)
            for process in self._running(awaited):
                process.kill()
                process.wait()

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
            *self._port_of(child),
        ]
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=child.environment, start_new_session=True
            )
        child.started = time.monotonic()

    def _port_of(self, child: Child) -> list[str]:
        """A configured port is the first child's; the others take the next ones."""
        first = self._config.telemetry.metrics_port
        return [f"telemetry.metrics_port={first + self.children.index(child)}"] if first else []

    def _ended(self, child: Child, code: int) -> None:
        """Decide about a child that has ended: finished, start again, or give up.

        The packer writes the summary before it tells anybody that the run is done, and a run under way has none; so a
        child that ends well without it has been drained by somebody else, and is missed.
        """
        child.process = None
        if code == 0 and (self._config.output / "summary.json").exists():
            child.finished = True
            return
        if code == EXIT_CONFIG:
            raise ConfigError(f"{child.name}: its configuration can't be used", _tail(child.log))
        if code == EXIT_RUN_FAILED:
            raise RunFailedError(f"{child.name}: the run can't go on\n{_tail(child.log)}")
        lived = time.monotonic() - child.started
        if lived > STEADY_SECONDS:
            child.restarts = 0
        child.restarts += code != EXIT_START_OVER
        if child.restarts > self._config.up.max_restarts:
            raise RunFailedError(
                f"{child.name} ended {child.restarts} times within {STEADY_SECONDS:.0f} s of its start, last with "
                f"{_describe(code)} (up.max_restarts {self._config.up.max_restarts})\n{_tail(child.log)}"
            )
        child.start_at = time.monotonic() + FIRST_PAUSE_SECONDS * 2 ** max(0, child.restarts - 1)

    def _progress(self, membership: Membership) -> dict[str, Any]:
        with contextlib.suppress(PackerSilentError, StartOverError):
            state = membership.latest()
            if isinstance(state, ObserverState):
                restarts = {child.name: child.restarts for child in self.children if child.restarts}
                return state.progress | {"restarts": restarts}
        return {}

    @property
    def _packer(self) -> Child:
        return next(child for child in self.children if child.kind == "packer")

    def _running(self, kinds: Sequence[str]) -> "list[subprocess.Popen[bytes]]":
        """The processes of these kinds that have not ended."""
        processes = [child.process for child in self.children if child.kind in kinds]
        return [process for process in processes if process is not None and process.poll() is None]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + number)  # the kernel takes the children along
        self._stopping = number


def _wait_for(processes: "Sequence[subprocess.Popen[bytes]]", timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _plan(config: RunConfig) -> Iterator[tuple[str, int, dict[str, str]]]:
    """(kind, number, environment) of every process; torch's threads add up to the cores."""
    counts = {
        "packer": 1,
        "trainer": config.trainer.num_ranks,
        "inference": config.up.inference,
        "reward": config.up.reward,
        "rollout": config.up.rollout,
    }
    computing = counts["trainer"] + counts["inference"]
    share = max(1, (os.cpu_count() or 1) // computing)
    threads = {"trainer": share, "inference": share} | config.up.torch_threads
    for kind, count in counts.items():
        for i in range(count):
            environment = os.environ | {"OMP_NUM_THREADS": str(threads.get(kind, 1)), "TOKENIZERS_PARALLELISM": "false"}
            yield kind, i, environment | (KEEP_FREED_MEMORY if kind in threads else {})


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = _read(log.open("rb")).splitlines()[-num_lines:]
    return "\n".join([f"the last lines of {log}:", *lines])


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
        return file.read().decode("utf-8", "replace")
