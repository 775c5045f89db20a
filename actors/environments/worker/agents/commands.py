"""Commands that a worker runs for an agent: guarded, limited in time, their output kept up to a bound.

Uses the standard library alone, and Linux.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

PROGRAM = Path(__file__).parent / "program.py"
END_SECONDS = 12.0
"""Time for a guard to kill everything below it; it gives up after 10 s itself."""
FOR_THE_GUARD = ("PATH", "LD_LIBRARY_PATH")
"""Variables with which the guard's interpreter is started. Its environment can be read by the command."""
REPORT_BYTES = 1 << 16
MARK_ROUNDS = 100


class Output(asyncio.Protocol):
    """Beginning and end of what a command has printed; the middle is counted and dropped.

    Args:
        limit: bytes that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0
        """Bytes so far, dropped ones included."""
        self.has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep what there is room for."""
        self.num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-self._half :]
        del self._tail[: -self._half]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the stream."""
        if not self.has_ended.done():
            self.has_ended.set_result(None)

    def text(self) -> str:
        """Return the beginning and the end, with words for what is missing in between."""
        dropped = self.num_bytes - len(self._head) - len(self._tail)
        between = f"\n[{dropped} bytes left out]\n".encode() if dropped else b""
        return bytes(self._head + between + self._tail).decode(errors="replace")


@dataclass(frozen=True)
class Ended:
    """End of a command. Everything below it has ended too."""

    reason: Literal["ended", "late", "stopped", "processes", "unstartable", "lost"]
    """`ended`: by itself, or by a signal of others. Killed: `late` at its limit of time, `stopped` by the caller,
    `processes` at the limit of processes. `unstartable`: there is no such program. `lost`: its guard was killed."""
    status: int
    """Exit code; −N after signal N. Only of a command that has `ended`."""
    words: str
    """Why it is `unstartable`."""
    output: Output


class Command:
    """A command, from its start to its end.

    Args:
        arguments: program and arguments; no shell reads them. A program without a slash is looked for in the PATH of
            `variables`, a relative path in `folder`.
        variables: the whole environment. `mark` is one of them.
        folder: working directory.
        mark: name of a variable whose value no other command has, by which its processes are found if the guard dies.
        processes: most processes, the first included; 0: any number.
        output_bytes: bytes kept of what it prints.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        mark: str,
        processes: int = 0,
        output_bytes: int = 20_000,
    ) -> None:
        command = {"arguments": list(arguments), "variables": dict(variables), "folder": str(folder)}
        self._command = json.dumps(command).encode()
        self._mark = f"{mark}={variables[mark]}".encode()
        self._processes, self._output_bytes = processes, output_bytes
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Let the command end with everything below it; `run` returns then. A command that has not begun never does."""
        self._stopped.set()

    async def run(self, seconds: float = 0.0) -> Ended:
        """Run the command; return once everything below it has ended.

        Args:
            seconds: limit; 0: none.
        """
        output = Output(self._output_bytes)
        if self._stopped.is_set():
            return Ended("stopped", 0, "", output)
        with contextlib.ExitStack() as stack:
            printed, printed_end = _pipe(stack)
            report, report_end = _pipe(stack)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, printed)
            stack.callback(transport.close)
            guard = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-B", str(PROGRAM), str(os.getpid()), str(self._processes), str(report_end.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=printed_end,
                stderr=printed_end,
                env={name: os.environ[name] for name in FOR_THE_GUARD if name in os.environ},
                pass_fds=(report_end.fileno(),),
                start_new_session=True,
            )
            # both streams end with the processes that hold them
            printed_end.close()
            report_end.close()
            is_late = await self._until_over(guard, seconds)
            told = _report(report)
            if "reason" not in told:
                # the guard of the worker has adopted what this one has left
                await asyncio.to_thread(_kill_marked, self._mark)
            await asyncio.wait([output.has_ended], timeout=1.0)
        return self._ended(told, is_late, output)

    async def _until_over(self, guard: asyncio.subprocess.Process, seconds: float) -> bool:
        """Wait for the end of the guard; end it at the limit and when stopped. Return whether the limit was passed."""
        assert guard.stdin is not None
        over, stopped = asyncio.ensure_future(guard.wait()), asyncio.ensure_future(self._stopped.wait())
        with contextlib.suppress(ConnectionError):
            guard.stdin.write(self._command)
            await guard.stdin.drain()
        guard.stdin.close()
        try:
            await asyncio.wait([over, stopped], timeout=seconds or None, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return False
            with contextlib.suppress(ProcessLookupError):
                guard.terminate()
                # the command may have stopped it
                guard.send_signal(signal.SIGCONT)
            await asyncio.wait([over], timeout=END_SECONDS)
            if not over.done():
                guard.kill()
                await asyncio.wait([over], timeout=1.0)
            return not stopped.done()
        finally:
            stopped.cancel()

    def _ended(self, told: dict[str, Any], is_late: bool, output: Output) -> Ended:
        """Return the end out of the guard's report."""
        reason, status = told.get("reason"), int(told.get("status", 0))
        if "error" in told:
            return Ended("unstartable", 0, told["error"], output)
        if reason in ("ended", "processes"):
            return Ended(reason, status, "", output)
        if is_late:
            return Ended("late", 0, "", output)
        return Ended("stopped" if self._stopped.is_set() else "lost", 0, "", output)


def _pipe(stack: contextlib.ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Open a pipe whose ends are closed with the stack at the latest."""
    read_end, write_end = os.pipe()
    return stack.enter_context(os.fdopen(read_end, "rb", 0)), stack.enter_context(os.fdopen(write_end, "wb", 0))


def _report(pipe: BinaryIO) -> dict[str, Any]:
    """Return what the guard has reported, and the process that could not become the command."""
    os.set_blocking(pipe.fileno(), False)
    told: dict[str, Any] = {}
    for line in (pipe.read(REPORT_BYTES) or b"").splitlines():
        told |= json.loads(line)
    return told


def _kill_marked(mark: bytes) -> None:
    """Kill all processes that were started with a variable in their environment, and wait for their end."""
    for _ in range(MARK_ROUNDS):
        found = [number for number in _started_with(mark) if number != os.getpid()]
        if not found:
            return
        for number in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        # for the killed to end
        time.sleep(0.01)


def _started_with(mark: bytes) -> Iterator[int]:
    """Yield the ids of processes with a variable in their environment. A zombie has none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)
