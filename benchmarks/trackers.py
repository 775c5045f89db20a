"""Cost of trackers for a run: completions per second with one, with a frozen one, and with one whose disk is full.

The runs are of the quickstart's size, in turns with runs without a tracker, in an order that changes with each round.
The limit is that each kind of run trains at least 98 % of the completions per second of the runs without a tracker, by
the median of the rounds' ratios. The frozen process has been stopped by SIGSTOP after its first steps. The full disk is
a tmpfs for all files of the tracker, which needs the right to mount one; without it this kind is left out, and the
table says so. Each tracker's package must be installed; W&B and SwanLab write files in their offline modes.

    python -m benchmarks.trackers [--trackers tensorboard,mlflow] [--steps 60] [--rounds 5] [--model DIR] [--json PATH]
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


def main() -> None:
    """Run all kinds in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
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
        rates: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        for number in range(arguments.rounds):
            # another kind first in each round: what warms or tires the machine falls on all alike
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                rates[kind].append(_rate(folder / f"{'-'.join(kind)}{number}", kind, arguments, model, disk))
    rows = [_row(kind, rates) for kind in kinds]
    if why:
        print(f"full: left out, {why}")
    publish({"trackers": rows, "limit": LIMIT}, rows, arguments.json)


def _row(kind: Kind, rates: dict[Kind, list[float]]) -> dict[str, Any]:
    ratios = [rate / plain for rate, plain in zip(rates[kind], rates[NONE, ""], strict=True)]
    share = statistics.median(ratios)
    return {
        "tracker": kind[0],
        "state": kind[1],
        "completions_per_second": round(statistics.median(rates[kind]), 1),
        "share": round(share, 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "within_limit": share >= LIMIT,
    }


def _rate(output: Path, kind: Kind, arguments: argparse.Namespace, model: Path, disk: Path) -> float:
    """Run to the end; return the completions per second after the first steps."""
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
            if state in ("frozen", "full"):
                _wait_for_steps(output, process)
                faults.enter_context(_frozen(process.pid) if state == "frozen" else filled(disk))
            _wait_for_end(output, process)
        if process.wait(PATIENCE_SECONDS):
            raise RuntimeError(f"the run {output.name} failed: {process.stderr.read()}")
    finally:
        process.kill()
    times = [line["time"] for line in _lines(output)]
    assert len(times) == arguments.steps, f"{output.name}: {len(times)} of {arguments.steps} steps are in metrics.jsonl"
    counted = times[FIRST_STEPS:]
    return float(GROUPS * GROUP_SIZE * (len(counted) - 1) / (counted[-1] - counted[0]))


def _lines(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wait_for_steps(output: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(_lines(output)) < FIRST_STEPS and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {FIRST_STEPS} after {PATIENCE_SECONDS:g} s")
        time.sleep(0.05)


def _wait_for_end(output: Path, process: "subprocess.Popen[str]") -> None:
    """Wait for the end of training: a fault lasts until then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (output / "summary.json").exists() and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run has not ended after {PATIENCE_SECONDS:g} s")
        time.sleep(0.2)


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
