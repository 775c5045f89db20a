"""Who lives: leases, boot ids, sequence numbers (P3, P8).

A lease runs on the packer's clock from the receipt of a beat. No decision reads a peer's clock.
"""

from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from schemas.messages import Beat

BeatT = TypeVar("BeatT", bound=Beat)
MAX_REMEMBERED_BOOTS = 10_000


@dataclass
class Peer:
    """A process that has beaten within its lease."""

    identity: str
    beat: Beat
    lease_until: float


class Peers:
    """The live peers, one boot per name."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._live: dict[str, Peer] = {}
        self._boot_of: dict[str, str] = {}
        self._superseded: deque[str] = deque(maxlen=MAX_REMEMBERED_BOOTS)

    def heard(self, now: float, identity: str, beat: Beat) -> tuple[bool, str | None]:
        """Take note of a beat.

        Returns:
            (whether the beat counts, identity of an older process of the same name that this one replaces).
        """
        if identity in self._superseded:
            return False, None
        known = self._live.get(identity)
        if known is not None and beat.sequence <= known.beat.sequence:
            return False, None
        replaced = self._boot_of.get(beat.name)
        if replaced is not None and replaced != identity:
            self._superseded.append(replaced)
            self._live.pop(replaced, None)
        else:
            replaced = None
        self._boot_of[beat.name] = identity
        self._live[identity] = Peer(identity, beat, now + self._lease)
        return True, replaced

    def is_superseded(self, identity: str) -> bool:
        """Whether a newer process of the same name has taken its place."""
        return identity in self._superseded

    def expire(self, now: float) -> list[str]:
        """Remove and return the peers whose lease has ended."""
        gone = [identity for identity, peer in self._live.items() if peer.lease_until <= now]
        for identity in gone:
            del self._live[identity]
        return gone

    def next_expiry(self) -> float | None:
        """When the first lease ends."""
        return min((peer.lease_until for peer in self._live.values()), default=None)

    def beat_of(self, identity: str) -> Beat | None:
        """The newest beat of a live peer."""
        peer = self._live.get(identity)
        return peer.beat if peer else None

    def all(self, beat_type: type[BeatT]) -> dict[str, BeatT]:
        """The live peers of a kind and their newest beats, by identity."""
        return {identity: peer.beat for identity, peer in self._live.items() if isinstance(peer.beat, beat_type)}

    def identities(self) -> list[str]:
        """All live peers."""
        return list(self._live)
