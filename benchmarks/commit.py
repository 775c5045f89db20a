"""Cost of the ledger's commits in the quickstart: milliseconds per step and share of the step, for both `ledger.sync`.

    python -m benchmarks.commit [--steps 100] [--rounds 3] [--json PATH]

`actors up` runs the quickstart's configuration (8 groups of 16 completions per step, on a CPU), in turns with
`ledger.sync: process` and `node`. The packer measures each commit (`grpo_packer_commit_seconds`); the benchmark reads
its /metrics during the run. Figures start at the tenth step.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import publish, scratch

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
FIRST_STEP = 10
Reading = tuple[int, float, float, float]
"""(step, its time, commits so far, seconds of commits so far)."""


def main() -> None:
    """Run both values of `ledger.sync` in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"process": [], "node": []}
    with scratch() as folder:
        model = folder / "model"
        subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        for number in range(arguments.rounds):
            for sync, results in found.items():
                found_there = readings(model, folder / f"{sync}{number}", sync, arguments.steps)
                results.append(costs(list(found_there)))
    rows: list[dict[str, Any]] = [
        {"sync": sync} | {key: statistics.median(result[key] for result in results) for key in results[0]}
        for sync, results in found.items()
    ]
    publish({"medians": rows, "rounds": found}, rows, arguments.json)


def readings(model: Path, output: Path, sync: str, num_steps: int) -> Iterator[Reading]:
    """Run once; return readings taken several times a second."""
    places = [f"model.path={model}", f"output_dir={output}", f"ledger.sync={sync}"]
    overrides = [*places, f"trainer.max_steps={num_steps}", "eval.num_prompts=0"]
    command = [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.2)
            with contextlib.suppress(OSError, StopIteration, IndexError):  # not there yet, or no more
                yield reading(output)


def reading(output: Path) -> Reading:
    """Return the number of recorded steps and the cost of all commits so far."""
    targets = json.loads((output / "metrics_targets.json").read_text())
    address = next(target["targets"][0] for target in targets if target["labels"]["actor"] == "packer")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=2.0) as answer:
        samples = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    count, seconds = (float(samples[f"grpo_packer_commit_seconds_{part}"]) for part in ("count", "sum"))
    return last["step"], last["time"], count, seconds


def costs(found: list[Reading]) -> dict[str, float]:
    """Return the costs per step, from the first reading after FIRST_STEP to the last reading."""
    first, last = next(r for r in found if r[0] >= FIRST_STEP), found[-1]
    steps, seconds, commits, busy = (after - before for before, after in zip(first, last, strict=True))
    return {
        "step ms": 1e3 * seconds / steps,
        "commits a step": commits / steps,
        "ms a commit": 1e3 * busy / commits,
        "commits ms a step": 1e3 * busy / steps,
        "share": busy / seconds,
    }


if __name__ == "__main__":
    main()
