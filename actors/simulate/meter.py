"""What a simulation measures: a line per step, and counts of work, with the time of the first step as the start."""

from dataclasses import dataclass, field


@dataclass
class StepLine:
    """Figures of a trained step, with the names of metrics.jsonl."""

    step: int
    time: float
    """Time at which the step was published."""
    seconds_wait_batch: float
    seconds_compute: float
    """Seconds of forward, backward and optimizer, slowed down by others on the same cores."""
    lag_mean: float
    lag_max: int
    tokens: int
    """Tokens of the step's completions."""


@dataclass
class Meter:
    """Collector of all figures."""

    lines: list[StepLine] = field(default_factory=list)
    lost_tokens: int = 0
    """Tokens of completions given up: their engine or rollout actor died, or another copy was faster."""
    filtered_tokens: int = 0
    """Tokens of groups that a group filter has rejected."""
    copied_tokens: int = 0
    """Tokens of scored groups that came second, or too late."""
    num_deaths: int = 0
    _wait: float = 0.0
    _began: float = 0.0
    _computed: float = 0.0

    def begin_step(self, step: int, waited: float, now: float) -> None:
        """Note that the batch of a step is there, after some seconds of waiting."""
        self._wait, self._began = waited, now

    def computed(self, now: float) -> None:
        """Note that the step under way has been computed."""
        self._computed = now - self._began

    def end_step(self, step: int, now: float, lags: list[int], tokens: int) -> None:
        """Add the line of a step that is published. A step that is trained again counts once, at its last time."""
        while self.lines and self.lines[-1].step >= step:
            self.lines.pop()
        mean = sum(lags) / len(lags)
        self.lines.append(StepLine(step, now, self._wait, self._computed, mean, max(lags), tokens))
