"""The quickstart with turns: train a tiny model in a game of several turns, and in a task with a tool.

    python examples/quickstart/turns.py [--task NAME] [--seed N] [--output DIR] [--resume] [key=value ...]

Each task has a folder in the output directory (default outputs/quickstart-turns), with the files that the quickstart
has. Without `--task` both are trained, one after the other.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import HERE, arguments_of, records, table, train, training_lines, write_page

TASKS = ("find_number", "calculator")
STEPS = 5
"""Steps at the start and at the end of training whose trajectories are counted."""


def main() -> int:
    """Train and report each task; return 0. A failed command exits with its own code."""
    parser = arguments_of(__doc__, "outputs/quickstart-turns")
    parser.add_argument("--task", choices=TASKS)
    arguments = parser.parse_args()
    for task in [arguments.task] if arguments.task else TASKS:
        started, output = time.monotonic(), (arguments.output / task).resolve()
        print(f"{task}\n")
        train(arguments, output, HERE / f"{task}.yaml", "turns_model.py", "--task", task)
        report(output)
        print(f"{task} took {time.monotonic() - started:.0f} s\n")
    return 0


def report(output: Path) -> None:
    """Print the result, and write the page about the run."""
    lines = records(output / "metrics.jsonl")
    print(describe(json.loads((output / "summary.json").read_text()), lines, records(output / "samples.jsonl")))
    write_page(output)


def describe(summary: dict[str, Any], lines: list[dict[str, Any]], samples: list[dict[str, Any]]) -> str:
    """Return the result as text: a table, and a conversation before and after training."""
    ((label, before),), after = summary["eval_before"].items(), summary["eval_after"]
    rows = [("held-out success", f"{before['mean_reward']:.3f}", f"{after[label]['mean_reward']:.3f}")]
    trained = [sample for sample in samples if sample["purpose"] == "train"]
    first = figures([sample for sample in trained if sample["step"] <= STEPS])
    last = figures([sample for sample in trained if sample["step"] > summary["steps"] - STEPS])
    rows += [(f"{name} ({STEPS} steps)", first.get(name, "0%"), last.get(name, "0%")) for name in {**first, **last}]
    ledger = summary["ledger"]
    lost = ledger["issued"] - ledger["trained"] - sum(ledger["dropped"].values()) - ledger["in_flight"]
    return "\n".join(
        [
            *table(rows),
            "",
            *training_lines(summary, lines),
            f"lost {lost}, trained twice {ledger['trained_twice']}",
            "",
            *_conversation("before", samples, 0),
            *_conversation("after", samples, summary["steps"]),
        ]
    )


def figures(samples: list[dict[str, Any]]) -> dict[str, str]:
    """Return figures of trajectories by name: means, and the share of each reason to stop."""
    stops = Counter(stop for sample in samples for stop in sample["stop_conditions"])
    shares = {f"stopped by {stop}": f"{count / stops.total():.0%}" for stop, count in sorted(stops.items())}
    return {
        "sampled success": f"{_mean(samples, 'reward'):.3f}",
        "turns": f"{_mean(samples, 'turns'):.2f}",
        "tool calls": f"{_mean(samples, 'tool_calls'):.2f}",
        "failed tool calls": f"{_mean(samples, 'tool_failures'):.3f}",
    } | shares


def _mean(samples: list[dict[str, Any]], name: str) -> float:
    values = [value for sample in samples for value in sample[name] if value is not None]
    return sum(values) / max(1, len(values))


def _conversation(when: str, samples: list[dict[str, Any]], step: int) -> list[str]:
    """Return the first evaluated conversation of a version as a line."""
    for sample in samples:
        if sample["purpose"] == "eval" and sample["step"] == step:
            return [f"  {when}: {' | '.join(map(_said, sample['messages'][0]))}"]
    return []


def _said(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return " ".join([message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in calls)]).strip()


if __name__ == "__main__":
    sys.exit(main())
