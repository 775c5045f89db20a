"""Processes of `actors up`, each for an actor: command, environment, restarts, and last log lines."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.ops.device_plan import COMPUTING, Actor, DevicePlan, actors_of
from actors.ops.up.fork_server import PYTHON
from actors.ops.up.forked import ForkedProcess, ForkServer
from schemas.config import RunConfig

events = structlog.get_logger("up")

KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
"""Settings of glibc for processes that compute: a step frees and allocates the same large tensors again and again."""
PROGRAM = (sys.executable, *PYTHON, "actors")
"""Program of an actor, started by itself."""
TAIL_LINES = 15
"""Log lines shown for an actor that gave no reason for its exit."""
TAIL_BYTES = 20_000
"""Bytes read at the end of a log."""


@dataclass
class Child:
    """Process of an actor, through all its restarts. Times are monotonic, in seconds."""

    kind: str
    name: str
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | ForkedProcess | None" = None
    started: float = 0.0
    log_start: int = 0
    """Position in the log, in bytes, at which the current process started."""
    ended: str = ""
    """Way in which the process before has exited; empty before the first exit."""
    restarts: int = 0
    """Restarts so far; counted from 0 again after a process that has lived for a minute."""
    start_overs: int = 0
    """Processes in a row that exited in order to start over, while the run made no progress."""
    progress: object = None
    """Progress of the run at the newest of these exits."""
    start_at: float = field(default_factory=time.monotonic)
    """Earliest time of the next start."""
    finished: bool = False
    parked: bool = False
    """True while the run has no need of the process; it is neither started nor missed."""
    kill_at: float = math.inf
    """Time of the SIGKILL of a process that was given back."""

    def start(self, command: Sequence[str], inherited: Sequence[int], server: ForkServer | None = None) -> int:
        """Start the process; return its pid.

        Args:
            command: arguments of `actors`.
            inherited: file descriptors that the process inherits.
            server: fork server that forks the process; None: it is started as a program of its own.
        """
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.process = None
            if server is not None:
                try:
                    self.process = server.fork(command, self.environment, log.fileno(), inherited)
                except OSError as error:
                    events.warning("not forked, so started as a program", child=self.name, reason=str(error))
            if self.process is None:
                self.process = subprocess.Popen(
                    [*PROGRAM, *command],
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                    # Ctrl-C reaches `actors up` alone, which stops the actors in order
                    start_new_session=True,
                    pass_fds=inherited,
                )
        self.started = time.monotonic()
        return self.process.pid

    @property
    def running(self) -> bool:
        """True if there is a process that has not exited."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None:
            self.process.send_signal(number)

    def last_words(self) -> list[str]:
        """Return the reason that the actor gave for its exit (`actors.process.exits`), or the last lines of its log."""
        with self.log.open("rb") as file:
            # the log has the lines of all earlier processes of this child in front
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        last = _fields(lines[-1]) if lines else {}
        # a process killed by a signal has no last word: its log ends with any line
        if last.get("level") != "error":
            return lines
        if problems := last.get("problems"):
            return list(problems)
        return str(last.get("reason") or last.get("exception") or "").splitlines() or lines


def newest_traceback(logs: Path, since: float = 0.0) -> tuple[Path, str] | None:
    """Return the newest traceback in the actors' logs, with the file's path; None if there is none.

    Args:
        logs: folder of the logs; the last TAIL_BYTES of each file are read.
        since: wall-clock time in seconds; files not written to since are skipped.
    """
    found: list[tuple[str, Path, str]] = []
    for log in logs.glob("*.log"):
        if log.stat().st_mtime < since:
            continue
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        for fields in map(_fields, lines):
            at, trace = fields.get("timestamp"), fields.get("exception")
            if isinstance(at, str) and isinstance(trace, str):
                found.append((at, log, trace))
    return max(found)[1:] if found else None


def _fields(line: str) -> dict[str, Any]:
    """Return the fields of a log line; empty for output of libraries, which is no JSON object."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def wait_for(children: Iterable[Child], seconds: float) -> list[Child]:
    """Wait up to `seconds` until all children have exited; return the children still running."""
    deadline, left = time.monotonic() + seconds, [child for child in children if child.running]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [child for child in left if child.running]
    return left


def how_it_ended(code: int) -> str:
    """Return an exit code as text: `by SIGKILL` for a signal, else `with exit code 1`."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def plan(config: RunConfig, devices: DevicePlan | None, actors: Sequence[Actor] | None = None) -> Iterator[Child]:
    """Yield a child for every process of this machine. All threads of torch together match the number of cores.

    Args:
        config: configuration of the run.
        devices: GPUs of each process; None leaves the choice to the environment.
        actors: processes of this machine; None: all of the run.
    """
    actors = actors_of(config) if actors is None else actors
    # trainer ranks and engines compute; all others mostly wait
    computing = sum(actor.kind in COMPUTING for actor in actors)
    share = max(1, (os.cpu_count() or 1) // max(1, computing))
    # the other kinds compute little, and get one thread; up.torch_threads wins
    threads = dict.fromkeys(COMPUTING, share) | config.up.torch_threads
    for actor in actors:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads.get(actor.kind, 1)),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment |= KEEP_FREED_MEMORY if actor.kind in threads else {}
        environment |= devices.environment(actor, os.environ) if devices else {}
        yield Child(actor.kind, str(actor), environment, config.output / "logs" / f"{actor}.log")
