"""Totals of the engines' work, from heartbeats: every token counts once, however often and in whatever order reported.

An engine reports all tokens generated since its start, so only the increase over earlier heartbeats of the same boot
counts. The last report of each boot is stored in the ledger too, so a restarted packer continues from there. The newest
REMEMBERED boots are kept after the end of their process; tokens of older boots are in the run's total already.
"""

from collections import deque
from itertools import islice

from actors.telemetry.totals import NUM_RECENT_VALUES, median_of
from schemas.messages import InferenceHeartbeat, PolicyVersion

REMEMBERED = 1000
"""Boots kept in addition to the live ones: a process whose lease has ended may send heartbeats again."""


class EngineTotals:
    """Tokens and weight updates of all engines of a run.

    Args:
        tokens: last reported tokens by boot, ordered by the time of the report; stored by the caller.
    """

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens
        self._updates: dict[str, tuple[PolicyVersion | None, dict[str, float]]] = {}
        """Newest weight update of each boot, which every heartbeat repeats."""
        self._seconds: dict[str, deque[float]] = {}
        """Seconds of the newest updates, by part of an update."""

    def heard(self, identity: str, heartbeat: InferenceHeartbeat, num_live: int) -> int:
        """Record a heartbeat; return the number of tokens not reported by this boot before."""
        # pop and insert again: the dict stays in the order of the newest report
        known = self._tokens.pop(identity, 0)
        self._tokens[identity] = max(known, heartbeat.generated_tokens)
        update = (heartbeat.policy, heartbeat.update_seconds)
        if heartbeat.update_seconds and self._updates.get(identity) != update:
            self._updates[identity] = update
            for part, seconds in heartbeat.update_seconds.items():
                self._seconds.setdefault(part, deque(maxlen=NUM_RECENT_VALUES)).append(seconds)
        # the longest unheard boots go first, so no live one: a live boot is heard again and again
        too_many = len(self._tokens) - num_live - REMEMBERED
        for gone in list(islice(self._tokens, max(0, too_many))):
            del self._tokens[gone]
            self._updates.pop(gone, None)
        return self._tokens[identity] - known

    def recent_median(self, part: str) -> float | None:
        """Return the median seconds of a part of the newest NUM_RECENT_VALUES weight updates; None without any."""
        return median_of(self._seconds.get(part, ()))
