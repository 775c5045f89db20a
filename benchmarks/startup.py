"""CPU seconds of interactive commands, and of the interpreter alone.

    python -m benchmarks.startup [--json PATH]

Each command runs in a process of its own, 15 times, after a first run that fills the caches. CPU time is user and
system time of the process. Limits: `actors --help` 0.3 s, `actors check` 0.8 s.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import finish, table

RUNS = 15
CONFIG = """
model: {path: tiny}
environments: [{type: arithmetic}]
reward: {functions: [{path: exact_match}]}
trainer: {max_steps: 1}
"""
LIMITS = {"actors --help": 0.3, "actors check": 0.8}


def cpu_seconds(command: list[str]) -> float:
    """Return user and system time of one run."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


def measure() -> dict[str, Any]:
    """Measure the medians of all commands."""
    with tempfile.TemporaryDirectory() as folder:
        run_yaml = str(Path(folder) / "run.yaml")
        Path(run_yaml).write_text(CONFIG, encoding="utf-8")
        commands = {
            "python -c pass": ["-c", "pass"],
            "actors --help": ["-m", "actors", "--help"],
            "actors check": ["-m", "actors", "check", run_yaml],
            "actors topology": ["-m", "actors", "topology", run_yaml],
            "import schemas.messages": ["-c", "import schemas.messages"],
            "import bus.control": ["-c", "import bus.control"],
        }
        results = []
        for name, arguments in commands.items():
            seconds = [cpu_seconds([sys.executable, *arguments]) for _ in range(RUNS + 1)][1:]
            results.append({"command": name, "cpu_seconds": statistics.median(seconds), "limit": LIMITS.get(name)})
    return {"results": results}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per command."""
    rows = [[r["command"], r["cpu_seconds"], "-" if r["limit"] is None else r["limit"]] for r in results["results"]]
    return table([["command", "CPU s", "limit"], *rows])


if __name__ == "__main__":
    finish(__doc__, measure, show)
