"""Lag by completion length for both values of `packer.order`, on the quickstart's task.

`ordinal` waits for the slowest group of a step. `arrival` takes the groups that have arrived, and long groups train
later. Both runs have the same seed and model. The histogram counts completions by length and by the lag of their group.

    python -m benchmarks.order [--steps 100] [--level 2] [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from actors.algorithms.lag import lag_of
from actors.ledger.store import Store
from benchmarks.machine import publish
from bus import codec
from schemas.messages import ScoredGroup

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"


def main() -> None:
    """Run both orders and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        for order in ("ordinal", "arrival"):
            output = Path(folder) / order
            level = f"packer.max_async_level={arguments.level}"
            places = [f"model.path={model}", f"output_dir={output}", f"trainer.max_steps={arguments.steps}"]
            overrides = [*places, level, f"packer.order={order}", "eval.num_prompts=0"]
            command = [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *overrides]
            subprocess.run(command, check=True, capture_output=True)
            rows += _rows(order, output)
    publish({"lag_by_completion_length": rows}, rows, arguments.json)


def _rows(order: str, output: Path) -> list[dict[str, Any]]:
    summary = json.loads((output / "summary.json").read_text())
    lags: dict[int, Counter[int]] = {}
    store = Store(output / "ledger.sqlite")
    for step in store.steps():
        for frames in store.payloads(step.ordinals):
            group = codec.decode(frames)
            assert isinstance(group, ScoredGroup)
            for length in group.lengths_G.tolist():
                lags.setdefault(length, Counter())[lag_of(step.step, group.oldest_version)] += 1
    store.close()
    speed = round(summary["completions_per_second"])
    return [{"order": order, "completions/s": speed, "tokens": length, "completions": counts.total(),
             **{f"lag {lag}": round(counts[lag] / counts.total(), 3) for lag in range(5)}}
            for length, counts in sorted(lags.items())]  # fmt: skip


if __name__ == "__main__":
    main()
