"""Work of engines and reward actors between two steps, from heartbeats; `actors simulate --like RUN` reads it.

A process reports all its work since its start, so only the increase over its last heartbeat counts. The first
heartbeat heard of a process counts from zero: a restarted packer counts the work of the steps before once more, in one
line.
"""

from schemas.messages import Heartbeat, InferenceHeartbeat, RewardHeartbeat

MAX_REMEMBERED = 10_000
"""Largest number of processes whose last report is remembered; the longest unheard are forgotten first."""
COLUMNS = ("engine_tokens", "engine_busy_seconds", "reward_groups", "reward_busy_seconds")
"""Columns of metrics.jsonl: tokens sampled and seconds of work of all engines, groups and seconds of reward actors."""


class Work:
    """Counts of the work since the last step, over all processes."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        """Last reported amount and seconds of each process, ordered by the time of the report."""
        self.since_step = dict.fromkeys(COLUMNS, 0.0)
        """Work since the last step, by column."""

    def heard(self, identity: str, heartbeat: Heartbeat) -> None:
        """Add what a heartbeat reports beyond the last one of its process."""
        if isinstance(heartbeat, InferenceHeartbeat):
            names, reported = COLUMNS[:2], (float(heartbeat.generated_tokens), heartbeat.busy_seconds)
        elif isinstance(heartbeat, RewardHeartbeat):
            names, reported = COLUMNS[2:], (float(heartbeat.scored), heartbeat.busy_seconds)
        else:
            return
        before = self._last.pop(identity, (0.0, 0.0))
        # a heartbeat may come late, behind a newer one
        self._last[identity] = newest = (max(before[0], reported[0]), max(before[1], reported[1]))
        for name, now, then in zip(names, newest, before, strict=True):
            self.since_step[name] += now - then
        if len(self._last) > MAX_REMEMBERED:
            del self._last[next(iter(self._last))]

    def end_step(self) -> None:
        """Count from zero again, once the line of a step is written."""
        self.since_step = dict.fromkeys(COLUMNS, 0.0)
