"""Cost of what timelines and pages about tokens need, as a share of a training step of the quickstart.

A run tells how many spans its actors record in a step, and how long a step takes; the CPU time of a span, made and
written, is measured in this process. The values of tokens are recorded by a real learner on batches of the quickstart's
size, with one group of a step; the CPU time of keeping, copying and writing them is compared with that of the learner's
step. The limit of both is 1 %, of each actor and of the learner.

    python -m benchmarks.recording [--steps 60] [--model DIR] [--json PATH]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.learner.learner import TorchLearner
from actors.learner.token_details import TokenDetailsWriter
from actors.ops.trace.window import index_of, steps_of
from actors.telemetry import spans
from benchmarks.end_to_end import GROUP_SIZE, GROUPS, QUICKSTART
from benchmarks.machine import publish, scratch
from benchmarks.trainer_cases import config_of, step_batch

LIMIT = 0.01
"""Largest share of a step."""
FIRST_STEP = 6
"""First step that counts: the machine is warm then."""
ROUNDS, SPANS = 5, 10_000
VOCABULARY, PROMPT_TOKENS, COMPLETION_TOKENS, ROW_TOKENS = 30, 9, 7, 2048


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", type=Path, help="folder of the quickstart's model, which is made by default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with scratch() as folder:
        model = arguments.model or folder / "model"
        if arguments.model is None:
            subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        rows = [*_spans(folder, model, arguments.steps), _tokens(folder, model, arguments.steps)]
    publish({"recording": rows, "limit": LIMIT}, rows, arguments.json)


def _row(of: str, number: float, cost: float, seconds: float) -> dict[str, Any]:
    """Return a row of the table.

    Args:
        of: what is recorded, and by which process.
        number: spans, or groups, in a step.
        cost: CPU seconds of recording in a step.
        seconds: length of a step.
    """
    return {
        "of": of,
        "in_a_step": round(number, 1),
        "cpu_ms": round(1e3 * cost, 3),
        "step_ms": round(1e3 * seconds, 1),
        "share": round(cost / seconds, 5),
        "within_limit": cost / seconds <= LIMIT,
    }


def _spans(folder: Path, model: Path, steps: int) -> list[dict[str, Any]]:
    """Run the quickstart; return a row for each of its actors."""
    output = folder / "run"
    overrides = [f"model.path={model}", f"output_dir={output}", f"trainer.max_steps={steps}", "eval.num_prompts=0"]
    command = [sys.executable, "-m", "actors", "up", str(QUICKSTART / "run.yaml"), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    recorded, window = steps_of(index_of(output), FIRST_STEP, steps)
    counted = len(window.steps)
    found = Counter(span.actor for span in recorded.spans if window.start <= span.start < window.end)
    cost = statistics.median(_seconds_of_a_span(folder / "spans") for _ in range(ROUNDS))
    seconds = window.seconds / counted
    return [_row(f"spans of {actor}", n / counted, cost * n / counted, seconds) for actor, n in sorted(found.items())]


def _seconds_of_a_span(folder: Path) -> float:
    """Return the CPU seconds of a span, of the thread that makes it and of the one that writes it."""
    start = time.process_time()
    spans.start(spans.SpanRecorder(folder, "benchmark-0", 1 << 30, lambda: True))
    for step in range(SPANS):
        with spans.span("forward and backward", step=step):
            pass
    spans.stop()
    return (time.process_time() - start) / SPANS


class _TimedDetails(TokenDetailsWriter):
    """Writer of token details that sums up its CPU seconds, of both threads."""

    seconds = 0.0

    def record(self, *given: Any) -> None:
        """Keep the arrays of a micro-batch."""
        self._timed(super().record, *given)

    def write(self, *given: Any) -> None:
        """Copy what was kept, and have it written."""
        self._timed(super().write, *given)

    def _save(self, *given: Any) -> None:
        self._timed(super()._save, *given)

    def _timed(self, work: Callable[..., None], *given: Any) -> None:
        start = time.thread_time()
        work(*given)
        self.seconds += time.thread_time() - start


def _tokens(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Train on random groups of the quickstart's size; return the row of the values of tokens."""
    config = config_of(model, ROW_TOKENS, {}, mismatch={"stop": None, "warn": 99.0}, loss={"type": "surogate"})
    learner = TorchLearner(config)
    learner.details = details = _TimedDetails(folder, 1, "surogate")
    lengths = [(PROMPT_TOKENS, [COMPLETION_TOKENS] * GROUP_SIZE)] * GROUPS
    costs, lasted = [], []
    for step in range(1, steps + 1):
        batch = step_batch(lengths, VOCABULARY, ROW_TOKENS, step)
        details.seconds, start = 0.0, time.process_time()
        learner.step(batch)
        lasted.append(time.process_time() - start)
        costs.append(details.seconds)
    details.close()
    return _row("tokens of a group, by the learner", 1, statistics.median(costs), statistics.median(lasted))


if __name__ == "__main__":
    main()
