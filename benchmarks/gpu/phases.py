"""One phase of the GPU benchmark: its limit of time, its results on disk, and the record of its end.

A phase runs in a process of its own, so that no phase inherits compiled code, memory or a broken GPU from an earlier
one. Three nets catch a phase that does not end:

    SIGALRM in the phase's process       raises at the limit; the record names the last frames
    faulthandler in the same process     ends the process GRACE_SECONDS later, also inside a compiler or a driver
    the process that has started it      kills the whole session another GRACE_SECONDS later

Results are written at each new value, so a phase that is cut off keeps its rows.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_SECONDS = 15.0
LAST_FRAMES = 12
"""Frames kept of a traceback."""
RUNNING, DONE, NOT_HERE, RAISED, CUT_OFF = "running", "done", "cannot run here", "raised", "cut off"
"""Values of `ended` in a phase's file."""


class PhaseTimeoutError(BaseException):
    """Error of a phase at its limit of time.

    No Exception: a phase notes exceptions of single cases, and goes on.
    """


class NotHereError(Exception):
    """Error of a phase or case that this machine can't run; the message says why."""


@dataclass
class Report:
    """Results of a phase in a JSON file, written again at each change.

    Args:
        path: the file.
        head: entries before the results: phase, limits, machine.
    """

    path: Path
    head: dict[str, Any]
    ended: str = RUNNING
    error: dict[str, Any] | None = None
    results: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def put(self, name: str, value: Any) -> None:
        """Set a result."""
        self.results[name] = value
        self._say(name, value)
        self.write()

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a table of results."""
        self.results.setdefault(name, []).append(dict(row))
        self._say(name, row)
        self.write()

    @contextlib.contextmanager
    def case(self, name: str, labels: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the values of one case, to be set in the block; a case that raises becomes a row with the error.

        Args:
            name: table of the row.
            labels: entries of the row that tell the case.
        """
        values: dict[str, Any] = {}
        try:
            yield values
        except NotHereError as error:
            values[NOT_HERE] = str(error)
        except Exception as error:
            if _breaks_gpu(error):
                raise
            values[RAISED] = description(error)
        except PhaseTimeoutError:
            values[CUT_OFF] = True
            self.add(name, {**labels, **values})
            raise
        self.add(name, {**labels, **values})

    def end(self, ended: str, error: dict[str, Any] | None = None) -> None:
        """Note the end of the phase."""
        self.ended, self.error = ended, error
        self.write()

    def write(self) -> None:
        """Write the file; a reader sees a whole file at any time."""
        values = {
            **self.head,
            "ended": self.ended,
            "seconds": round(time.monotonic() - self._started, 3),
            "error": self.error,
            "results": self.results,
        }
        staging = self.path.with_name(f".{self.path.name}")
        staging.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
        staging.replace(self.path)

    def _say(self, name: str, value: Any) -> None:
        print(f"{self.head['phase']}: {name}: {_short(value)}", flush=True)


def _short(value: Any) -> str:
    """Return a value as a line for people: three digits, and the message of an error without its frames."""
    if isinstance(value, Mapping):
        if "frames" in value:
            return f"{value['type']}: {value['words']}"[:300]
        return " ".join(f"{key}={_short(inner)}" for key, inner in value.items())
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)[:300]


def _breaks_gpu(error: Exception) -> bool:
    """Return whether an error leaves the GPU unusable for this process, so that every later case would fail too."""
    import torch

    broken: Any = getattr(torch, "AcceleratorError", ())
    return isinstance(error, broken) and not isinstance(error, torch.OutOfMemoryError)


def description(error: BaseException) -> dict[str, Any]:
    """Return type, message and last frames of an error, as JSON values."""
    frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
    return {
        "type": type(error).__name__,
        "words": str(error)[:2000],
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames],
    }


@contextlib.contextmanager
def guard(seconds: float, frames: Path) -> Iterator[None]:
    """Raise PhaseTimeoutError in the block after some seconds; GRACE_SECONDS later end the process.

    Args:
        seconds: limit of the block.
        frames: file for the stacks of all threads, if the process has to be ended.
    """

    def interrupt(*_: object) -> None:
        raise PhaseTimeoutError(f"not done within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    with frames.open("w", encoding="utf-8") as file:
        # a thread in C, which needs no interpreter lock: a compiler or a driver may hold it
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=file)
        # again after a while: an exception raised in a destructor or a callback is lost
        signal.setitimer(signal.ITIMER_REAL, seconds, GRACE_SECONDS / 3)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
            frames.unlink()


def run_guarded(report: Report, seconds: float, work: Any) -> None:
    """Run a phase's function in this process, and write how it has ended.

    Args:
        report: results of the phase.
        seconds: limit.
        work: function without arguments.
    """
    report.write()
    try:
        with guard(seconds, frames_file(report.path)):
            work()
    except NotHereError as error:
        report.end(NOT_HERE, {"words": str(error)})
    except PhaseTimeoutError as error:
        report.end(CUT_OFF, description(error))
    except Exception as error:  # noqa: BLE001 - the error is the phase's result
        report.end(RAISED, description(error))
    else:
        report.end(DONE)


def frames_file(path: Path) -> Path:
    """Return the path of the file for the stacks of a stuck phase, next to its results."""
    return path.with_name(f".{path.stem}.frames")


def run_apart(command: Sequence[str], path: Path, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a phase in a process of its own and return the contents of its file.

    Args:
        command: program and arguments; the program calls `run_guarded`.
        path: file of the phase.
        seconds: limit of the phase; starting the process has GRACE_SECONDS more.
        environment: environment variables of the process.
    """
    path.unlink(missing_ok=True)
    started = time.monotonic()
    # a session of its own, so that workers of compilers and of the phase end with it
    process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    try:
        code: int | None = process.wait(seconds + 3 * GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"phase": path.stem}
    if found.get("ended", RUNNING) == RUNNING:
        frames = frames_file(path)
        stacks = frames.read_text(encoding="utf-8").splitlines() if frames.exists() else []
        frames.unlink(missing_ok=True)
        words = "did not end and was killed" if code is None else f"ended with exit code {code} in the middle"
        error = {"type": "stuck" if stacks or code is None else "ended", "words": words, "frames": stacks[-60:]}
        seconds_taken = round(time.monotonic() - started, 3)
        found |= {"ended": CUT_OFF, "seconds": seconds_taken, "error": error, "results": found.get("results", {})}
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def problems(value: Any, place: str = "") -> Iterator[str]:
    """Yield the place of every error, cut case and failed check in results."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            here = f"{place}.{key}".strip(".")
            if key in (RAISED, CUT_OFF) or (key == "ok" and inner is False):
                yield here
            else:
                yield from problems(inner, here)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from problems(inner, f"{place}[{number}]")
