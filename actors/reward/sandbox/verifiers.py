"""Client of the servers of math-verify: a pool of processes, each with one answer at a time and a limit for each."""

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.reward.sandbox.client import SLOTS, SandboxError, environment
from actors.reward.sandbox.verifier import LOAD_SECONDS
from bus.threads import Workers

READ_BYTES = 1 << 16
CLOSE_SECONDS = 10.0
STDERR_BYTES = 500


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of an answer with a solution."""

    reward: float | None
    """None if the solution can't be parsed."""
    gold: str
    answer: str
    """Texts of what was parsed, or a reason in brackets."""


class _NoLineError(Exception):
    """No line has come in time, or the process has ended."""


class Server:
    """One process. Its lines are read with a time limit."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.reward.sandbox.verifier", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        self.rest = b""
        try:
            self.read(LOAD_SECONDS)
        except _NoLineError as error:
            words = self.end()
            raise SandboxError(f"math-verify can't be started within {LOAD_SECONDS:g} s: {words}") from error

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request. A process that has ended is noticed at reading."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def read(self, seconds: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            _NoLineError: the process has ended, or the time is over.
        """
        assert self.process.stdout is not None
        output, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                raise _NoLineError("late")
            # the unbuffered end of the pipe: `select` knows nothing of a buffer above it
            data = self.process.stdout.raw.read(READ_BYTES)  # type: ignore[attr-defined]
            if not data:
                raise _NoLineError("ended")
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return dict(json.loads(line))

    def end(self) -> str:
        """Kill the process; return the end of its errors."""
        self.process.kill()
        try:
            _, errors = self.process.communicate(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not end after SIGKILL"
        return errors.decode("utf-8", "replace").strip()[-STDERR_BYTES:]


class Verifiers:
    """Pool of servers. Each is kept for the next answer, unless an answer has ended it."""

    def __init__(self) -> None:
        self._idle: list[Server] = []
        self._lock = threading.Lock()

    def verify(self, pairs: Sequence[tuple[str, str]], way: str, seconds: float) -> list[Verdict]:
        """Compare pairs of (solution, answer), several at the same time.

        Args:
            pairs: texts of solution and answer.
            way: rules of parsing, `trl` or `swift`.
            seconds: limit for each pair.

        Raises:
            SandboxError: no process can be started.
        """
        with Workers(max(1, min(len(pairs), 8)), "verify") as executor:
            return list(executor.map(lambda pair: self._verify(pair, way, seconds), pairs))

    def close(self) -> None:
        """End all servers that have no answer."""
        with self._lock:
            servers, self._idle = self._idle, []
        for server in servers:
            server.end()

    def _verify(self, pair: tuple[str, str], way: str, seconds: float) -> Verdict:
        with SLOTS:
            with self._lock:
                server = self._idle.pop() if self._idle else None
            server = server or Server()
            gold: bool | None = None
            try:
                server.ask({"solution": pair[0], "answer": pair[1], "way": way, "seconds": seconds})
                gold = server.read(seconds)["gold"]
                said = server.read(seconds)
            except _NoLineError as error:
                server.end()
                # a solution that can't be parsed in time is one that can't be parsed
                words = f"[{error}]"
                return Verdict(None, words, "[skipped]") if gold is None else Verdict(0.0, "[parsed]", words)
            except BaseException:
                server.end()
                raise
            with self._lock:
                self._idle.append(server)
        return Verdict(said["reward"], said["gold"], said["answer"])


@functools.cache
def verifiers() -> Verifiers:
    """Return the pool of this process."""
    return Verifiers()
