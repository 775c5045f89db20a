"""Learning of each loss, advantage and modifier: the quickstart's task, 20 steps, three seeds.

The verdict of a row is "learns" if the mean reward of steps 16–20 exceeds the mean reward of steps 1–5 by two standard
errors over the seeds, else "not separated from noise". All rows share model, data, batch and optimizer: AdamW with a
small eps, so that the scale of a loss does not matter. Losses run with the z-score advantage, advantages with the
`surogate` loss. The teacher of a seed is its start model after 150 steps of the quickstart.

    python -m benchmarks.learning [--only NAME ...] [--seeds 3] [--json PATH]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.datasets.generated import ReverseText
from benchmarks.cases import ADVANTAGES, DEFAULTS, LOSSES, MODIFIERS
from benchmarks.machine import publish, scratch
from schemas.config.data import ReverseTextConfig

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
STEPS, WINDOW, TEACHER_STEPS, SUPERVISED = 20, 5, 150, 500
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.learning_rate=1e-4",
    "trainer.lr_scheduler=constant",
    "trainer.warmup_steps=0",
    "trainer.optimizer.eps=1e-8",
    "eval.num_prompts=0",
)
CASES = {
    (kind, name): case
    for kind, cases in (("default", DEFAULTS), ("loss", LOSSES), ("advantage", ADVANTAGES), ("switch", MODIFIERS))
    for name, case in cases.items()
}


def main() -> None:
    """Run every case with every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name for _, name in CASES})
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with scratch() as folder:
        for (kind, name), case in CASES.items():
            if name in arguments.only:
                runs = [rewards(folder, f"{kind}-{name}", case, seed) for seed in range(arguments.seeds)]
                rows.append({"kind": kind, "name": name} | judge(runs))
                print(rows[-1], file=sys.stderr, flush=True)
    publish({"learning": rows}, rows, arguments.json)


def rewards(folder: Path, name: str, case: Sequence[str], seed: int) -> list[float]:
    """Return the mean reward of each step of one run."""
    output = folder / f"{name}-{seed}"
    _train(output, _model(folder, seed), seed, (*COMMON, *(_filled(override, folder, seed) for override in case)))
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward_mean"] for line in lines]


def _filled(override: str, folder: Path, seed: int) -> str:
    """Return the override with paths in place of names; a missing file is made."""
    for name, make in MAKERS.items():
        if f"{{{name}}}" in override:
            override = override.replace(f"{{{name}}}", str(make(folder, seed)))
    return override


def _model(folder: Path, seed: int) -> Path:
    path = folder / f"model-{seed}"
    if not path.exists():
        _run(sys.executable, QUICKSTART / "model.py", path, "--seed", seed)
    return path


def _teacher(folder: Path, seed: int) -> Path:
    output = folder / f"teacher-{seed}"
    if not output.exists():
        _train(output, _model(folder, seed), seed, (f"trainer.max_steps={TEACHER_STEPS}", "eval.num_prompts=0"))
    return output / "checkpoints" / f"step_{TEACHER_STEPS}"


def _supervised(folder: Path, seed: int) -> Path:
    """Write examples of another seed than the run's."""
    path, words = folder / f"supervised-{seed}.jsonl", ReverseText(ReverseTextConfig(), "train", seed + 2_000_003)
    examples = (words.example(i) for i in range(SUPERVISED))
    lines = [json.dumps({"prompt": one.prompt, "completion": one.columns["answer"]}) for one in examples]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


MAKERS: dict[str, Callable[[Path, int], Path]] = {"model": _model, "teacher": _teacher, "supervised": _supervised}


def _train(output: Path, model: Path, seed: int, overrides: Sequence[str]) -> None:
    places = (f"model.path={model}", f"output_dir={output}", f"seed={seed}")
    _run(sys.executable, "-m", "actors", "up", QUICKSTART / "run.yaml", *places, *overrides)


def _run(*command: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # under other load, threads that wait for each other spin
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exited {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def judge(runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """First and last five steps, their difference and its standard error over runs.

    Differences [.2, .3, .1]: mean .2, standard error .1/√3 = .0577, so 3.46 of them: learns.
    """
    firsts = [statistics.fmean(steps[:WINDOW]) for steps in runs]
    lasts = [statistics.fmean(steps[-WINDOW:]) for steps in runs]
    gains = [last - first for first, last in zip(firsts, lasts, strict=True)]
    gain = statistics.fmean(gains)
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("inf")
    return {
        "steps 1-5": round(statistics.fmean(firsts), 3),
        "steps 16-20": round(statistics.fmean(lasts), 3),
        "gain": round(gain, 3),
        "standard error": round(error, 3),
        "verdict": "learns" if gain > 0 and gain >= 2 * error else "not separated from noise",
    }


if __name__ == "__main__":
    main()
