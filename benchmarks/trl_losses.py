"""The script of docs/howto/trl.md with its import line changed, compared with TRL: rewards, losses, gradients, weights.

    python -m benchmarks.trl_losses --trl-python PYTHON [--only TEXT ...] [--json PATH]

PYTHON is the interpreter of an environment with TRL; `make bench-trl` makes one in .venv-trl. For each case the
script's arguments are changed on both sides. Then `from actors import GRPOTrainer` trains three generations, and TRL
runs the script on the same completions (`benchmarks/trl_losses_worker.py`). Both compute in float32 on the CPU.

Columns are the largest difference over the steps, absolute for reward and loss and relative for others; `|loss|` is the
largest loss, which is a rounding error itself where all advantages of equal weights cancel. `gradients` is the
largest difference between gradients of the first update, relative to the largest gradient, and `weights` the distance
of the weights after the last update, relative to the distance from the start. The exit code is 1 if `reward`, `loss`,
`gradients` or `learning rate` of a case exceed TOLERANCE, unless the case has a reason to differ.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actors.learner.learner import TorchLearner
from actors.learner.ranks import SINGLE_RANK
from actors.ledger import LedgerReader
from actors.ledger.stored_groups import stored_group
from actors.ops.recorded_steps import RecordedSteps
from benchmarks.machine import ROOT, publish, scratch
from schemas.config import RunConfig, load_config

PAGE = ROOT / "docs" / "howto" / "trl.md"
THEIRS, OURS = "from trl import GRPOConfig, GRPOTrainer", "from actors import GRPOConfig, GRPOTrainer"
PEFT = '        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),\n'
TOLERANCE = 1e-5
HELD = ("reward", "loss", "gradients", "learning rate")
GENERATIONS = 3

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Case:
    """Arguments of GRPOConfig that a case changes.

    Args:
        groups: groups of a generation; None: the script's own numbers.
        size: completions of a group.
        arguments: further arguments.
        has_adapter: False to train all weights.
    """

    groups: int | None
    size: int
    arguments: Mapping[str, Any]
    has_adapter: bool = True

    @property
    def reason(self) -> str:
        """Reason why the case differs; empty if it must not."""
        if self.arguments.get("loss_type") == "bnpo" and self.arguments.get("gradient_accumulation_steps", 1) > 1:
            return "bnpo averages over micro-batches, which are filled to packer.sequence_len here"
        if self.arguments.get("mask_truncated_completions"):
            return "a completion cut off at a padding token, which this random model samples, counts as ended in TRL"
        return ""

    @property
    def name(self) -> str:
        """Size and arguments in a line."""
        if self.groups is None:
            return "the script as it is"
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        return ", ".join([f"{self.groups}×{self.size}", *words, *([] if self.has_adapter else ["all weights"])])

    @property
    def updates(self) -> int:
        """Optimizer updates of a generation."""
        accumulation = self.arguments.get("gradient_accumulation_steps", 1)
        per_generation = self.arguments.get("steps_per_generation", accumulation)
        return int(per_generation // accumulation * self.arguments.get("num_iterations", 1))

    @property
    def given(self) -> dict[str, Any]:
        """All arguments that differ from the script's."""
        if self.groups is None:
            return {}
        accumulation = self.arguments.get("gradient_accumulation_steps", 1)
        per_generation = self.arguments.get("steps_per_generation", accumulation)
        sizes = {
            "per_device_train_batch_size": self.groups * self.size // per_generation,
            "num_generations": self.size,
            "max_steps": GENERATIONS * self.updates,
        }
        return sizes | {"lr_scheduler_type": "constant"} | dict(self.arguments)


def _cases() -> list[Case]:
    """Return the script, each loss in each size with one of four variants, and other arguments."""
    variants: list[dict[str, Any]] = [
        {},
        {"beta": 0.04, "gradient_accumulation_steps": 2, "scale_rewards": "none"},
        {"beta": 0.04, "num_iterations": 2},
        {"num_iterations": 2, "steps_per_generation": 2},
    ]
    cases = [Case(None, 8, {})]
    for row, (groups, size) in enumerate(((2, 4), (4, 8), (8, 16))):
        for column, loss in enumerate(("grpo", "bnpo", "dr_grpo", "dapo")):
            cases.append(Case(groups, size, {"loss_type": loss} | variants[(row + column) % len(variants)]))
    others: list[dict[str, Any]] = [
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"epsilon_high": 0.28, "delta": 4.0},
        {"mask_truncated_completions": True},
        {"top_entropy_quantile": 0.2},
        {"entropy_coef": 0.01, "scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum", "temperature": 0.7},
        {"beta": 0.04, "use_bias_correction_kl": True, "weight_decay": 0.1, "max_grad_norm": 0.05},
        {"warmup_steps": 2, "lr_scheduler_type": "cosine"},
    ]
    cases += [Case(4, 8, {"num_iterations": 2} | arguments) for arguments in others]
    return [*cases, Case(4, 8, {"num_iterations": 2, "beta": 0.04}, has_adapter=False)]


CASES = _cases()


def main() -> None:
    """Run the cases one after the other and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="of an environment with TRL 1.16")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of the names of cases")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, bad, trl_python = [], [], arguments.trl_python.absolute()
    for case in CASES:
        if not any(text in case.name for text in arguments.only):
            continue
        with scratch() as folder:
            make_model(folder / "model")
            # the run's files have paths as the script has them
            with chdir(folder):
                found = compared(Path.cwd(), case, trl_python)
        rows.append({"case": case.name} | found)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if not case.reason and any(found[name] > TOLERANCE for name in HELD):
            bad.append(case.name)
    reasons = {case.name: case.reason for case in CASES if case.reason}
    publish({"tolerance": TOLERANCE, "rows": rows, "reasons": reasons}, rows, arguments.json)
    if bad:
        sys.exit(f"differ by more than {TOLERANCE:g}: {'; '.join(bad)}")


def make_model(folder: Path) -> None:
    """Write a model of the quickstart's architecture, with random weights."""
    from examples.quickstart.model import make_model, make_tokenizer

    torch.manual_seed(0)
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def compared(folder: Path, case: Case, trl_python: Path) -> dict[str, float]:
    """Train the script of a case here and in TRL; return the differences.

    Args:
        folder: folder with the start model in `model`.
        case: arguments of the script.
        trl_python: interpreter of an environment with TRL.
    """
    script = script_of(case)
    (folder / "script_trl.py").write_text(script)
    (folder / "script_here.py").write_text(script.replace(THEIRS, OURS))
    _run(folder, sys.executable, "script_here.py")
    config = load_config(folder / "outputs" / "reverse" / "trainer.yaml")
    ours = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    (folder / "generations.json").write_text(json.dumps(list(generations(config))))
    start, gradients, end = weights_and_gradients(config, len(ours))
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    _run(folder, trl_python, ROOT / "benchmarks" / "trl_losses_worker.py", folder)
    theirs = per_generation(json.loads((folder / "trl.json").read_text()), case.updates)
    figures = {
        "reward": _gap(ours, theirs, "reward_mean", "reward", False),
        "|loss|": max(abs(line["loss"]) for line in ours),
        "loss": _gap(ours, theirs, "loss", relative=False),
        "grad norm": _gap(ours, theirs, "grad_norm"),
        "KL": _gap(ours, theirs, "reference_kl", "kl") if "kl" in theirs[0] else 0.0,
        "entropy": _gap(ours, theirs, "entropy"),
        "gradients": largest_gap(gradients, np.load(folder / "trl.npz")),
        "weights": distance(end, np.load(folder / "trl_end.npz")) / distance(end, start),
        "learning rate": _gap(ours, theirs, "learning_rate"),
    }
    return {name: float(f"{value:.1e}") for name, value in figures.items()}


def script_of(case: Case) -> str:
    """Return the page's script with the arguments of a case.

    Raises:
        RuntimeError: the page has changed, and has no such script.
    """
    found = re.search(r'```python title="reverse_grpo.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if found is None or THEIRS not in found[1] or PEFT not in found[1]:
        raise RuntimeError(f"{PAGE}: has no script reverse_grpo.py with the lines that this benchmark replaces")
    script = found[1] if case.has_adapter else found[1].replace(PEFT, "")
    for name, value in case.given.items():
        script = re.sub(rf"^ *{name}=.*\n", "", script, flags=re.MULTILINE)
        script = script.replace("args=GRPOConfig(\n", f"args=GRPOConfig(\n            {name}={value!r},\n")
    return script


def generations(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows and token ids of each step, completion by completion, in the order of the step."""
    reader = LedgerReader.of(config.ledger_path)
    for step in reader.steps():
        rows, prompts, completions = [], [], []
        for group in map(stored_group, reader.payloads(step.ordinals)):
            for start, end in zip(group.sample_offsets[:-1], group.sample_offsets[1:], strict=True):
                rows.append({"prompt": group.prompt} | group.columns)
                prompts.append(group.prompt_ids.tolist())
                completions.append(group.token_ids[start:end].tolist())
        yield {"rows": rows, "prompt_ids": prompts, "completion_ids": completions}


def weights_and_gradients(config: RunConfig, last: int) -> tuple[Arrays, Arrays, Arrays]:
    """Return trained weights before training, the clipped gradients of the first update, and weights after the last.

    The first step is computed again as by `actors replay`; the weights are read from the checkpoint.
    """
    learner, steps = TorchLearner(config), RecordedSteps(config)

    def weights() -> Arrays:
        return {name: p.detach().numpy().copy() for name, p in learner.trained.named_parameters() if p.requires_grad}

    start, (batches,) = weights(), list(steps.batches(0, 1))
    with first_gradients(learner) as gradients:
        learner.step(batches[-1], SINGLE_RANK, batches[:-1])
    learner.restore(steps.checkpoint(last))
    return start, gradients, weights()


@contextmanager
def first_gradients(learner: TorchLearner) -> Iterator[dict[str, Any]]:
    """Yield a mapping that the first update in the block fills with the gradients by name, clipped."""
    found: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        named = learner.trained.named_parameters()
        found.update({name: p.grad.numpy().copy() for name, p in named if p.grad is not None and name not in found})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def per_generation(history: Sequence[Mapping[str, float]], updates: int) -> list[dict[str, float]]:
    """Return the mean of TRL's log over the updates of each generation; the learning rate of the last."""
    found = []
    for start in range(0, len(history), updates):
        entries = history[start : start + updates]
        # rewards are logged with the generation, so only by its first update
        names = {name for entry in entries for name, value in entry.items() if isinstance(value, float)}
        values = {name: [entry[name] for entry in entries if entry.get(name) is not None] for name in names}
        means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
        found.append(means | {"learning_rate": entries[-1]["learning_rate"]})
    return found


def _gap(ours: Sequence[Any], theirs: Sequence[Any], name: str, other: str = "", relative: bool = True) -> float:
    """Return the largest difference of a metric over the steps."""
    pairs = [(mine[name], yours[other or name]) for mine, yours in zip(ours, theirs, strict=True)]
    scale = max(abs(b) for _, b in pairs) if relative else 1.0
    return max(abs(a - b) for a, b in pairs) / (scale or 1.0)


def largest_gap(ours: Arrays, theirs: Arrays) -> float:
    """Return the largest difference, relative to the largest value.

    Raises:
        RuntimeError: the names differ.
    """
    if set(ours) != set(theirs):
        raise RuntimeError(f"{set(ours) ^ set(theirs)} are on one side alone")
    largest = max(float(np.abs(value).max()) for value in ours.values())
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours) / largest


def distance(ours: Arrays, theirs: Arrays) -> float:
    """Return the Euclidean distance of two sets of arrays of the same names."""
    return float(np.sqrt(sum(float(np.square(ours[name] - theirs[name]).sum()) for name in ours)))


def _run(folder: Path, *command: object) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exited {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
