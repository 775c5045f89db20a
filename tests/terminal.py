"""A terminal of a given size for a command: what a person sees of it while it works, and after its end."""

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from select import select

CONTROL = re.compile(r"\x1b\[(\d*)([AJ])|\x1b\[[\d;]*(m)|([\r\n])")
"""Control sequences that the commands write; any other one is a mistake."""
BEGUN = re.compile(r"\x1b(\[[\d;]*)?\Z")
"""Control sequence without its end."""


class Screen:
    """The lines on a terminal that never scrolls: it keeps all of them, as a person can scroll back.

    Args:
        columns: width in characters.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._lines = [""]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        """Lines without blanks at their ends."""
        return [line.rstrip() for line in self._lines]

    def write(self, text: str) -> None:
        """Write a text with control sequences at the cursor."""
        at = 0
        for found in CONTROL.finditer(text):
            self._put(text[at : found.start()])
            at = found.end()
            self._obey(int(found[1] or 1), found[2] or found[3] or found[4])
        self._put(text[at:])

    def _put(self, text: str) -> None:
        for character in text:
            assert character.isprintable(), repr(character)
            if self._column == self._columns:
                self._obey(1, "\n")
                self._column = 0
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _obey(self, number: int, control: str) -> None:
        if control == "\r":
            self._column = 0
        elif control == "\n":
            self._row += 1
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif control == "A":
            self._row -= number
            assert self._row >= 0, "the cursor leaves the screen"
        elif control == "J":
            del self._lines[self._row + 1 :]
            self._lines[self._row] = self._lines[self._row][: self._column]


@dataclass
class Seen:
    """What a person has seen of a command."""

    code: int = 0
    """Exit code; negative: the signal."""
    lines: list[str] = field(default_factory=list)
    """Lines that are left on the terminal."""
    pictures: list[list[str]] = field(default_factory=list)
    """Lines after each piece of output."""

    @property
    def ever(self) -> set[str]:
        """All lines that were there at some time."""
        return {line for picture in self.pictures for line in picture}


def on_terminal(
    command: Sequence[str],
    columns: int,
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    act: Callable[[Seen, int], None] = lambda seen, pid: None,
    seconds: float = 150.0,
) -> Seen:
    """Run a command on a terminal of 50 rows until its end.

    Args:
        command: program and arguments.
        columns: width of the terminal in characters.
        folder: working directory.
        environment: environment variables; None: those of this process.
        act: called after each piece of output, with what was seen and the id of the process.
        seconds: longest wait for the end.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    given = {key: value for key, value in (environment or os.environ).items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=given)
    os.close(slave)
    screen, seen, deadline = Screen(columns), Seen(), time.monotonic() + seconds
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    try:
        while True:
            assert time.monotonic() < deadline, f"no end after {seconds:g} s: {screen.lines}"
            if not select([master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # no process has the terminal any more
                break
            text = rest + decoder.decode(data)
            # a piece may end within a control sequence
            whole = len(text) if (cut := BEGUN.search(text)) is None else cut.start()
            screen.write(text[:whole])
            rest = text[whole:]
            seen.pictures.append(screen.lines)
            act(seen, process.pid)
        assert not rest, rest
        seen.code = process.wait(seconds)
    finally:
        process.kill()
        os.close(master)
    seen.lines = screen.lines
    return seen
