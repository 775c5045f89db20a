"""Reads the witnesses that a run's checkpoints left behind and decides whether its promise was kept (P20).

It joins `output_dir/checkpoints/witness/*.json` and imports nothing of the product: neither the ledger's code nor the
trainer's. Each file names the checkpoint before it; walking back from the newest one gives the live history (a file of
a history that was given up is not on that way). Over this history

    trained + dropped = 0 … n   without gap and without repeat,

the steps are 1 … max, and the chain of digests is what the records add up to.

    python tests/ring/witness_checker.py OUTPUT_DIR
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Testimony:
    """What the witnesses say of a whole run."""

    steps: int
    trained: list[int]
    dropped: dict[int, str]


class WitnessError(AssertionError):
    """The promise was not kept, or the witnesses can't tell."""


def check_witnesses(output_dir: Path) -> Testimony:
    """Join and judge the witnesses of a run."""
    trained: list[int] = []
    dropped: dict[int, str] = {}
    chain, last = "", 0
    for witness in live_history(output_dir / "checkpoints" / "witness"):
        for record in witness["steps"]:
            if record["step"] != last + 1:
                raise WitnessError(f"step {record['step']} follows step {last}")
            last = record["step"]
            trained += record["ordinals"]
            for ordinal, reason in record["dropped"]:
                if ordinal in dropped:
                    raise WitnessError(f"ordinal {ordinal} was dropped twice")
                dropped[ordinal] = reason
            link = [chain, record["step"], record["ordinals"], record["dropped"], record["digests"]]
            chain = hashlib.sha256(json.dumps(link, separators=(",", ":")).encode()).hexdigest()
        if chain != witness["chain"] or last != witness["step"]:
            raise WitnessError(f"the chain breaks at checkpoint {witness['step']}")
    seen = sorted([*trained, *dropped])
    if seen != list(range(len(seen))):
        twice = sorted({ordinal for ordinal in seen if seen.count(ordinal) > 1})
        missing = sorted(set(range(max(seen) + 1)) - set(seen))
        raise WitnessError(f"trained or dropped more than once: {twice}; neither: {missing}")
    return Testimony(last, trained, dropped)


def live_history(folder: Path) -> list[dict]:
    """The witnesses from the first step to the last, oldest first."""
    by_step = {}
    for path in folder.glob("step_*.json"):
        witness = json.loads(path.read_text(encoding="utf-8"))
        by_step[witness["step"]] = witness
    if not by_step:
        raise WitnessError(f"no witness in {folder}")
    history, step = [], max(by_step)
    while step:
        if step not in by_step:
            raise WitnessError(f"checkpoint {step} is named by a later one and has no witness")
        history.append(by_step[step])
        step = by_step[step]["previous"]
    if len({witness["run"] for witness in history}) != 1:
        raise WitnessError("witnesses of more than one run")
    return history[::-1]


if __name__ == "__main__":
    said = check_witnesses(Path(sys.argv[1]))
    print(f"{said.steps} steps, {len(said.trained)} groups trained once, {len(said.dropped)} dropped, none lost")
