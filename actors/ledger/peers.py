"""Live peers: leases (P8), and one process per name, by boot id and sequence number (P3).

A lease runs on the packer's clock from the receipt of a beat. That clock stands still while beats wait to be read. No
decision reads a peer's clock.

A name belongs to one process, its holder. Another process with the same name waits as a visitor:

    the holder says that it is done, its connection is gone, or its lease ends     the visitor takes the name
    the holder still beats one lease after the visitor's first beat                the visitor is refused
"""

from collections.abc import Mapping
from typing import TypeVar, cast

from actors.ledger.clock import Clock
from schemas.messages import Beat

BeatT = TypeVar("BeatT", bound=Beat)
MAX_REMEMBERED = 10_000
"""Greatest number of remembered names, of refusals, and of sequence numbers."""


class Peers:
    """Live peers, one process per name, and visitors: processes that are answered but do not count.

    An identity is a peer's name and boot id. All times are on the packer's clock of leases (P8).

    Args:
        lease: seconds after the newest beat for which a peer counts as alive.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._leases: Clock[str] = Clock(lease)
        self._visits: Clock[str] = Clock(lease)
        self._beats: dict[str, Beat] = {}
        self._by_type: dict[type[Beat], dict[str, Beat]] = {}
        self._boot_of: dict[str, str] = {}
        """Identity of the newest process of each name, dead names included, up to MAX_REMEMBERED."""
        self._refusals: dict[str, tuple[str, bool]] = {}
        """Refused processes: reason, and True if the name belongs to another process."""
        self._sequences: dict[str, int] = {}
        """Sequence number of the newest beat of each process, dead peers included; older beats are ignored (P3)."""
        self._waits: Clock[str] = Clock(lease)
        """Visitors waiting for a name, from the first beat during the holder's life on."""
        self._waits_beside: dict[str, str] = {}
        """Holder of the contested name, by visitor."""
        self._contested: set[str] = set()
        """Holders of names with a visitor since the last `take_contested`."""

    @property
    def num_names(self) -> int:
        """Number of names with a remembered process, names of dead processes included."""
        return len(self._boot_of)

    def heard(self, now: float, identity: str, beat: Beat) -> tuple[bool, str | None]:
        """Record a beat.

        Returns:
            True if the beat counts, and the identity of a process that has lost its place by it, or None. That is an
            older process of the same name that is done, or the same process if its beats have changed their kind.
        """
        if identity in self._refusals:
            self._visits.start(identity, now)
            return False, None
        if beat.sequence <= self._sequences.get(identity, -1):  # an older beat that came late
            return False, None
        self._sequences[identity] = beat.sequence
        if len(self._sequences) > MAX_REMEMBERED:  # a dict keeps the order of insertion: the oldest goes
            del self._sequences[next(iter(self._sequences))]
        replaced = None
        holder = self._boot_of.get(beat.name, identity)
        if holder != identity and holder in self._beats:
            if self._beats[holder].phase != "done":
                self._wait(now, identity, beat.name, holder)
                return False, None
            replaced = holder
        elif identity in self._beats and type(self._beats[identity]) is not type(beat):
            # work held as the old kind is free (P3)
            replaced = identity
        if replaced is not None:
            self.forget(replaced)
        self._visits.stop(identity)
        self._stop_waiting(identity)
        self._note_boot(beat.name, identity)
        self._leases.start(identity, now)
        self._beats[identity] = beat
        self._by_type.setdefault(type(beat), {})[identity] = beat
        return True, replaced

    def _wait(self, now: float, identity: str, name: str, holder: str) -> None:
        """Let a visitor wait for the name of a living holder, and refuse the visitor if the holder outlives one lease.

        Beats of a dead holder may be read late, for instance by a packer that was busy. So only a holder that beats for
        a whole lease after the visitor's first beat counts as alive.
        """
        self._visits.start(identity, now)
        self._contested.add(holder)
        if self._waits_beside.get(identity) != holder:  # a new holder, once a visitor too: wait a whole lease again
            self._waits_beside[identity] = holder
            self._waits.start(identity, now)
        # the start of the holder's lease is the time of its newest beat
        if self._leases.since(holder) >= self._waits.since(identity) + self._lease:
            beat = self._beats[holder]
            at = f", {beat.metrics_url}" if beat.metrics_url else ""
            self.refuse(
                identity,
                f"another process named {name} is alive (boot {beat.boot_id}{at}); give this one another --name",
                name_taken=True,
            )

    def _stop_waiting(self, identity: str) -> None:
        self._waits.stop(identity)
        self._waits_beside.pop(identity, None)

    def take_contested(self) -> set[str]:
        """Return holders of contested names since the last call; the caller checks the holders' connections."""
        contested, self._contested = self._contested, set()
        return contested

    def refuse(self, identity: str, reason: str = "", *, name_taken: bool = False) -> None:
        """Refuse a process for good; beats are answered with the reason.

        Beyond 10 000 refusals the oldest is forgotten.
        """
        self._refusals[identity] = reason, name_taken
        self._stop_waiting(identity)
        if len(self._refusals) > MAX_REMEMBERED:
            del self._refusals[next(iter(self._refusals))]
        self.forget(identity)

    def _note_boot(self, name: str, identity: str) -> None:
        """Record the process of a name and move the name to the end: names are kept in the order of newest beats."""
        self._boot_of.pop(name, None)
        self._boot_of[name] = identity
        oldest = next(iter(self._boot_of))
        if len(self._boot_of) > MAX_REMEMBERED and self._boot_of[oldest] not in self._beats:
            del self._boot_of[oldest]

    def refusal_of(self, identity: str) -> str:
        """Return the reason for which a process is refused; empty: not refused."""
        return self._refusals.get(identity, ("", False))[0]

    def is_refused_for_name(self, identity: str) -> bool:
        """Return whether a process is refused because another living process has the name."""
        return self._refusals.get(identity, ("", False))[1]

    def is_visitor(self, identity: str) -> bool:
        """Return whether a process without a lease has sent a beat within the last lease."""
        return identity in self._visits

    def expire(self, now: float) -> list[str]:
        """Remove and return the peers with an ended lease, and the visitors without a beat for a lease."""
        visitors, gone = self._visits.late(now), self._leases.late(now)
        for identity in visitors:
            self._visits.stop(identity)
            self._stop_waiting(identity)
        for identity in gone:
            self.forget(identity)
        return gone + visitors

    def beat_of(self, identity: str) -> Beat | None:
        """Return the newest beat of a live peer; None for any other process."""
        return self._beats.get(identity)

    def all(self, beat_type: type[BeatT]) -> Mapping[str, BeatT]:
        """Return the newest beats of the live peers of a kind (`Beat`: of all kinds), by identity."""
        return cast(Mapping[str, BeatT], self._beats if beat_type is Beat else self._by_type.get(beat_type, {}))

    def identities(self) -> list[str]:
        """Return the identities of all live peers."""
        return list(self._beats)

    def forget(self, identity: str) -> None:
        """End a peer's lease now; name and sequence number stay known."""
        self._leases.stop(identity)
        beat = self._beats.pop(identity, None)
        if beat is not None:
            del self._by_type[type(beat)][identity]
