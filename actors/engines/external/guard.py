"""Runner of a server for the lifetime of an owner: `python guard.py COMMAND…`, in a separate session.

Standard input is a pipe; only the owner holds the other end. However the owner ends, the kernel closes the pipe, and
the guard kills the whole process group. The group is also killed when the server exits and leaves workers behind. A
pipe, and not PR_SET_PDEATHSIG: a death signal would reach the server but not the processes started by it, and is sent
as soon as the starting *thread* of the owner ends. Imports only the standard library.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    """Run the server until the server has exited or the owner is gone.

    SIGTERM is passed on to the server. Never returns.
    """
    # the handler comes first: a server that already writes to its log must not lose a SIGTERM sent to its guard
    server: subprocess.Popen[bytes] | None = None
    asked_to_end = False

    def pass_on(*_: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True
        if server is not None:
            server.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    if asked_to_end:
        server.terminate()
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    code = server.wait()
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    print(f"the server ended {how}", file=sys.stderr, flush=True)
    # the workers that the server has left, and this process
    os.killpg(0, signal.SIGKILL)


def _outlive_nobody() -> None:
    # nothing is ever written: returns when the owner's end is closed
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
