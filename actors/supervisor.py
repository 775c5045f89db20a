"""`actors up`: all actors of a run on one machine.

Starts a process per actor, starts what dies again (with a pause that doubles, then a clear failure), shows progress,
and ends when the packer has: by itself at max_steps, or with the reason of the failure. The children are killed by the
kernel when this process dies, however it dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from actors.membership import Membership, PackerSilentError
from actors.screen import Screen
from schemas.config import RunConfig, dump_config, warnings
from schemas.errors import PeerRefusedError, RunFailedError
from schemas.messages import ObserverBeat, ObserverState

EXIT_DONE, EXIT_FAILED = 0, 1
FINAL_CODES = {2: "its configuration can't be used", 3: "the run can't go on"}
EXIT_START_OVER = 75
POLL_SECONDS = 0.1
STEADY_SECONDS = 60.0
"""A process that lived this long is not in a crash loop."""
FIRST_PAUSE_SECONDS = 0.2
STOP_SECONDS = 60.0


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
    except RunFailedError as error:
        print(f"\nrun failed: {error}", file=sys.stderr)
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
            while True:
                self._tend()
                if self._stopping:
                    return 128 + self._stopping
                packer = next(child for child in self.children if child.kind == "packer")
                if packer.finished:
                    self._wait_for_all(STOP_SECONDS)
                    screen.close(self._progress(membership))
                    return EXIT_DONE
                screen.show(self._progress(membership))
                time.sleep(POLL_SECONDS)
        finally:
            membership.close()

    def stop(self) -> None:
        """Drain the children that still run, then kill what does not go."""
        for child in self.children:
            if child.process is not None and child.process.poll() is None and child.kind != "packer":
                child.process.terminate()
        self._wait_for_all(STOP_SECONDS if self._stopping else 5.0, leave_packer=True)
        for child in self.children:
            if child.process is not None and child.process.poll() is None:
                child.process.terminate() if child.kind == "packer" else child.process.kill()
        self._wait_for_all(5.0)
        for child in self.children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
                child.process.wait()

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
        ]
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=child.environment, start_new_session=True
            )
        child.started = time.monotonic()

    def _ended(self, child: Child, code: int) -> None:
        """Decide about a child that has ended: finished, start again, or give up."""
        child.process = None
        if code == 0:
            child.finished = True
            return
        if code in FINAL_CODES:
            raise RunFailedError(f"{child.name}: {FINAL_CODES[code]}\n{_tail(child.log)}")
        lived = time.monotonic() - child.started
        child.restarts = 0 if lived > STEADY_SECONDS or code == EXIT_START_OVER else child.restarts + 1
        if child.restarts > self._config.up.max_restarts:
            raise RunFailedError(
                f"{child.name} ended {child.restarts} times within {STEADY_SECONDS:.0f} s of its start, last with "
                f"{_describe(code)} (up.max_restarts {self._config.up.max_restarts})\n{_tail(child.log)}"
            )
        child.start_at = time.monotonic() + FIRST_PAUSE_SECONDS * 2 ** max(0, child.restarts - 1)

    def _progress(self, membership: Membership) -> dict[str, Any]:
        with contextlib.suppress(PackerSilentError, PeerRefusedError):
            state = membership.latest()
            if isinstance(state, ObserverState):
                restarts = {child.name: child.restarts for child in self.children if child.restarts}
                return state.progress | {"restarts": restarts}
        return {}

    def _wait_for_all(self, timeout: float, leave_packer: bool = False) -> None:
        deadline = time.monotonic() + timeout
        for child in self.children:
            if child.process is not None and not (leave_packer and child.kind == "packer"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + number)  # the kernel takes the children along
        self._stopping = number


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
            yield (
                kind,
                i,
                os.environ | {"OMP_NUM_THREADS": str(threads.get(kind, 1)), "TOKENIZERS_PARALLELISM": "false"},
            )


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = _read(log.open("rb")).splitlines()[-num_lines:]
    return "\n".join([f"the last lines of {log}:", *lines])


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
        return file.read().decode("utf-8", "replace")
