"""Live peers: leases (P8), and one process per name, by boot id and sequence number (P3).

A lease runs on the packer's clock from the receipt of a heartbeat. That clock stands still while heartbeats wait to be
read. No decision reads a peer's clock.

A name belongs to one process, its holder. Another process with the same name waits as a visitor:

    the holder says that it is done, its connection is gone, or its lease ends     the visitor takes the name
    the holder is still alive one lease after the visitor's first heartbeat        the visitor is refused
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar, cast

from actors.ledger.clock import Clock
from schemas.messages import Heartbeat

HeartbeatT = TypeVar("HeartbeatT", bound=Heartbeat)
MAX_REMEMBERED = 10_000
"""Greatest number of remembered names, of refusals, and of sequence numbers."""


class Peers:
    """Live peers, one process per name, and visitors: processes that are answered but do not count.

    An identity is a peer's name and boot id. All times are on the packer's clock of leases (P8).

    Args:
        lease: seconds after the newest heartbeat for which a peer counts as alive.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._leases: Clock[str] = Clock(lease)
        self._visits: Clock[str] = Clock(lease)
        self._heartbeats: dict[str, Heartbeat] = {}
        self._by_type: dict[type[Heartbeat], dict[str, Heartbeat]] = {}
        self.changes: Counter[type[Heartbeat]] = Counter()
        """Number of heartbeats that counted and of peers that went, by kind: what follows from them may be kept."""
        self._boot_of: dict[str, str] = {}
        """Identity of the newest process of each name, dead names included, up to MAX_REMEMBERED."""
        self._refusals: dict[str, tuple[str, bool]] = {}
        """Refused processes: reason, and True if the name belongs to another process."""
        self._sequences: dict[str, int] = {}
        """Sequence number of the newest heartbeat of each process, dead peers included; older heartbeats are ignored
        (P3)."""
        self._waits: Clock[str] = Clock(lease)
        """Visitors waiting for a name, from the first heartbeat during the holder's life on."""
        self._waits_beside: dict[str, str] = {}
        """Holder of the contested name, by visitor."""
        self._contested: set[str] = set()
        """Holders of names with a visitor since the last `take_contested`."""

    @property
    def num_names(self) -> int:
        """Number of names with a remembered process, names of dead processes included."""
        return len(self._boot_of)

    def heard(self, now: float, identity: str, heartbeat: Heartbeat) -> tuple[bool, str | None]:
        """Record a heartbeat.

        Returns:
            True if the heartbeat counts, and the identity of a process that has lost its place by it, or None. That is
            an older process of the same name that is done, or the same process if its heartbeats have changed their
            kind.
        """
        if identity in self._refusals:
            self._visits.start(identity, now)
            return False, None
        if heartbeat.sequence <= self._sequences.get(identity, -1):  # an older heartbeat that came late
            return False, None
        self._sequences[identity] = heartbeat.sequence
        if len(self._sequences) > MAX_REMEMBERED:  # a dict keeps the order of insertion: the oldest goes
            del self._sequences[next(iter(self._sequences))]
        replaced = None
        holder = self._boot_of.get(heartbeat.name, identity)
        if holder != identity and holder in self._heartbeats:
            if self._heartbeats[holder].phase != "done":
                self._wait(now, identity, heartbeat.name, holder)
                return False, None
            replaced = holder
        elif identity in self._heartbeats and type(self._heartbeats[identity]) is not type(heartbeat):
            # work held as the old kind is free (P3)
            replaced = identity
        if replaced is not None:
            self.forget(replaced)
        self._visits.stop(identity)
        self._stop_waiting(identity)
        # popped first, so that names are in the order of their newest heartbeats and the oldest is forgotten
        self._boot_of.pop(heartbeat.name, None)
        self._boot_of[heartbeat.name] = identity
        oldest = next(iter(self._boot_of))
        if len(self._boot_of) > MAX_REMEMBERED and self._boot_of[oldest] not in self._heartbeats:
            del self._boot_of[oldest]
        self._leases.start(identity, now)
        self._heartbeats[identity] = heartbeat
        self._by_type.setdefault(type(heartbeat), {})[identity] = heartbeat
        self.changes[type(heartbeat)] += 1
        return True, replaced

    def renew(self, now: float, identity: str, heartbeat: Heartbeat, sequence: int) -> bool:
        """Renew the lease of a live peer by a heartbeat that repeats its newest one; False: the heartbeat is late."""
        if sequence <= self._sequences.get(identity, -1):
            return False
        self._sequences[identity] = sequence
        self._boot_of.pop(heartbeat.name, None)
        self._boot_of[heartbeat.name] = identity
        self._leases.start(identity, now)
        self._heartbeats[identity] = self._by_type[type(heartbeat)][identity] = heartbeat
        return True

    def _wait(self, now: float, identity: str, name: str, holder: str) -> None:
        """Let a visitor wait for the name of a living holder, and refuse the visitor if the holder outlives one lease.

        Heartbeats of a dead holder may be read late, for instance by a packer that was busy. So only a holder that
        sends heartbeats for a whole lease after the visitor's first heartbeat counts as alive.
        """
        self._visits.start(identity, now)
        self._contested.add(holder)
        if self._waits_beside.get(identity) != holder:  # a new holder, once a visitor too: wait a whole lease again
            self._waits_beside[identity] = holder
            self._waits.start(identity, now)
        # the start of the holder's lease is the time of its newest heartbeat
        if self._leases.since(holder) >= self._waits.since(identity) + self._lease:
            heartbeat = self._heartbeats[holder]
            at = f", {heartbeat.metrics_url}" if heartbeat.metrics_url else ""
            self.refuse(
                identity,
                f"another process named {name} is alive (boot {heartbeat.boot_id}{at}); give this one another --name",
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
        """Refuse a process for good; heartbeats are answered with the reason.

        Beyond 10 000 refusals the oldest is forgotten.
        """
        self._refusals[identity] = reason, name_taken
        self._stop_waiting(identity)
        if len(self._refusals) > MAX_REMEMBERED:
            del self._refusals[next(iter(self._refusals))]
        self.forget(identity)

    def refusal_of(self, identity: str) -> str:
        """Return the reason for which a process is refused; empty: not refused."""
        return self._refusals.get(identity, ("", False))[0]

    def is_refused_for_name(self, identity: str) -> bool:
        """Return whether a process is refused because another living process has the name."""
        return self._refusals.get(identity, ("", False))[1]

    def is_visitor(self, identity: str) -> bool:
        """Return whether a process without a lease has sent a heartbeat within the last lease."""
        return identity in self._visits

    def expire(self, now: float) -> list[str]:
        """Remove and return the peers with an ended lease, and the visitors without a heartbeat for a lease."""
        visitors, gone = self._visits.late(now), self._leases.late(now)
        for identity in visitors:
            self._visits.stop(identity)
            self._stop_waiting(identity)
        for identity in gone:
            self.forget(identity)
        return gone + visitors

    def heartbeat_of(self, identity: str) -> Heartbeat | None:
        """Return the newest heartbeat of a live peer; None for any other process."""
        return self._heartbeats.get(identity)

    def all(self, heartbeat_type: type[HeartbeatT]) -> Mapping[str, HeartbeatT]:
        """Return the newest heartbeats of the live peers of a kind (`Heartbeat`: of all kinds), by identity."""
        return cast(
            Mapping[str, HeartbeatT],
            self._heartbeats if heartbeat_type is Heartbeat else self._by_type.get(heartbeat_type, {}),
        )

    @property
    def by_type(self) -> dict[type[Heartbeat], Mapping[str, Heartbeat]]:
        """Newest heartbeats of the live peers of each kind that has any, by identity."""
        return {kind: found for kind, found in self._by_type.items() if found}

    @property
    def num_live(self) -> int:
        """Number of live peers."""
        return len(self._heartbeats)

    def identities(self) -> list[str]:
        """Return the identities of all live peers."""
        return list(self._heartbeats)

    def forget(self, identity: str) -> None:
        """End a peer's lease now; name and sequence number stay known."""
        self._leases.stop(identity)
        heartbeat = self._heartbeats.pop(identity, None)
        if heartbeat is not None:
            del self._by_type[type(heartbeat)][identity]
            self.changes[type(heartbeat)] += 1
