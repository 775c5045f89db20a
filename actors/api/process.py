"""`actors up` as a child of the user's program: its progress, its warnings, and the reason why it failed.

A process of its own, so that a program needs no signal handlers and no event loop, and a notebook works like a script.
The kernel kills the child, and thereby all actors, when the program dies.
"""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bus import threads

WARNING = "warning: "


class RunProcess:
    """Process `actors up`, started at once.

    Args:
        config: file of the configuration.
        shows: True to show the progress: on a terminal the screen of `actors up`, else its lines.
    """

    def __init__(self, config: Path, *, shows: bool) -> None:
        command = [sys.executable, "-P", "-m", "actors", "up", str(config), "--parent", str(os.getpid())]
        # a notebook has a stdout of its own, which the child can't write to
        is_terminal = sys.stdout is sys.__stdout__ and sys.stdout is not None and sys.stdout.isatty()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if shows and is_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C of a terminal reaches the program alone, which then stops the run in order
            start_new_session=True,
        )
        self._shows = shows
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        self.unread = ""
        """Reason why output of the run can't be read; empty: it can."""
        self._readers = [
            threads.start_helper("up-stderr", self._follow, "stderr", self._read_errors, self._process.stderr)
        ]
        if self._process.stdout is not None:
            self._readers.append(
                threads.start_helper("up-stdout", self._follow, "stdout", self._read, self._process.stdout)
            )

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def show(self) -> None:
        """Print the lines that have come, in the calling thread, where a notebook shows them."""
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return
            if self._shows:
                print(line, end="", flush=True)

    def stop(self) -> None:
        """Ask the run to stop: groups under way are finished, and the trainer saves a checkpoint."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process; the kernel kills the actors with it."""
        self._process.kill()

    def close(self, seconds: float) -> int:
        """Wait for the end, kill after `seconds`, show the last lines, and return the exit code."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        for reader in self._readers:
            # a grandchild could keep the pipe open
            reader.join(1.0)
        self.show()
        return self._process.returncode

    @property
    def failure(self) -> list[str]:
        """Lines of stderr other than warnings: the reason of a failure."""
        return [self.unread] if self.unread else list(self._errors)

    def _follow(self, name: str, read: Callable[[IO[str]], None], stream: IO[str]) -> None:
        """Read until the end of the stream. The run ends if that fails: it would wait on a full pipe for good."""
        try:
            read(stream)
        except Exception as error:  # noqa: BLE001 - handed over to the program's thread
            self.unread = f"reading {name} of actors up failed: {type(error).__name__}: {error}"
            self.stop()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)

    def _read_errors(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith(WARNING):
                self._lines.put(line)
            else:
                self._errors.append(line.rstrip("\n"))
