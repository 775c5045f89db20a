"""The quickstart: make a tiny model, train it with `actors up`, report the result.

    python examples/quickstart/quickstart.py [--seed N] [--output DIR] [--resume] [key=value ...]

The output directory (default outputs/quickstart) has all files: `model/`, `report.png` and the files of the run
(docs/reference/files.md). Without `--resume` the script removes the files of an earlier quickstart in this directory
and starts from the beginning.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from actors.ops.up.run_lock import hold_run_lock
from actors.process.ledger_file import SUFFIXES as LEDGER_SUFFIXES
from actors.process.output_dir import WRITTEN
from schemas.errors import ConfigError

HERE = Path(__file__).parent
LEDGER = "ledger.sqlite"
LEFT_BEHIND = ("model", "report.png", LEDGER, *(f"{LEDGER}{suffix}" for suffix in LEDGER_SUFFIXES))
"""Files that make_room removes, in addition to the files of every run."""


def main() -> int:
    """Run the quickstart; return 0. A failed command exits with its own code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--config", type=Path, default=HERE / "run.yaml")
    parser.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of run.yaml")
    arguments = parser.parse_args()
    started = time.monotonic()
    output = arguments.output.resolve()
    train(arguments, output)
    report(output)
    print(
        f"\n{output}/report.png shows reward, lag and entropy; the quickstart took {time.monotonic() - started:.0f} s"
    )
    return 0


def train(arguments: argparse.Namespace, output: Path) -> None:
    """Make a model and train it, or continue the run in the output directory with its own configuration."""
    up = (sys.executable, "-m", "actors", "up")
    if arguments.resume:
        _run(*up, output / "config.resolved.yaml", *arguments.overrides)
        return
    try:
        make_room(output)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    started, model = time.monotonic(), output / "model"
    _run(sys.executable, HERE / "model.py", model, "--seed", arguments.seed)
    print(f"model made after {time.monotonic() - started:.0f} s\n")
    places = (f"output_dir={output}", f"model.path={model}", f"seed={arguments.seed}")
    _run(*up, arguments.config, *places, *arguments.overrides)


def report(output: Path) -> None:
    """Draw report.png and print the result."""
    lines = _records(output / "metrics.jsonl")
    draw(lines, output / "report.png")
    print(describe(json.loads((output / "summary.json").read_text()), lines, _records(output / "samples.jsonl")))


def make_room(output: Path) -> None:
    """Remove the files of an earlier quickstart from this directory; files with other names stay.

    Raises:
        ConfigError: the directory has files but no quickstart made it, or a run is using it.
    """
    mark = output / ".quickstart"
    if mark.exists():
        with hold_run_lock(output):
            for name in (*LEFT_BEHIND, *WRITTEN):
                _remove(output / name)
        print(f"beginning anew; the earlier quickstart in {output} has been removed (--resume would have continued it)")
    elif output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output}: is not empty, and not a quickstart's; remove it, or give another --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(*command: object) -> None:
    process = subprocess.Popen([str(part) for part in command])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has sent SIGINT to the command too, which then stops softly
        code = process.wait()
    if code > 128:
        print("continue with --resume; without --resume the quickstart starts from the beginning", file=sys.stderr)
    if code:
        sys.exit(code)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def describe(summary: dict[str, Any], lines: list[dict[str, Any]], samples: list[dict[str, Any]]) -> str:
    """Return the result as text: a table, and completions before and after training."""
    before, after = summary["eval_before"]["reverse_text"], summary["eval_after"]["reverse_text"]
    ledger = summary["ledger"]
    rows = [
        ("held-out exact match (greedy)", f"{before['exact_match']:.3f}", f"{after['exact_match']:.3f}"),
        ("held-out reward (greedy)", f"{before['mean_reward']:.3f}", f"{after['mean_reward']:.3f}"),
        ("sampled reward (5 steps)", f"{summary['reward_first']:.3f}", f"{summary['reward_last']:.3f}"),
    ]
    text = [f"{'':32}{'before':>9}{'after':>9}", *(f"{name:32}{a:>9}{b:>9}" for name, a, b in rows), ""]
    speed = (
        f"{summary['completions_per_second'] or 0:.0f} completions/s, "
        f"{summary['tokens_per_second'] or 0:.0f} tokens/s, "
        f"trainer idle {summary['trainer_idle_ratio'] or 0:.0%}"
    )
    equation = (
        f"issued {ledger['issued']} = trained {ledger['trained']} + dropped {sum(ledger['dropped'].values())} "
        f"+ in flight {ledger['in_flight']}; trained twice {ledger['trained_twice']}"
    )
    text.append(f"{summary['steps']} steps in {summary['train_seconds']:.0f} s of training: {speed}")
    text.append(f"sampled reward first held 0.9 over five steps after {first_held(lines, 0.9)}")
    text.append(
        f"lag mean {summary['lag_mean']:.2f}, max {summary['lag_max']:.0f}; mismatch KL {summary['mismatch_kl']:.1e}"
    )
    text += [f"ledger: {equation}", ""]
    return "\n".join(text + _completions(summary, samples))


def _completions(summary: dict[str, Any], samples: list[dict[str, Any]]) -> list[str]:
    evaluated = [sample for sample in samples if sample["purpose"] == "eval"]
    first = {s["prompt"]: s["completions"][0] for s in evaluated if s["step"] == 0}
    last = {s["prompt"]: s["completions"][0] for s in evaluated if s["step"] == summary["steps"]}
    return [f"  {prompt:10} before {first[prompt]!r:14} after {last[prompt]!r}" for prompt in first if prompt in last]


def first_held(lines: list[dict[str, Any]], reward: float) -> str:
    """Return the first step, and its time, at which the mean reward of five steps in a row reached a value."""
    for i in range(4, len(lines)):
        if sum(line["reward_mean"] for line in lines[i - 4 : i + 1]) / 5 >= reward:
            return f"step {lines[i]['step']}, {lines[i]['time'] - lines[0]['time']:.0f} s after the first step"
    return "no step"


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw reward, lag and entropy over steps."""
    steps = [line["step"] for line in lines]
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True)
    windows = [lines[max(0, i - 9) : i + 1] for i in range(len(lines))]
    smooth = [sum(line["reward_mean"] for line in window) / len(window) for window in windows]
    axes[0].plot(steps, [line["reward_mean"] for line in lines], color="0.8", label="step")
    axes[0].plot(steps, smooth, color="C0", label="mean of 10 steps")
    axes[0].set_ylabel("sampled reward")
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(loc="lower right")
    axes[1].plot(steps, [line["lag_max"] for line in lines], color="C1", drawstyle="steps-mid")
    axes[1].set_ylabel("lag (versions), max of step")
    axes[1].set_ylim(bottom=-0.1)
    axes[2].plot(steps, [line["entropy"] for line in lines], color="C2", linewidth=0.8)
    axes[2].set_ylabel("entropy (nats per token)")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
