"""The time of some steps in a timeline, as the spans of the trainer's rank 0 tell, and the spans of this time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.ops.trace.files import Recorded, Span, SpanIndex
from actors.telemetry.spans import FOLDER
from schemas.errors import ConfigError

TRAINER = "trainer-0"
STEP, BATCH = "step", "wait for batch"
"""Names of the trainer's spans: a step, and the wait before it."""


@dataclass(frozen=True)
class Window:
    """Time from the wait for the first step's batch to the end of the last step, in seconds since 1970."""

    start: float
    end: float
    steps: Sequence[Span]
    """Spans of the steps, in order; a step that was trained again counts once, with its last time."""

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.start

    @property
    def step_of(self) -> dict[int, Span]:
        """Step that trained each group, by ordinal."""
        return {ordinal: span for span in self.steps for ordinal in span.args.get("ordinals", ())}


def index_of(output: Path) -> SpanIndex:
    """Return an index of the spans in the output_dir of a run, for `steps_of`."""
    return SpanIndex(output / FOLDER, TRAINER, (STEP, BATCH))


def steps_of(index: SpanIndex, first: int, last: int) -> tuple[Recorded, Window]:
    """Return the spans that belong in the trace file of the steps `first` to `last`, and the time of these steps.

    Raises:
        ConfigError: as `window_of`.
    """
    window = window_of(index.marked(), first, last)
    recorded = index.within(window.start, window.end, window.step_of.keys())
    # again, of the spans that are returned: arrows end at one of them
    return recorded, window_of(recorded.spans, first, last)


def window_of(spans: Sequence[Span], first: int, last: int) -> Window:
    """Return the time of the steps `first` to `last`.

    Raises:
        ConfigError: the timeline does not have all of them.
    """
    newest = {span.args["step"]: span for span in sorted(_of(spans, STEP), key=lambda span: span.start)}
    missing = [step for step in range(first, last + 1) if step not in newest]
    if missing:
        known = f"has steps {min(newest)} to {max(newest)}" if newest else "has no step"
        raise ConfigError(
            f"--step {first}..{last}: step {missing[0]} is not in the timeline, which {known}; the newest spans are "
            "kept (telemetry.events_bytes, 0 for none)"
        )
    steps = [newest[step] for step in range(first, last + 1)]
    # of a step that was trained again, the wait before its last time
    waits = [span for span in _of(spans, BATCH) if span.args["step"] == first and span.start <= steps[0].start]
    start = max((span.start for span in waits), default=steps[0].start)
    return Window(start, max(span.end for span in steps), steps)


def _of(spans: Sequence[Span], name: str) -> list[Span]:
    return [one for one in spans if one.actor == TRAINER and one.name == name and isinstance(one.args.get("step"), int)]
