"""The time of some steps in a timeline, as the spans of the trainer's rank 0 tell."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.ops.trace.files import Span
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
