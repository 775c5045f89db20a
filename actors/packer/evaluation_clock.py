"""Progress of the running evaluation with an estimate of its time left, for screens."""

from typing import Any

from actors.ledger import Machine


class EvaluationClock:
    """Count of the running evaluation's prompts over time.

    The time left follows from the mean pace since the first look at this evaluation: prompts are sampled as many at a
    time as engines have room for, so that the pace is about even until the last ones.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._total = self._done = self._done_before = 0
        self._started = self._now = 0.0

    def look(self, now: float, machine: Machine) -> None:
        """Count the prompts that are done, on a monotonic clock in seconds; a new evaluation starts a new count."""
        policy, num_open = machine.evaluations.policy, len(machine.evaluations.open)
        version = None if policy is None or not num_open else policy.version
        if version != self._version:
            self._version, self._started = version, now
            # settled ones too: a packer that starts again finds the evaluation half done
            self._total = sum(group.ordinal < 0 and group.policy == policy for group in machine.groups.rows.values())
            self._done_before = self._total - num_open
        # dropped prompts are done too
        self._now, self._done = now, max(0, self._total - num_open)

    @property
    def values(self) -> dict[str, Any] | None:
        """Version, prompts done and total, and seconds left (None: no estimate yet). None between evaluations."""
        if self._version is None:
            return None
        new, left = self._done - self._done_before, self._total - self._done
        seconds = (self._now - self._started) / new * left if new > 0 else None
        return {
            "version": self._version,
            "done": self._done,
            "total": self._total,
            "seconds_left": None if seconds is None else round(seconds, 1),
        }
