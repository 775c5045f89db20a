"""Exact match and step times of several kinds of training on the quickstart's task.

The kinds are one rank, two ranks, two ranks with sharded weights, other optimizers, LoRA and QLoRA. All cases start
from the same model and take the same steps with the quickstart's data and batch. Exact match is measured on 200
held-out prompts, greedy, before and after. The time of a step is the median over the second half of the run. Each kind
has a learning rate that suits its optimizer; the quickstart's AdamW has a large eps, so its steps are small.

    python -m benchmarks.trainers [--only NAME ...] [--steps 150] [--json PATH]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import publish, scratch

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
LORA = ("model.lora.rank=16", "trainer.learning_rate=2e-3", "trainer.optimizer.eps=1e-3")
CASES: dict[str, Sequence[str]] = {
    "1 rank": (),
    "2 ranks": ("trainer.num_ranks=2",),
    "2 ranks fsdp": ("trainer.num_ranks=2", "trainer.sharding=fsdp"),
    "adamw_8bit": ("trainer.optimizer.type=adamw_8bit",),
    "2 ranks fsdp adamw_8bit": ("trainer.num_ranks=2", "trainer.sharding=fsdp", "trainer.optimizer.type=adamw_8bit"),
    "muon": ("trainer.optimizer.type=muon", "trainer.learning_rate=2e-4", "trainer.optimizer.adamw_learning_rate=1e-3"),
    "lora": LORA,
    "qlora nf4": (*LORA, "model.quantization.type=nf4"),
    "lora fp8": LORA,
    "lora nvfp4": LORA,
}
WRITTEN = {"lora fp8": "fp8", "lora nvfp4": "nvfp4"}
"""Format of the model's files, of cases that do not train the model as it is."""


def main() -> None:
    """Run the cases one after the other and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with scratch() as folder:
        _run(sys.executable, QUICKSTART / "model.py", folder / "model")
        for name in arguments.only:
            rows.append({"case": name} | measured(folder, name, CASES[name], arguments.steps))
            print(rows[-1], file=sys.stderr, flush=True)
    publish({"trainers": rows, "steps": arguments.steps}, rows, arguments.json)


def measured(folder: Path, name: str, case: Sequence[str], steps: int) -> dict[str, Any]:
    """Return exact match and times of one run."""
    output = folder / name.replace(" ", "-")
    model = folder / "model"
    if name in WRITTEN:
        model = folder / WRITTEN[name]
        _run(sys.executable, "-m", "actors", "quantize", folder / "model", "--type", WRITTEN[name], "--output", model)
    places = (f"model.path={model}", f"output_dir={output}", f"trainer.max_steps={steps}")
    _run(sys.executable, "-m", "actors", "up", QUICKSTART / "run.yaml", *places, *case)
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    late = lines[len(lines) // 2 :]

    def median(*keys: str) -> float:
        return round(1e3 * statistics.median(sum(line[key] for key in keys) for line in late), 1)

    return {
        "exact match before": summary["eval_before"]["reverse_text"]["exact_match"],
        "after": summary["eval_after"]["reverse_text"]["exact_match"],
        "reward before": round(statistics.fmean(line["reward_mean"] for line in lines[:5]), 3),
        "reward after": round(statistics.fmean(line["reward_mean"] for line in lines[-5:]), 3),
        "forward and backward ms": median("seconds_forward_backward"),
        "optimizer ms": median("seconds_optimizer"),
        "gather and publish ms": median("seconds_gather", "seconds_publish"),
        "mismatch_kl": f"{statistics.median(line['mismatch_kl'] for line in late):.1e}",
    }


def _run(*command: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # under other load, threads that wait for each other spin
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exited {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
