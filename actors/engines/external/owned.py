"""Owned server: a process with a log, started by an engine, that never outlives it."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from actors.engines.external import guard
from actors.process.tasks import Task

END_SECONDS = 5.0
"""Seconds for a server's shutdown before SIGKILL."""
TAIL_LINES = 15
"""Lines of the server's log in an error."""
TAIL_BYTES = 20_000
BAR = re.compile(r"^(?:\([^)]*\)\s*)*(?P<what>[^:|]+):\s+\d+%.*?(?P<done>\d+)/(?P<total>\d+)")
"""Bar of tqdm in a log: `(EngineCore pid=7) Loading shards:  50% Completed | 1/2`."""


class OwnedServer:
    """Server with all worker processes. The end of this process stops the server (see `guard`).

    Args:
        server: name of the software, for errors.
        log: log of the server; earlier lines stay. Only this user may read it, as servers write their options there.
        make_command: function from a free port to the command line.
        environment: environment of the server.
    """

    def __init__(
        self, server: str, log: Path, make_command: Callable[[int], list[str]], environment: Mapping[str, str]
    ) -> None:
        # a port on which nothing listens now; if another process takes it first, the server stops at the start
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._server, self._log = server, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            # the log of earlier lives stays, and is no part of the last lines of this one
            self._log_start = out.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, *make_command(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                # a process group of its own, which the guard kills whole
                start_new_session=True,
            )

    @property
    def process_group(self) -> int:
        """Process group of the server and the workers."""
        return self._process.pid

    def ended(self) -> str:
        """Return the reason why the server has stopped, with the last lines of the log; empty while the server runs."""
        if self._process.poll() is None:
            return ""
        return f"the {self._server} server has ended; the last lines of {self._log}:\n{self.last_lines()}"

    def last_lines(self) -> str:
        """Return the last lines of the log since the server's start."""
        with self._log.open("rb") as file:
            file.seek(max(self._log_start, self._log.stat().st_size - TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:])

    def show_start(self, start: Task) -> None:
        """Tell a task how far the server's start is, by the bar on the last line of the log; without one nothing."""
        if (found := bar_of(self.last_lines())) is None:
            return
        what, done, total = found
        name = f"start {self._server}: {what}"
        if start.name != name:
            start.begin(total, "", name)
        start.reach(done, total)

    def close(self, patience: float = END_SECONDS) -> None:
        """Stop the server: politely within `patience` seconds, otherwise by SIGKILL. May be called again."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):  # the guard has killed the group
            os.killpg(self.process_group, signal.SIGKILL)
        self._process.wait()
        # last: the guard takes a closed pipe for the end of its owner, and kills the server without patience
        assert self._process.stdin is not None
        self._process.stdin.close()


def bar_of(lines: str) -> tuple[str, int, int] | None:
    """Return the bar on the last line of a log: what is done, the amount, and the total; None if there is no bar."""
    last = next((line for line in reversed(lines.splitlines()) if line.strip()), "")
    found = BAR.match(last.strip())
    return None if found is None else (found["what"].strip(), int(found["done"]), int(found["total"]))
