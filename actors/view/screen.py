"""Progress of a run: on a terminal a screen that is drawn over, below all other lines; elsewhere a line per 10 s."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from typing import IO, Any

from actors.view.render import View, describe, render
from schemas.config import RunConfig

REFRESH_SECONDS = 0.5
LINE_EVERY_SECONDS = 10.0


class Screen:
    """Shows `RunRecord.progress()`."""

    def __init__(self, stream: IO[str], config: RunConfig) -> None:
        self._stream, self._live, self._config = stream, stream.isatty(), config
        self._next, self._started = 0.0, time.monotonic()
        self._drawn: Sequence[str] = ()
        """The lines that the next drawing replaces."""
        self.say(f"run {config.name}: {config.output}")

    def say(self, text: str) -> None:
        """Write a line that is not progress."""
        self._write(f"{text}\n")
        self._next = 0.0 if self._live else self._next

    def show(self, progress: dict[str, Any], silent_seconds: float = 0.0) -> None:
        """Draw, if it is time.

        Args:
            progress: the newest; empty before the packer was heard.
            silent_seconds: since it was.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (REFRESH_SECONDS if self._live else LINE_EVERY_SECONDS)
        self._draw(progress, silent_seconds)

    def close(self, progress: dict[str, Any]) -> None:
        """Draw a last time; what is drawn stays."""
        self._draw(progress, 0.0)
        if self._live:
            self._drawn = ()
            self._put("\n")

    def _draw(self, progress: dict[str, Any], silent_seconds: float) -> None:
        elapsed = time.monotonic() - self._started
        if not self._live:
            self._write(describe(progress, elapsed) + "\n")
            return
        columns, rows = shutil.get_terminal_size()
        view = View(self._config.name, str(self._config.output), progress, silent_seconds, elapsed)
        lines = render(view, columns)[: max(1, rows - 1)]
        self._write("\n".join(lines))
        self._drawn = lines

    def _write(self, text: str) -> None:
        """Write in the place of what is drawn."""
        if self._live:
            up = rows_of(self._drawn, shutil.get_terminal_size().columns) - 1
            self._drawn = ()
            text = f"\r\x1b[{up}A\x1b[J{text}" if up > 0 else f"\r\x1b[J{text}"
        self._put(text)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk or a reader that has left is no reason to end a run
            self._stream.write(text)
            self._stream.flush()


def rows_of(lines: Sequence[str], columns: int) -> int:
    """Rows that lines fill, also on a terminal that has become narrower since they were drawn and has wrapped them."""
    return sum(max(1, -(-len(line) // max(1, columns))) for line in lines)
