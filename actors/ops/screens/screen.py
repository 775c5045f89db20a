"""Display of a run's progress: on a terminal a screen redrawn in place, elsewhere a line every 10 seconds."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from typing import IO, Any

from actors.ops.screens.render import View, describe, printable, render
from actors.packer.start_file import starting_words
from schemas.config import RunConfig

REFRESH_SECONDS = 0.5
"""Seconds between two drawings on a terminal."""
LINE_EVERY_SECONDS = 10.0
"""Seconds between two lines if the output is no terminal."""


def titled(name: str) -> str:
    """Return the title of a run: `run NAME`, or just `run` if the run has the default name."""
    return "run" if name == "run" else f"run {name}"


class Screen:
    """Display of the values of `RunRecord.progress()`.

    Args:
        stream: output stream.
        config: configuration of the run.
        own_clock: True to show the time since this screen was made, False to show the run's time.
    """

    def __init__(self, stream: IO[str], config: RunConfig, *, own_clock: bool = True) -> None:
        self._own_clock = own_clock
        self._stream, self._live, self._config = stream, stream.isatty(), config
        self._next, self._started = 0.0, time.monotonic()
        self._drawn: Sequence[str] = ()
        """Lines on the terminal that the next drawing replaces."""
        self.say(f"{titled(config.name)}: {config.output}")

    def say(self, text: str) -> None:
        """Write a line that stays, above the progress."""
        self._write("\n".join(map(printable, text.split("\n"))) + "\n")
        # draw at once on a terminal, where the line has replaced the progress
        self._next = 0.0 if self._live else self._next

    def show(self, progress: dict[str, Any], silent_seconds: float = 0.0) -> None:
        """Draw the progress, if the last drawing is long enough ago.

        Args:
            progress: newest progress; empty if the packer has not been heard yet. Then its start file is read.
            silent_seconds: seconds since the packer was heard.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (REFRESH_SECONDS if self._live else LINE_EVERY_SECONDS)
        self._draw(progress, silent_seconds)

    def close(self, progress: dict[str, Any]) -> None:
        """Draw a last time, and leave the drawing on the terminal."""
        self._draw(progress, 0.0)
        if self._live:
            self._drawn = ()
            self._put("\n")

    def _draw(self, progress: dict[str, Any], silent_seconds: float) -> None:
        elapsed = time.monotonic() - self._started
        if not self._own_clock:
            elapsed = progress.get("seconds", elapsed)
        starting = "" if progress else starting_words(self._config.output)
        if not self._live:
            self._write(describe(progress, elapsed, starting) + "\n")
            return
        columns, rows = shutil.get_terminal_size()
        name, output = self._config.name, str(self._config.output)
        view = View(name, output, progress, silent_seconds, elapsed, starting=starting)
        # a screen taller than the terminal scrolls, and its first rows could not be drawn over any more
        lines = render(view, columns)[: max(1, rows - 1)]
        self._write("\n".join(lines))
        self._drawn = lines

    def _write(self, text: str) -> None:
        """Write a text, on a terminal in place of the last drawing."""
        if self._live:
            up = rows_of(self._drawn, shutil.get_terminal_size().columns) - 1
            self._drawn = ()
            # up to the drawing's first row, then clear everything below
            text = f"\r\x1b[{up}A\x1b[J{text}" if up > 0 else f"\r\x1b[J{text}"
        self._put(text)

    def _put(self, text: str) -> None:
        # a failure may quote characters that the terminal's encoding lacks
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        # a full disk, or a pipe that its reader has closed, must not end a run
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def rows_of(lines: Sequence[str], columns: int) -> int:
    """Return the rows taken by lines on a terminal, which may have been made narrower after the drawing."""
    return sum(max(1, -(-len(line) // max(1, columns))) for line in lines)
