"""Client of the guard: runs the programs of one answer and returns how each ended."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.reward.sandbox.confine import Limits

ROOT = Path(__file__).parents[3]
"""Folder of the package `actors`, for processes of the same interpreter."""
HARNESS = str(Path(__file__).with_name("harness.py"))
"""Program that runs the tests of functions."""
GUARD_SECONDS = 60.0
"""Time for a guard to start and to clean up, in addition to the limits of its programs."""
WALL_FACTOR = 3.0
"""Seconds on the clock for each second of computing, as the guard counts them."""
SLOTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
"""Answers tried at the same time by this process; more would take the processor from each other."""


class SandboxError(RuntimeError):
    """Error of the machine or of this project, not of an answer: its group must not be scored."""


@dataclass(frozen=True)
class Program:
    """A program to run."""

    source: str
    """The answer, as the file answer.py in the program's folder."""
    program: str = ""
    """File to run instead of answer.py."""
    stdin: str = ""
    expected: str | None = None
    """Output to compare with; None for no comparison."""


@dataclass(frozen=True)
class End:
    """End of a program."""

    outcome: str
    """`ended`, or the limit passed: `time`, `output` or `disk`."""
    code: int
    """Exit code, or minus the signal."""
    matches: bool | None
    """True if the output is the expected one; None for no comparison."""
    stderr: str
    results: str
    """Text written to descriptor 3."""

    @property
    def words(self) -> str:
        """Short reason of the end: a passed limit, a signal, or the last line of the errors; empty for success."""
        if self.outcome != "ended":
            return self.outcome
        if self.code < 0:
            return f"signal {-self.code}"
        lines = self.stderr.strip().splitlines()
        return (lines[-1][:200] if lines else f"exit code {self.code}") if self.code else ""


@dataclass(frozen=True)
class Box:
    """Limits of each program of an answer."""

    seconds: float = 10.0
    """Computing time; three times as much on the clock."""
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    disk_bytes: int = 64 << 20


def run_programs(programs: Sequence[Program], box: Box, *, stop_at_first: bool) -> list[End]:
    """Run programs one after the other, each in a folder and process of its own. Nothing of them is left.

    Args:
        programs: programs to run.
        box: limits of each.
        stop_at_first: whether the first failure ends the list.

    Raises:
        SandboxError: the guard could not do its work.
    """
    limits = Limits(box.memory_bytes, min(box.disk_bytes, 16 << 20), cpu_seconds=max(1, int(box.seconds)))
    with SLOTS, tempfile.TemporaryDirectory(prefix="grpo-answer-", ignore_cleanup_errors=True) as folder:
        job = {
            "parent": os.getpid(),
            "folder": folder, "seconds": box.seconds, "limits": asdict(limits), "output_bytes": box.output_bytes,
            "disk_bytes": box.disk_bytes, "stop_at_first": stop_at_first,
            "runs": [asdict(program) for program in programs],
        }  # fmt: skip
        allowed = GUARD_SECONDS + len(programs) * WALL_FACTOR * box.seconds
        answer = _ask_guard(json.dumps(job), allowed)
    return [End(**run) for run in answer["runs"]]


def environment() -> dict[str, str]:
    """Return the environment variables of a process of this project that user code must not learn from."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    # of all paths this interpreter searches, in their order: packages may have been added to it
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *(p for p in sys.path if p)]))}


def _ask_guard(job: str, seconds: float) -> Any:
    arguments = [sys.executable, "-P", "-m", "actors.reward.sandbox.guard"]
    try:
        done = subprocess.run(
            arguments,
            input=job.encode("utf-8", "surrogatepass"),
            capture_output=True,
            timeout=seconds,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"the guard of an answer's programs did not end within {seconds:g} s") from error
    except OSError as error:
        raise SandboxError(f"the guard of an answer's programs can't be started: {error}") from error
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise SandboxError(f"the guard of an answer's programs failed (exit code {done.returncode}): {words}")
    return json.loads(done.stdout)
