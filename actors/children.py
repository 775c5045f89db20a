"""The processes of `actors up`, one per actor: what each is given, how it has fared, and what it said last."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schemas.config import RunConfig

KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
"""For glibc, in processes that compute: a step frees and takes the same large tensors again and again."""
TAIL_LINES = 15
TAIL_BYTES = 20_000


@dataclass
class Child:
    """One actor's process and its history."""

    kind: str
    name: str
    environment: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    log_start: int = 0
    """Where in the log this life begins."""
    ended: str = ""
    """How the life before has ended; empty before the first one has."""
    restarts: int = 0
    start_at: float = field(default_factory=time.monotonic)
    finished: bool = False

    def start(self, command: Sequence[str], inherited: Sequence[int]) -> int:
        """Begin a life; returns its pid."""
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True, pass_fds=inherited
            )
        self.started = time.monotonic()
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there."""
        if self.process is not None:
            self.process.send_signal(number)

    def last_words(self) -> list[str]:
        """What the actor gave as reason for its end (see `actors.runtime`), else the last lines of this life."""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        return (_reason(lines[-1]) if lines else []) or lines


def _reason(line: str) -> list[str]:
    """The lines of text in the last word of an actor that ended by itself; empty for any other line."""
    try:
        fields = json.loads(line)
    except ValueError:
        return []
    if not isinstance(fields, dict) or fields.get("level") != "error":
        return []
    if problems := fields.get("problems"):
        return list(problems)
    return str(fields.get("reason") or fields.get("exception") or "").splitlines()


def wait_for(children: Iterable[Child], seconds: float) -> list[Child]:
    """Wait for their ends, up to a time; returns those that still run."""
    deadline, left = time.monotonic() + seconds, [child for child in children if child.running]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [child for child in left if child.running]
    return left


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def plan(config: RunConfig) -> Iterator[Child]:
    """A child for every process; torch's threads add up to the cores."""
    counts = {
        "packer": 1,
        "trainer": config.trainer.num_ranks,
        **({"inference": config.up.inference} if config.inference.pool is None else {"inference-pool": 1}),
        "reward": config.up.reward,
        "rollout": config.up.rollout,
    }
    computing = counts["trainer"] + counts.get("inference", 0)
    share = max(1, (os.cpu_count() or 1) // computing)
    threads = {"trainer": share, "inference": share} | config.up.torch_threads
    for kind, count in counts.items():
        environment = os.environ | {"OMP_NUM_THREADS": str(threads.get(kind, 1)), "TOKENIZERS_PARALLELISM": "false"}
        environment |= KEEP_FREED_MEMORY if kind in threads else {}
        for i in range(count):
            yield Child(kind, f"{kind}-{i}", environment, config.output / "logs" / f"{kind}-{i}.log")
