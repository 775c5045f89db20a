"""Guard of programs: starts each with limits, watches it, kills it when it passes one, and tells its end.

`python -m actors.reward.sandbox.guard` reads one JSON object from its standard input and writes one to its output:

    {"parent": …, "folder": …, "seconds": …, "limits": {…}, "output_bytes": …, "disk_bytes": …,
     "stop_at_first": true, "runs": [{"source": …, "program": …, "stdin": …, "expected": …}]}
    {"runs": [{"outcome": "ended", "code": 0, "matches": true, "stderr": …, "results": …}]}

A program is a single process, since the kernel refuses it any other. The guard has a single thread, and the programs
are its children, so that they die with it (PR_SET_PDEATHSIG). When `parent`, the process that has started it, has
ended, it kills the program, removes the folder and ends. A program that is started has the descriptor RESULTS in
addition to its standard ones.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.reward.sandbox import confine
from actors.reward.sandbox.places import readable_places

RESULTS = 3
"""Descriptor on which a program writes results."""
LOOK_SECONDS = 0.02
"""Interval at which a program's folder and the clock are looked at."""
WALL_FACTOR = 3.0
"""Seconds on the clock for each second of computing: other processes may keep a program waiting."""
STDERR_BYTES, READ_BYTES = 4000, 1 << 16
ENTRIES = 1000
"""Most files and folders of a program."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class Run:
    """State of a program that runs."""

    process: int
    folder: str
    pipes: dict[int, bytearray] = field(default_factory=dict)
    """Bytes read of each of its outputs, by descriptor of this process."""
    outcome: str = ""
    """Reason for which the guard ends the program; empty while there is none."""


class Guard:
    """Guard of the programs of one job, one after the other.

    Args:
        job: what has been read from the standard input.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        # not asked of the kernel: the parent may have ended before this line
        self._job, self._parent = job, int(job["parent"])
        self._seconds: float = job["seconds"]
        self._limits = confine.Limits(**job["limits"])
        self._output_bytes, self._disk_bytes = job["output_bytes"], job["disk_bytes"]
        self._readable = readable_places()

    def serve(self) -> dict[str, Any]:
        """Run all programs, and return what became of them."""
        found: list[dict[str, Any]] = []
        for number, run in enumerate(self._job["runs"]):
            self._end_with_parent()
            folder = Path(self._job["folder"], str(number))
            folder.mkdir()
            found.append(self._run(run, str(folder)))
            empty(str(folder))
            failed = found[-1]["outcome"] != "ended" or found[-1]["code"] != 0
            if self._job["stop_at_first"] and (failed or found[-1]["matches"] is False):
                break
        return {"runs": found}

    def _run(self, run: dict[str, Any], folder: str) -> dict[str, Any]:
        """Run one program and return how it ended."""
        program = Path(folder, "answer.py")
        # half a surrogate pair is a mistake of the answer, and has no bytes
        program.write_text(run["source"], encoding="utf-8", errors="replace")
        arguments = [sys.executable, "-I", "-B", "-X", "utf8", run["program"] or str(program)]
        ends = [os.pipe() for _ in range(4)]
        stdin, stdout, stderr, results = ends
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            descriptors = [stdin[0], stdout[1], stderr[1], results[1]]
            _become(arguments, folder, descriptors, self._limits, [*self._readable, run["program"]])
        for descriptor in (stdin[0], stdout[1], stderr[1], results[1]):
            os.close(descriptor)
        watched = Run(process, folder, {one[0]: bytearray() for one in (stdout, stderr, results)})
        try:
            code = self._watch(watched, stdin[1], run["stdin"].encode("utf-8", "replace"))
        finally:
            for descriptor in watched.pipes:
                os.close(descriptor)
        texts = [bytes(watched.pipes[one[0]]) for one in (stdout, stderr, results)]
        if code == UNCONFINED:
            raise RuntimeError(texts[1].decode("utf-8", "replace"))
        outcome = watched.outcome or ("time" if code == -signal.SIGXCPU else "ended")
        printed, errors, written = (text.decode("utf-8", "replace") for text in texts)
        matches = None if run["expected"] is None else same_text(printed, run["expected"])
        return {"outcome": outcome, "code": code, "matches": matches, "stderr": errors, "results": written}

    def _watch(self, run: Run, stdin: int, text: bytes) -> int:
        """Feed and read a program until it has ended, or must end; return its exit code, or minus its signal."""
        started = time.monotonic()
        os.set_blocking(stdin, False)
        reading, left, looked = set(run.pipes), memoryview(text), 0.0
        code: int | None = None
        while code is None and not run.outcome:
            readable, writable, _ = select.select(reading, [stdin] if stdin >= 0 else [], [], LOOK_SECONDS)
            if writable:
                left, stdin = _feed(stdin, left)
            for descriptor in readable:
                if not self._read(run, descriptor):
                    reading.discard(descriptor)
            ended, status = os.waitpid(run.process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                run.outcome = run.outcome or self._excess(run, looked - started)
        if stdin >= 0:
            os.close(stdin)
        if code is None:
            os.kill(run.process, signal.SIGKILL)
            _, status = os.waitpid(run.process, 0)
            code = os.waitstatus_to_exitcode(status)
        # what was in the pipes at the end; the only writer is dead
        for descriptor in reading:
            while self._read(run, descriptor):
                pass
        return code

    def _read(self, run: Run, descriptor: int) -> bool:
        """Read what an output has; return False at its end, or if the program has written too much."""
        data = os.read(descriptor, READ_BYTES)
        kept = run.pipes[descriptor]
        # of the errors the last lines, which name the exception
        is_errors = descriptor == list(run.pipes)[1]
        kept += data
        if is_errors:
            del kept[:-STDERR_BYTES]
        elif len(kept) > self._output_bytes:
            del kept[self._output_bytes :]
            run.outcome = run.outcome or "output"
            return False
        return bool(data)

    def _excess(self, run: Run, seconds: float) -> str:
        """Return which limit a program has passed that the kernel does not watch; empty if none."""
        if os.getppid() != self._parent:
            os.kill(run.process, signal.SIGKILL)
            os.waitpid(run.process, 0)
            self._end_with_parent()
        if seconds > WALL_FACTOR * self._seconds:
            return "time"
        size, entries = usage(run.folder, ENTRIES)
        if size > self._disk_bytes or entries >= ENTRIES:
            return "disk"
        return ""

    def _end_with_parent(self) -> None:
        """End this process, without a folder left, if its parent has ended."""
        if os.getppid() != self._parent:
            empty(self._job["folder"])
            sys.exit(f"process {self._parent}, which has started this guard, has ended")


UNCONFINED = 121
"""Exit code of a child that could not confine itself, or not start the program."""


def _become(
    arguments: list[str], folder: str, descriptors: list[int], limits: confine.Limits, readable: list[str]
) -> None:
    """Confine this process, a child, and turn it into a program. Does not return."""
    try:
        confine.die_with_parent()
        os.setsid()
        os.chdir(folder)
        # first above all that they are copied to
        moved = [os.dup2(one, 64 + number) for number, one in enumerate(descriptors)]
        for number, one in enumerate(moved):
            os.dup2(one, number)
        os.closerange(RESULTS + 1, 256)
        confine.apply(limits, folder, [path for path in readable if path])
        os.execve(sys.executable, arguments, ENVIRONMENT | {"HOME": folder, "TMPDIR": folder})  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - the guard raises it
        os.write(2, f"{type(error).__name__}: {error}".encode())
    os._exit(UNCONFINED)


def _feed(stdin: int, left: memoryview) -> tuple[memoryview, int]:
    """Write to a program; return what is left, and the descriptor, or −1 once it is closed."""
    try:
        left = left[os.write(stdin, left[:READ_BYTES]) :]
    except BrokenPipeError:
        left = left[:0]
    except BlockingIOError:
        return left, stdin
    if left:
        return left, stdin
    os.close(stdin)
    return left, -1


def same_text(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, except for blanks at the ends of lines and empty lines at the end."""
    lines, others = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return lines == others


def usage(folder: str, most: int) -> tuple[int, int]:
    """Return the bytes below a folder, and the number of its entries; stops counting at `most` entries."""
    size, entries, folders = 0, 0, [folder]
    while folders and entries < most:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entries >= most:
                        break
        except OSError:
            # removed meanwhile, or a path too long for the kernel, which the count of its parents finds
            continue
    return size, entries


def empty(folder: str) -> None:
    """Remove a folder of any depth: what is in its folders is moved up first, so that no path gets long."""
    number, top = 0, Path(folder)
    with contextlib.suppress(OSError):
        while entries := list(top.iterdir()):
            for path in entries:
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                    continue
                # a program may make folders without any rights
                path.chmod(0o700)
                for inner in list(path.iterdir()):
                    number += 1
                    inner.rename(top / f".up-{number}")
                path.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the job on the standard input."""
    job = json.load(sys.stdin)
    answer = Guard(job).serve()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
