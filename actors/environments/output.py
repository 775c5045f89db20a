"""What worker processes print: whole lines up to a rate, and a count of what was beyond it."""

import time

LINE_BYTES = 2000
"""Longest line; longer ones are cut."""


class PrintedLines:
    """Lines out of the bytes of a stream. An environment that prints without end costs a fixed amount of log.

    Args:
        bytes_per_second: rate of what is kept; ten seconds' worth may come at once.
    """

    def __init__(self, bytes_per_second: float = 10_000) -> None:
        self._rate, self._most = bytes_per_second, 10 * bytes_per_second
        self._left, self._at = self._most, time.monotonic()
        self._rest = b""
        self.dropped_bytes = 0
        """Bytes beyond the rate so far."""
        self._untold = 0

    def add(self, data: bytes) -> list[str]:
        """Return the whole lines among the bytes so far, as far as the rate allows."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._rate * (now - self._at))
        self._at = now
        *lines, rest = (self._rest + data).split(b"\n")
        # a line without end must not fill the memory
        self._rest = rest[:LINE_BYTES]
        self._drop(len(rest) - len(self._rest))
        return [text for line in lines if (text := self._kept(line))]

    def end(self) -> list[str]:
        """Return the last line, if it has no line break, and the count of what was dropped."""
        last = self._kept(self._rest) if self._rest else ""
        self._rest = b""
        return [text for text in (last, self._count()) if text]

    def _kept(self, line: bytes) -> str:
        if self._left < len(line):
            self._drop(len(line))
            return ""
        self._left -= len(line)
        counted, text = self._count(), line[:LINE_BYTES].decode(errors="replace").rstrip()
        return f"({counted}) {text}" if counted and text else text

    def _drop(self, size: int) -> None:
        self.dropped_bytes += size
        self._untold += size

    def _count(self) -> str:
        """Return words on what was dropped since the last such words."""
        words = f"{self._untold} bytes of output were dropped" if self._untold else ""
        self._untold = 0
        return words
