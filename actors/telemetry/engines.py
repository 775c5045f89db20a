"""What inference actors have said of their work, counted once each, however often and in whatever order it is said.

An engine says how many tokens it has generated since its start, so what counts is by how much a beat is beyond what the
same boot has said before. That is kept for each boot, in the ledger too: a packer that starts again goes on from it. A
boot that is gone is forgotten after REMEMBERED newer ones; its tokens are in the run's total long since.
"""

from collections import deque
from itertools import islice

from actors.telemetry.totals import NUM_RECENT_VALUES, median_of
from schemas.messages import InferenceBeat, Policy

REMEMBERED = 1000
"""Boots that are kept in mind besides the live ones: a lease may have ended and the process beat again."""


class EngineTotals:
    """Tokens and weight updates of all engines of a run.

    Args:
        tokens: by boot, what it has said last, the one heard last at the end; the caller stores it.
    """

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens
        self._updates: dict[str, tuple[Policy | None, dict[str, float]]] = {}
        self._seconds: dict[str, deque[float]] = {}

    def heard(self, identity: str, beat: InferenceBeat, num_live: int) -> int:
        """Take note of a beat; returns how many tokens it tells of that no beat of this boot has told before."""
        known = self._tokens.pop(identity, 0)
        self._tokens[identity] = max(known, beat.generated_tokens)
        update = (beat.policy, beat.update_seconds)
        if beat.update_seconds and self._updates.get(identity) != update:
            self._updates[identity] = update
            for part, seconds in beat.update_seconds.items():
                self._seconds.setdefault(part, deque(maxlen=NUM_RECENT_VALUES)).append(seconds)
        self._forget(len(self._tokens) - num_live - REMEMBERED)
        return self._tokens[identity] - known

    def recent_median(self, part: str) -> float | None:
        """Seconds of one part of a weight update, of the newest NUM_RECENT_VALUES updates."""
        return median_of(self._seconds.get(part, ()))

    def _forget(self, num: int) -> None:
        """Those heard longest ago go first, so no live one does."""
        for identity in list(islice(self._tokens, max(0, num))):
            del self._tokens[identity]
            self._updates.pop(identity, None)
