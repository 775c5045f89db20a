"""Process 1 of a container: passes signals to the command and reaps orphans.

The kernel makes process 1 the parent of every orphan in a container. An orphan that process 1 does not wait for stays
as a zombie, until the container's limit of processes is reached. Orphans come from vLLM, and from reward functions
that run code.
"""

import contextlib
import os
import signal
from types import FrameType

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals passed to the command."""


def run_as_init() -> None:
    """Fork; return in the child, which does the work. The parent never returns and exits with the child's exit code.

    Must run before any thread is started: a fork copies only the calling thread.
    """
    child = os.fork()
    if child == 0:
        return
    # Ctrl-C must reach the child alone: passed on by this process too, a Ctrl-C would count twice
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
        if os.isatty(0):
            # otherwise the kernel would stop this process in tcsetpgrp, if another group has the terminal
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, child)

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # the child has just ended
            os.kill(child, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    while True:
        # any child, and so every orphan: process 1 is the parent of all orphans
        pid, status = os.wait()
        if pid == child:
            # as a shell does: 128 + number of the signal
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
