"""SIGHUP, sent when the terminal of a process is closed: the process may still have a checkpoint to save."""

import os
import signal
from collections.abc import Callable
from types import FrameType

OUTPUTS = (1, 2)
"""File descriptors of stdout and stderr."""

_on_terminal: list[int] = []
"""Outputs that lead to a terminal."""


def stop_at_hangup(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call a handler at SIGHUP, unless SIGHUP was ignored when the process started, as under `nohup`."""
    # now, since `isatty` is False once the terminal is closed
    _on_terminal[:] = [descriptor for descriptor in OUTPUTS if os.isatty(descriptor)]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def let_go_of_terminal() -> None:
    """Send all further output for the closed terminal to /dev/null: each write to the terminal would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _on_terminal:
        # in place, under the old numbers: streams, children and libraries keep their descriptors
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
