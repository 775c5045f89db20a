"""A whole run of grpo-actors and of TRL: same start model, data, reward, loss (dapo) and hyperparameters, in turns.

    python -m benchmarks.run_vs_trl --trl-python PYTHON [--steps 300] [--rounds 2] [--runs 1] [--json PATH]

PYTHON is the interpreter of an environment with TRL 1.16 and this project; `make bench-run-trl` makes one in .venv-trl.
Both train the quickstart's model from one start, in steps of 128 completions. TRL runs as on a machine without a GPU:
`generate` of transformers, the reward function, then training, each with all cores. grpo-actors is `actors up` with
its defaults, for each of --runs: a `packer.max_async_level`, or that and a `weights.update_mode`, as `2:inflight`.

`completions/s`  trained between step FIRST_STEP and the last one
`to 0.9`         seconds from the first step's end until the mean reward of five steps first reaches 0.9
`whole to 0.9`   the same from the start of the command, with imports and start-up
`busy`           CPU time of the machine from step FIRST_STEP to the last one, as a share of all cores

The file of results has more of each run of grpo-actors: CPU time of a step by actor, and what the timeline tells of
the steps TRACED (`benchmarks.run_trace`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, publish
from benchmarks.run_trace import CpuClock, trace_of

QUICKSTART = ROOT / "examples" / "quickstart"
SETTINGS: dict[str, Any] = {
    "groups": 8,
    "group_size": 16,
    "max_tokens": 12,
    "epsilon": 0.2,
    "learning_rate": 1e-3,
    "min_lr_ratio": 0.05,
    "warmup_steps": 10,
    "beta2": 0.99,
    "eps": 1e-2,
    "max_grad_norm": 1.0,
}
"""What both are given; the values of examples/quickstart/run.yaml."""
FIRST_STEP, WINDOW, REWARD = 10, 5, 0.9
TRACED = (101, 110)
TIMEOUT_SECONDS = 1800.0


def main() -> None:
    """Run both in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="of an environment with TRL 1.16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", default="1", help="LEVEL or LEVEL:UPDATE_MODE, separated by commas")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="run-vs-trl-") as name:
        for seed in range(arguments.rounds):
            folder = Path(name) / str(seed)
            settings = SETTINGS | {"steps": arguments.steps, "seed": seed}
            make_model = [sys.executable, str(QUICKSTART / "model.py"), str(folder / "model"), "--seed", str(seed)]
            subprocess.run(make_model, check=True, capture_output=True)
            (folder / "settings.json").write_text(json.dumps(settings))
            theirs = figures("TRL", trl_command(arguments.trl_python, folder), folder / "trl.jsonl", settings)
            rows.append({"seed": seed, **theirs})
            for run in arguments.runs.split(","):
                level, _, mode = run.partition(":")
                output = folder / f"level-{level}-{mode}"
                command = our_command(folder / "model", output, settings, int(level), mode or "interrupt")
                name = f"level {level}, {mode}" if mode else f"level {level}"
                ours = figures(name, command, output / "metrics.jsonl", settings)
                ratio = ours["completions/s"] / theirs["completions/s"]
                trace = trace_of(output, *(min(step, arguments.steps) for step in TRACED))
                rows.append({"seed": seed, **ours, "ratio": round(ratio, 2), "trace": trace})
    head = [name for name in rows[-1] if name not in ("trace", "cpu_ms_of_a_step")]
    publish({"runs": rows}, [{key: row.get(key, "") for key in head} for row in rows], arguments.json)


def trl_command(python: Path, folder: Path) -> list[str]:
    """Return the command of TRL's side."""
    return [str(python.absolute()), "-m", "benchmarks.trl_run_worker", str(folder)]


def our_command(model: Path, output: Path, settings: dict[str, Any], level: int, mode: str) -> list[str]:
    """Return `actors up` with the same hyperparameters."""
    keys = {
        "seed": settings["seed"],
        "model.path": model,
        "output_dir": output,
        "packer.groups_per_step": settings["groups"],
        "packer.max_async_level": level,
        "weights.update_mode": mode,
        "rollout.group_size": settings["group_size"],
        "rollout.max_tokens": settings["max_tokens"],
        "trainer.max_steps": settings["steps"],
        "trainer.loss": f"{{type: dapo, epsilon: {settings['epsilon']}}}",
        "trainer.learning_rate": settings["learning_rate"],
        "trainer.min_lr_ratio": settings["min_lr_ratio"],
        "trainer.warmup_steps": settings["warmup_steps"],
        "trainer.optimizer": f"{{beta2: {settings['beta2']}, eps: {settings['eps']}, weight_decay: 0.0}}",
        "trainer.max_grad_norm": settings["max_grad_norm"],
        "eval.num_prompts": 0,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *words]


def figures(name: str, command: list[str], lines_path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a command that appends `step`, `time` and `reward_mean` of each step to a file; return its row."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    started = time.time()
    with CpuClock() as clock:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in lines_path.read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(1, settings["steps"] + 1)):
        raise SystemExit(f"{name}: {lines_path} has other steps than 1 to {settings['steps']}")
    early, last = lines[FIRST_STEP - 1], lines[-1]
    per_step = settings["groups"] * settings["group_size"]
    reached = first_reached(lines)
    row = {
        "run": name,
        "completions/s": round(per_step * (last["step"] - FIRST_STEP) / (last["time"] - early["time"]), 1),
        "busy": round(clock.share(early["time"], last["time"]), 3),
        "step of 0.9": reached["step"] if reached else None,
        "to 0.9": round(reached["time"] - lines[0]["time"], 1) if reached else None,
        "whole to 0.9": round(reached["time"] - started, 1) if reached else None,
        "last reward": round(last["reward_mean"], 3),
    }
    print(json.dumps(row), file=sys.stderr)
    seconds = (last["time"] - early["time"]) / (last["step"] - FIRST_STEP)
    by_actor = clock.by_actor(early["time"], last["time"])
    cpu = {name: round(1e3 * share * seconds, 1) for name, share in by_actor.items()}
    return row | ({"cpu_ms_of_a_step": cpu} if cpu else {})


def first_reached(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the step at which the mean reward of WINDOW steps first reaches REWARD; None: never."""
    if any(a["time"] > b["time"] for a, b in pairwise(lines)):
        raise ValueError("the times of the steps do not ascend")
    window: deque[float] = deque(maxlen=WINDOW)
    for line in lines:
        window.append(line["reward_mean"])
        if len(window) == WINDOW and sum(window) / WINDOW >= REWARD:
            return line
    return None


if __name__ == "__main__":
    main()
