"""Processes of `actors up`, each for an actor: command, environment, restarts, and last log lines."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.config import RunConfig

KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
"""Settings of glibc for processes that compute: a step frees and allocates the same large tensors again and again."""
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
    process: "subprocess.Popen[bytes] | None" = None
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

    def start(self, command: Sequence[str], inherited: Sequence[int]) -> int:
        """Start the process; return its pid.

        Args:
            command: program and arguments.
            inherited: file descriptors that the process inherits.
        """
        with self.log.open("ab") as log:
            # a session of its own: Ctrl-C reaches `actors up` alone, which stops the actors in order
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True, pass_fds=inherited
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
        """Return the reason that the actor gave for its exit (see `actors.runtime`), or the last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        return (_reason(lines[-1]) if lines else []) or lines


def _reason(line: str) -> list[str]:
    """Return the reason in the last log line of an actor that exited by itself, as lines; empty for other lines."""
    try:
        fields = json.loads(line)
    except ValueError:
        return []
    # a process killed by a signal has no last word: its log ends with any line
    if not isinstance(fields, dict) or fields.get("level") != "error":
        return []
    if problems := fields.get("problems"):
        return list(problems)
    return str(fields.get("reason") or fields.get("exception") or "").splitlines()


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
        found += [(fields["timestamp"], log, fields["exception"]) for fields in map(_fields, lines) if _tells(fields)]
    return max(found)[1:] if found else None


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _tells(fields: dict[str, Any]) -> bool:
    return isinstance(fields.get("exception"), str) and isinstance(fields.get("timestamp"), str)


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


def plan(config: RunConfig) -> Iterator[Child]:
    """Yield a child for every process of the run. All threads of torch together match the number of cores."""
    counts = {
        "packer": 1,
        "trainer": config.trainer.num_ranks,
        **({"inference": config.up.inference} if config.inference.pool is None else {"inference-pool": 1}),
        "reward": config.up.reward,
        "rollout": config.up.rollout,
    }
    computing = counts["trainer"] + counts.get("inference", 0)
    # trainer ranks and engines compute; all others mostly wait
    share = max(1, (os.cpu_count() or 1) // computing)
    # the other kinds compute little, and get one thread; up.torch_threads wins
    threads = {"trainer": share, "inference": share} | config.up.torch_threads
    for kind, count in counts.items():
        environment = os.environ | {"OMP_NUM_THREADS": str(threads.get(kind, 1)), "TOKENIZERS_PARALLELISM": "false"}
        environment |= KEEP_FREED_MEMORY if kind in threads else {}
        for i in range(count):
            yield Child(kind, f"{kind}-{i}", environment, config.output / "logs" / f"{kind}-{i}.log")
