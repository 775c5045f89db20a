"""Program between a worker and a command: `PYTHON -I -S .../agents/program.py PARENT PROCESSES REPORT`.

Reads the command from the standard input, because arguments of a process can be seen by all users: a JSON map of
`arguments`, `variables` and `folder`. Forks; one process is the guard, the other becomes the command. REPORT is a file
descriptor, on which the guard writes how the command has ended: a JSON map of `reason` and `status`.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

UNSTARTABLE = 127
"""Status of a command that can't be started, as in shells; the report says so in words before."""


def main() -> None:
    """Run the command on the standard input below a guard."""
    parent, processes, report = (int(word) for word in sys.argv[1:])
    # the report ends with the guard, whatever the command leaves open
    os.set_inheritable(report, False)
    command = json.load(sys.stdin.buffer)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    guard = importlib.import_module("worker.guard")

    def tell(end: Any) -> None:
        _write(report, {"reason": end.reason, "status": os.waitstatus_to_exitcode(end.status)})

    guard.guarded(parent, processes, tell)
    _become(command, report)


def _become(command: dict[str, Any], report: int) -> None:
    """Replace this process by the command; end it if that fails."""
    try:
        # Python ignores them, and a program would go on to ignore them
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(command["folder"])
        arguments = [word.encode() for word in command["arguments"]]
        variables = {name.encode(): value.encode() for name, value in command["variables"].items()}
        os.execvpe(arguments[0], arguments, variables)  # noqa: S606 - no shell is wanted
    except (OSError, ValueError) as error:
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        _write(report, {"error": words})
    os._exit(UNSTARTABLE)


def _write(report: int, content: dict[str, Any]) -> None:
    """Write a line of the report."""
    os.write(report, json.dumps(content).encode() + b"\n")


if __name__ == "__main__":
    main()
