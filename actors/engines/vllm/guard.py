"""Runs a server for as long as its owner lives: `python guard.py COMMAND…`, in a session of its own.

Standard input is a pipe whose other end only the owner holds. However the owner ends, the kernel closes it, and the
whole process group is killed; so it is when the server ends by itself and leaves workers behind. A pipe, and not
PR_SET_PDEATHSIG: that would reach the server but not the processes which it has started, and it fires as soon as the
owner's *thread* that started the server ends. Imports nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    """Until the server has ended, or its owner; SIGTERM is passed on to the server. Never returns."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    code = server.wait()
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    print(f"the server ended {how}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def _outlive_nobody() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
