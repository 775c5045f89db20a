"""A training step of grpo-actors and of TRL: same weights, completions, loss (dapo, beta 0) and threads, in turns.

    python -m benchmarks.trainer_vs_trl --trl-python PYTHON [--rounds 4] [--threads 2] [--checkpointing] [--json PATH]

PYTHON is the interpreter of a separate environment with TRL, because versions of the packages may conflict:

    python -m venv trl && trl/bin/pip install "trl==1.16.*" torch==2.13.0 transformers==5.19.0

Both compute forward pass, loss, backward pass, clipping, AdamW step and metrics of 8 completions in 2 groups, float32,
up to 1 024 tokens per sample, vocabulary 32 000, without sampling. Micro-batches have the same capacity: 4 samples of
1 024 tokens in TRL, rows of 4 096 tokens here. TRL runs its own `train()`, see `benchmarks/trl_worker.py`. The first
round is a warm-up. The gradients of the first step must agree before anything is compared.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import publish
from benchmarks.trainer_cases import (
    Clock,
    Shape,
    answer,
    config_of,
    mixed_lengths,
    status_bytes,
    step_batch,
    worker,
    write_model,
)

ROOT = Path(__file__).parent.parent
SHAPE, GROUPS, GROUP_SIZE, LONGEST, TRL_MICRO_BATCH = Shape(), 2, 4, 1_024, 4
TOLERANCE = 1e-5


def main() -> None:
    """Run both in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="of an environment with TRL 1.16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ours:
        ours(arguments.ours)
        return
    if arguments.trl_python is None:
        parser.error("--trl-python: name the python of an environment with TRL; --help says how to make one")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = _prepare(folder, arguments)
        steps = _in_turns(folder, arguments)
        gap = gradient_gap(folder)
    if gap > TOLERANCE:
        sys.exit(f"the gradients of the first step differ by {gap:.1e} of the largest; nothing to compare")
    rows = [_row(name, found[1:], tokens) for name, found in steps.items()]
    ratios = {
        "tokens/s": rows[0]["tokens/s"] / rows[1]["tokens/s"],
        "tokens/CPU s": rows[0]["tokens/CPU s"] / rows[1]["tokens/CPU s"],
        "peak MiB": rows[0]["peak MiB"] / rows[1]["peak MiB"],
    }
    rows.append({"trainer": "ours / TRL", **ratios})
    results = {"tokens": tokens, "gradient_gap": gap, "checkpointing": arguments.checkpointing, "rows": rows}
    publish({**results, "steps": steps}, rows, arguments.json)


def _prepare(folder: Path, arguments: argparse.Namespace) -> int:
    """Write model, batch and settings for both sides; return the tokens of the batch, prompts in each sample."""
    write_model(folder / "model", SHAPE)
    batch = _batch(1)
    fields = ("token_ids", "sample_offsets", "prompt_lengths", "advantages")
    np.savez(folder / "batch.npz", **{field: getattr(batch, field) for field in fields})
    settings = {
        "threads": arguments.threads,
        "learning_rate": 1e-6,
        "max_grad_norm": 1e6,
        "max_steps": arguments.rounds,
        "group_size": GROUP_SIZE,
        "trl_micro_batch": TRL_MICRO_BATCH,
        "gradient_checkpointing": arguments.checkpointing,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return int(batch.token_ids.size)


def _batch(step: int) -> Any:
    lengths = mixed_lengths(GROUPS, GROUP_SIZE, LONGEST)
    return step_batch(lengths, SHAPE.vocab_size, TRL_MICRO_BATCH * LONGEST, step)


def _in_turns(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    command = [sys.executable, "-m", "benchmarks.trainer_vs_trl", "--ours", folder]
    trl_command = [arguments.trl_python, ROOT / "benchmarks" / "trl_worker.py", folder]
    steps: dict[str, list[dict[str, float]]] = {"ours": [], "TRL": []}
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    with worker(command, environment) as mine, worker(trl_command, environment) as theirs:
        for _ in range(arguments.rounds):
            steps["ours"].append(mine.step())
            steps["TRL"].append(theirs.step())
    return steps


def ours(folder: Path) -> None:
    """Compute a step of the learner for each line on stdin."""
    import torch

    from actors.learner.learner import TorchLearner
    from benchmarks.gradients import captured_gradients

    given = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(given["threads"])
    imported = status_bytes("VmRSS")
    learner = TorchLearner(
        config_of(
            folder / "model",
            TRL_MICRO_BATCH * LONGEST,
            {"gradient_checkpointing": given["gradient_checkpointing"]},
            loss={"type": "dapo"},
            learning_rate=given["learning_rate"],
            max_grad_norm=given["max_grad_norm"],
        )
    )
    for step, _ in enumerate(sys.stdin, start=1):
        batch, clock = _batch(step), Clock()
        capture: Any = captured_gradients(learner) if step == 1 else nullcontext({})
        with capture as gradients:
            learner.step(batch)
        answer(**clock.read(), peak_bytes=status_bytes("VmHWM") - imported)
        if gradients:
            np.savez(folder / "ours.npz", **{name: gradient.numpy() for name, gradient in gradients.items()})


def gradient_gap(folder: Path) -> float:
    """Return the largest difference between gradients of the first step, relative to the largest gradient."""
    mine, theirs = np.load(folder / "ours.npz"), np.load(folder / "trl.npz")
    if set(mine.files) != set(theirs.files):
        raise RuntimeError(f"gradients of {set(mine.files) ^ set(theirs.files)} are on one side alone")
    largest = max(float(np.abs(theirs[name]).max()) for name in theirs.files)
    return max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine.files) / largest


def _row(name: str, steps: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    seconds, cpu_seconds = (statistics.median(step[key] for step in steps) for key in ("seconds", "cpu_seconds"))
    rates = {"tokens/s": tokens / seconds, "tokens/CPU s": tokens / cpu_seconds}
    return {"trainer": name, **rates, "peak MiB": steps[-1]["peak_bytes"] / 2**20}


if __name__ == "__main__":
    main()
