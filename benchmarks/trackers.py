"""Cost of trackers for a run: completions per second with one, with a frozen one, and with one whose disk is full.

The runs are of the quickstart's size, in turns with runs without a tracker, in an order that changes with each round.
The limit is that each kind of run trains at least 98 % of the completions per second of the runs without a tracker, by
the median of the rounds' ratios. Rates differ by more than that from run to run; the CPU time of the tracker's
processes, as a share of that of all processors (`cpu_share`), bounds what a run can lose, and varies far less. It is
counted from the moment at which the tracker has its first steps, so without the import of the tracker's package. The
frozen process is stopped by SIGSTOP at that moment, and the disk gets full. The full disk is a tmpfs for all files of
the tracker, which needs the right to mount one; without it this kind is left out, and the table says so. Each tracker's
package must be installed; W&B and SwanLab write files in their offline modes.

    python -m benchmarks.trackers [--trackers tensorboard,mlflow] [--steps 120] [--rounds 5] [--model DIR] [--json PATH]
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import GROUP_SIZE, GROUPS, QUICKSTART
from benchmarks.machine import publish
from tests.chaos.disk import filled, small_disk
from tests.processes import children as children_of
from tests.ring.harness import children

LIMIT = 0.98
"""Smallest share of the completions per second without a tracker."""
TRACKERS = ("tensorboard", "trackio", "mlflow", "wandb", "swanlab")
OFFLINE = ("wandb", "swanlab")
STATES = ("sending", "frozen", "full")
NONE = "none"
"""Kind of the runs without a tracker."""
FIRST_STEPS = 3
"""Steps after which the fault begins; the rate is taken from the step after them."""
PATIENCE_SECONDS = 600.0
"""Longest wait for the first steps of a run, and for its end."""

Kind = tuple[str, str]
"""Tracker and its state."""
Figures = tuple[float, float]
"""Completions per second after the run's first steps, and the tracker's share of all processors' time."""


def main() -> None:
    """Run all kinds in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trackers", default="tensorboard", help=f"of {', '.join(TRACKERS)}")
    parser.add_argument("--model", type=Path, help="folder of the quickstart's model, which is made by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trackers = arguments.trackers.split(",")
    if unknown := set(trackers) - set(TRACKERS):
        parser.error(f"--trackers: {', '.join(sorted(unknown))} is none of {', '.join(TRACKERS)}")
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as why:
        folder = Path(name)
        disk = folder / "disk"
        model = arguments.model or folder / "model"
        if arguments.model is None:
            subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        states = [state for state in STATES if state != "full" or not why]
        kinds = [(NONE, ""), *((tracker, state) for tracker in trackers for state in states)]
        figures: dict[Kind, list[Figures]] = {kind: [] for kind in kinds}
        for number in range(arguments.rounds):
            # another kind first in each round: what warms or tires the machine falls on all alike
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                figures[kind].append(_figures(folder / f"{'-'.join(kind)}{number}", kind, arguments, model, disk))
    rows = [_row(kind, figures) for kind in kinds]
    if why:
        print(f"full: left out, {why}")
    publish({"trackers": rows, "limit": LIMIT}, rows, arguments.json)


def _row(kind: Kind, figures: dict[Kind, list[Figures]]) -> dict[str, Any]:
    ratios = [rate / plain for (rate, _), (plain, _) in zip(figures[kind], figures[NONE, ""], strict=True)]
    share = statistics.median(ratios)
    return {
        "tracker": kind[0],
        "state": kind[1],
        "completions_per_second": round(statistics.median(rate for rate, _ in figures[kind]), 1),
        "share": round(share, 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "within_limit": share >= LIMIT,
        "cpu_share": round(statistics.median(used for _, used in figures[kind]), 4),
    }


def _figures(output: Path, kind: Kind, arguments: argparse.Namespace, model: Path, disk: Path) -> Figures:
    """Run to the end."""
    tracker, state = kind
    files = output / "trackers"
    if state == "full":
        (disk / output.name).mkdir()
        output.mkdir()
        files.symlink_to(disk / output.name)
    keys = {"type": tracker} | ({"mode": "offline"} if tracker in OFFLINE else {})
    overrides = [
        f"model.path={model}",
        f"output_dir={output}",
        f"trainer.max_steps={arguments.steps}",
        "eval.num_prompts=0",
        f"telemetry.trackers={json.dumps([] if tracker == NONE else [keys])}",
    ]
    command = [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *overrides]
    environment = os.environ | {"TRACKIO_DIR": str(files / "trackio")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        with contextlib.ExitStack() as faults:
            _wait_for_steps(output, process)
            if tracker != NONE:
                _wait_for_tracker(files / f"{tracker}.jsonl", output, process)
            began, before = time.monotonic(), _tracker_seconds(process.pid)
            if state in ("frozen", "full"):
                faults.enter_context(_frozen(process.pid) if state == "frozen" else filled(disk))
            used = _wait_for_end(output, process) - before
            cpu_share = used / (time.monotonic() - began) / (os.cpu_count() or 1)
        if process.wait(PATIENCE_SECONDS):
            raise RuntimeError(f"the run {output.name} failed: {process.stderr.read()}")
    finally:
        process.kill()
    times = [line["time"] for line in _lines(output)]
    assert len(times) == arguments.steps, f"{output.name}: {len(times)} of {arguments.steps} steps are in metrics.jsonl"
    counted = times[FIRST_STEPS:]
    return GROUPS * GROUP_SIZE * (len(counted) - 1) / (counted[-1] - counted[0]), cpu_share


def _tracker_seconds(supervisor: int) -> float:
    """Return the CPU seconds of the tracker and its live and ended descendants; 0 without a tracker."""
    tracker = children(supervisor).get("tracker-0")
    return _seconds_of_tree(tracker) if tracker is not None else 0.0


def _seconds_of_tree(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it has ended, and counts as one of its parent's ended children
        return 0.0
    ticks = sum(map(int, words[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_seconds_of_tree(child.pid) for child in children_of(pid))


def _lines(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wait_for_steps(output: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(_lines(output)) < FIRST_STEPS and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {FIRST_STEPS} after {PATIENCE_SECONDS:g} s")
        time.sleep(0.05)


def _wait_for_tracker(journal: Path, output: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until the tracker surely has its first steps."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not journal.exists() or '"held"' not in journal.read_text():
        if process.poll() is not None or time.monotonic() > deadline or (output / "summary.json").exists():
            raise TimeoutError(f"{journal} has no step by the end of training; take more --steps")
        time.sleep(0.05)


def _wait_for_end(output: Path, process: "subprocess.Popen[str]") -> float:
    """Wait for the end of training, as long as a fault lasts; return the CPU seconds of the tracker by then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    used = 0.0
    while not (output / "summary.json").exists() and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run has not ended after {PATIENCE_SECONDS:g} s")
        used = _tracker_seconds(process.pid)
        time.sleep(0.5)
    return used


@contextlib.contextmanager
def _frozen(supervisor: int) -> Iterator[None]:
    """Stop the tracker's process for the block."""
    tracker = children(supervisor)["tracker-0"]
    os.kill(tracker, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(tracker, signal.SIGCONT)


if __name__ == "__main__":
    main()
