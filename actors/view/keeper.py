"""Process that keeps the catalogue of a run up to date, and the viewer's handle on the process.

It is a process of its own with the lowest priority, because the viewer's questions must not wait for its work: a thread
would hold the interpreter's lock for parts of it, and a thread of low priority holds that lock even longer on a busy
machine. SQLite's write-ahead log lets the viewer read while the keeper writes.

    python -m actors.view.keeper FOLDER OUTPUT LEDGER

Its standard input is its life line: it ends when the pipe is closed, and so with its viewer, however that one ends. It
writes a line to its standard output for each change: the reason for which the catalogue can't be kept up to date, or
an empty line.
"""

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from actors.view.catalogue import Catalogue, RunFiles, Work
from bus import threads
from schemas.errors import ConfigError

IDLE_SECONDS = 1.0
"""Seconds between two looks at the files of a run that does not grow."""
PAUSES: dict[Work, float] = {"lines": 0.1, "rows": 0.1, "payloads": 3.0}
"""Pause after a piece of work, in multiples of its own time. Payloads are large, and the run may need the disk."""
STOP_SECONDS = 2.0
"""Longest wait for the piece of work under way. A process that is killed then loses this piece alone."""
RESTART_SECONDS = 5.0
"""Seconds until a process that has died is replaced."""


class Files(NamedTuple):
    """Files of a run, as a catalogue reads them."""

    output: Path
    ledger_path: Path


class CatalogueKeeper:
    """Handle on the process that keeps a catalogue.

    Args:
        run: the run, whose catalogue has been made.
        folder: folder of the catalogues.
    """

    def __init__(self, run: RunFiles, folder: Path) -> None:
        self._command = [sys.executable, "-P", "-m", "actors.view.keeper"]
        self._command += [str(path.absolute()) for path in (folder, run.output, run.ledger_path)]
        self._lock = threading.Lock()
        """Held while a process is started or told to end."""
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self.problem = ""
        """Reason for which the catalogue is not kept up to date now; empty if it is."""
        self._thread = threads.start_helper("catalogue", self._follow)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop.set()
            process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(STOP_SECONDS)

    def _follow(self) -> None:
        """Start the process, read what it says, and start another one if it dies."""
        while not self._stop.is_set():
            if (process := self._started()) is not None:
                assert process.stdout is not None
                with process.stdout as lines:
                    for line in lines:
                        self.problem = line.removesuffix("\n")
                code = process.wait()
                self.problem = f"the process that keeps the catalogue has ended with {code}, and is started again"
            self._stop.wait(RESTART_SECONDS)

    def _started(self) -> "subprocess.Popen[str] | None":
        with self._lock:
            if self._stop.is_set():
                return None
            try:
                # a session of its own: Ctrl-C is for the viewer, which closes the pipe
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                # too many processes, or no memory: others may end
                self.problem = f"the process that keeps the catalogue can't be started now, and is tried again: {error}"
                return None
            return self._process


def main(arguments: list[str]) -> int:
    """Keep a catalogue until the standard input is closed; return 0.

    Args:
        arguments: folder of the catalogues, output_dir, path of the ledger.
    """
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    folder, output, ledger = map(Path, arguments)
    said: str | None = None
    """State that was told last; None: nothing is told yet, and the first state always is."""
    catalogue, pause = None, 0.0
    while not _is_closed(pause):
        started, work, problem = time.monotonic(), None, ""
        try:
            catalogue = catalogue or Catalogue(Files(output, ledger), folder)
            work = catalogue.update()
        except ConfigError as error:
            problem = "; ".join(error.problems)
        except Exception as error:  # noqa: BLE001 - a file that is replaced or removed meanwhile; the page shows it
            problem = f"{type(error).__name__}: {error}"
        if problem != said:
            said = problem
            print(" ".join(problem.split()), flush=True)
        pause = IDLE_SECONDS if work is None else PAUSES[work] * (time.monotonic() - started)
    return 0


def _is_closed(seconds: float) -> bool:
    """Return whether the standard input is closed within so many seconds."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
