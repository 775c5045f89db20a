"""Start of a run, and return of a killed actor, with and without the fork servers of `actors up`.

Each run is the quickstart: five actors, torch in two of them. The first figures are the seconds and the CPU seconds of
all its processes until its first step. Then an actor is killed (SIGKILL), and the time until the first line of its
successor in its log is taken, and until the next two steps. Runs with and without fork servers take turns; figures are
medians.

    python -m benchmarks.restarts [--json PATH]
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import finish, table

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
KILLED = ("trainer-0", "inference-0", "rollout-0", "reward-0", "packer-0")
ROUNDS, PATIENCE_SECONDS = 3, 120.0


def wait_for(condition: Callable[[], Any], what: str) -> float:
    """Wait for a condition; return the seconds.

    Raises:
        TimeoutError: it has not come true within PATIENCE_SECONDS.
    """
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > PATIENCE_SECONDS:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - started


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process, all its descendants, and their children that have exited."""
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has exited
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def descends(pid: int) -> bool:
        while pid not in (0, root):
            pid = parents.get(pid, 0)
        return pid == root

    return sum(spent for pid, spent in seconds.items() if descends(pid))


def run(model: Path, output: Path, fork_server: bool) -> dict[str, float]:
    """Run the quickstart, and kill each actor once; return seconds by what they are of."""
    keys = [f"model.path={model}", f"output_dir={output}", "trainer.max_steps=100000", "eval.num_prompts=0"]
    keys += ["up.max_restarts=1000", f"up.fork_server={str(fork_server).lower()}"]
    command = [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *keys]
    metrics, events = output / "metrics.jsonl", output / "logs" / "up.log"

    def steps() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def pids(name: str) -> list[int]:
        lines = [json.loads(line) for line in events.read_text().splitlines() if line.startswith("{")]
        return [line["pid"] for line in lines if line["event"] == "started" and line["child"] == name]

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = {"first step": wait_for(lambda: steps() >= 1, "the first step")}
        found["first step, CPU"] = cpu_seconds(process.pid)
        for name in KILLED:
            before, recorded, log = len(pids(name)), steps(), output / "logs" / f"{name}.log"
            wait_for(lambda recorded=recorded: steps() > recorded + 5, "steps")
            said, recorded = log.stat().st_size, steps()
            os.kill(pids(name)[-1], signal.SIGKILL)
            killed = time.monotonic()
            wait_for(lambda: len(pids(name)) > before, f"a successor of {name}")  # noqa: B023
            wait_for(lambda: log.stat().st_size > said, f"the first line of {name}")  # noqa: B023
            found[f"{name} is back"] = time.monotonic() - killed
            # a step that was on its way when the actor was killed, and the next one
            wait_for(lambda: steps() > recorded + 1, f"steps after the end of {name}")  # noqa: B023
            found[f"{name}, two steps"] = time.monotonic() - killed
        return found
    finally:
        process.kill()
        process.wait()
        time.sleep(1.0)


def measure() -> dict[str, Any]:
    """Measure runs in turns."""
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        for number in range(ROUNDS):
            for fork_server, found in runs.items():
                found.append(run(model, Path(folder) / f"{number}-{fork_server}", fork_server))
    results = []
    for what in runs[True][0]:
        without, with_ = (statistics.median(one[what] for one in runs[fork_server]) for fork_server in (False, True))
        results.append({"of": what, "programs": without, "forks": with_, "ratio": with_ / without})
    return {"results": results}


def show(results: dict[str, Any]) -> str:
    """Return a table with a line per figure, in seconds."""
    return table([["seconds", "programs", "forks", "ratio"], *(list(row.values()) for row in results["results"])])


if __name__ == "__main__":
    finish(__doc__, measure, show)
