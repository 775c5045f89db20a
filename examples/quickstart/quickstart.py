"""The quickstart: make a tiny model, train it with `actors up`, report the result.

    python examples/quickstart/quickstart.py [--seed N] [--output DIR] [--resume] [key=value ...]

The output directory (default outputs/quickstart) has all files: `model/`, `report.html` with `report-pictures/`, and
the files of the run (docs/reference/files.md). Without `--resume` the script removes the files of an earlier quickstart
in this directory and starts from the beginning.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from common import HERE, arguments_of, records, table, train, training_lines, write_page


def main() -> int:
    """Run the quickstart; return 0. A failed command exits with its own code."""
    parser = arguments_of(__doc__, "outputs/quickstart")
    parser.add_argument("--config", type=Path, default=HERE / "run.yaml")
    arguments = parser.parse_args()
    started = time.monotonic()
    output = arguments.output.resolve()
    train(arguments, output, arguments.config, "model.py")
    report(output)
    print(f"the quickstart took {time.monotonic() - started:.0f} s")
    return 0


def report(output: Path, evaluated: str = "greedy") -> None:
    """Print the result, and write the page about the run.

    Args:
        output: folder of the run.
        evaluated: how the completions of evaluations are drawn, in a word.
    """
    summary, lines = json.loads((output / "summary.json").read_text()), records(output / "metrics.jsonl")
    print(describe(summary, lines, records(output / "samples.jsonl"), evaluated))
    write_page(output)


def describe(
    summary: dict[str, Any], lines: list[dict[str, Any]], samples: list[dict[str, Any]], evaluated: str
) -> str:
    """Return the result as text: a table, and completions before and after training."""
    ((label, before),), after = summary["eval_before"].items(), summary["eval_after"]
    rows = [
        (f"held-out exact match ({evaluated})", f"{before['exact_match']:.3f}", f"{after[label]['exact_match']:.3f}"),
        (f"held-out reward ({evaluated})", f"{before['mean_reward']:.3f}", f"{after[label]['mean_reward']:.3f}"),
        ("sampled reward (5 steps)", f"{summary['reward_first']:.3f}", f"{summary['reward_last']:.3f}"),
    ]
    text = [*table(rows), "", *training_lines(summary, lines), "", *_completions(summary, samples)]
    return "\n".join(text)


def _completions(summary: dict[str, Any], samples: list[dict[str, Any]]) -> list[str]:
    evaluated = [sample for sample in samples if sample["purpose"] == "eval"]
    first = {_name(s): s["completions"][0] for s in evaluated if s["step"] == 0}
    last = {_name(s): s["completions"][0] for s in evaluated if s["step"] == summary["steps"]}
    return [f"  {name:10} before {first[name]!r:14} after {last[name]!r}" for name in first if name in last]


def _name(sample: dict[str, Any]) -> str:
    """Return the prompt of a sample, of a picture the answer."""
    prompt = sample["prompt"]
    return prompt if isinstance(prompt, str) else str(sample["columns"]["answer"])


if __name__ == "__main__":
    sys.exit(main())
