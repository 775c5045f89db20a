"""Turns of the trainer and the engines on devices that they share (`up.colocate: turns`).

    nobody ──trainer wants, no engine holds──▶ trainer ──it wants no more, no rank holds──▶ nobody
    nobody ──trainer wants nothing, no rank holds──▶ engines ──trainer wants──▶ nobody

The trainer wants the devices while it loads, and while the batch of its next step is composed. Who has no turn gives
the memory back as soon as it can, and says so. A peer whose lease has ended is asked for nothing, so it loses its turn.

Each order to rest has a number. An engine counts as resting only when it names the newest one: an engine that is slow
could otherwise act on an order from before. A rank needs no number, since its turn lasts while it wants something.
"""

from collections.abc import Iterable
from typing import Literal

from schemas.messages import InferenceHeartbeat, TrainerHeartbeat

Holder = Literal["", "trainer", "engines"]
"""Who has the turn; empty: nobody, while the last holder gives the memory back."""

TERM_BITS = 32
"""Bits for the orders of a packer's term, so that numbers of a later term are larger."""


class Turns:
    """Turns of a run.

    Args:
        enabled: False: both may use the devices at all times.
        term: number of the packer's start.
        first_at: time of the first turn, on the clock of leases. Peers from before a restart of the packer have a lease
            to say what they hold.
    """

    def __init__(self, enabled: bool, term: int, first_at: float) -> None:
        self.enabled, self.first_at = enabled, first_at
        self.holder: Holder = ""
        self.number = term << TERM_BITS if enabled else 0
        """Number of the newest order to rest; 0 without turns."""

    def update(
        self, now: float, ranks: Iterable[TrainerHeartbeat], engines: Iterable[InferenceHeartbeat], composed: bool
    ) -> bool:
        """Follow the live peers; return whether the holder has changed.

        Args:
            now: time on the clock of leases.
            ranks, engines: newest heartbeats of the live ones.
            composed: whether the next step of a live rank is composed.
        """
        if not self.enabled:
            return False
        uses = {rank.device for rank in ranks}
        wanted = composed or bool(uses - {"free"})
        engines_rest = all(engine.turn == self.number and not engine.holds_device for engine in engines)
        before = self.holder
        if (before == "trainer" and not wanted) or (before == "engines" and wanted):
            self._change("")
        elif before == "" and now >= self.first_at:
            if wanted and engines_rest:
                self._change("trainer")
            elif not wanted:
                self._change("engines")
        return self.holder != before

    def may_use(self, who: Holder) -> bool:
        """Return whether the trainer, or the engines, may use the devices now."""
        return not self.enabled or self.holder == who

    def _change(self, holder: Holder) -> None:
        self.holder = holder
        if holder == "":
            self.number += 1
