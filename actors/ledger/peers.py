"""Who lives: leases, boot ids, sequence numbers (P3, P8).

A lease runs on the packer's clock from the receipt of a beat. No decision reads a peer's clock.
"""

from collections.abc import Mapping
from typing import TypeVar, cast

from actors.ledger.clock import Clock
from schemas.messages import Beat

BeatT = TypeVar("BeatT", bound=Beat)
MAX_REMEMBERED = 10_000


class Peers:
    """The live peers, one boot per name; and the visitors, who beat but do not count.

    Args:
        lease: seconds.
        term: of this packer.
    """

    def __init__(self, lease: float, term: int) -> None:
        self._term = term
        self._leases: Clock[str] = Clock(lease)
        self._visits: Clock[str] = Clock(lease)
        self._beats: dict[str, Beat] = {}
        self._by_type: dict[type[Beat], dict[str, Beat]] = {}
        self._boot_of: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._sequences: dict[str, int] = {}
        """Of the newest beat, also of peers whose lease has ended: what an older one says is true no more (P3)."""

    def heard(self, now: float, identity: str, beat: Beat) -> tuple[bool, str | None]:
        """Take note of a beat.

        A process takes the place of a living one only when its beat names our term: then it has heard us. One that has
        died before may have left a beat that arrives late (P3).

        Returns:
            (whether the beat counts, identity of an older process of the same name that this one replaces).
        """
        if identity in self._refusals:
            self._visits.start(identity, now)
            return False, None
        if beat.sequence <= self._sequences.get(identity, -1):
            return False, None
        self._sequences[identity] = beat.sequence
        if len(self._sequences) > MAX_REMEMBERED:
            del self._sequences[next(iter(self._sequences))]
        replaced = self._boot_of.get(beat.name)
        if replaced == identity:
            replaced = None
        if replaced in self._beats and beat.term != self._term:
            self._visits.start(identity, now)
            return False, None
        self._visits.stop(identity)
        if replaced is not None:
            self.refuse(replaced, "a newer process has the same name; every process needs its own --name")
        self._boot_of[beat.name] = identity
        self._leases.start(identity, now)
        self._beats[identity] = beat
        self._by_type.setdefault(type(beat), {})[identity] = beat
        return True, replaced

    def refuse(self, identity: str, reason: str = "") -> None:
        """This process does not count, now or later; the oldest refusals are forgotten. Its beats are answered."""
        self._refusals[identity] = reason
        if len(self._refusals) > MAX_REMEMBERED:
            del self._refusals[next(iter(self._refusals))]
        self._forget(identity)

    def refusal_of(self, identity: str) -> str:
        """Why a process is refused; empty where it is not."""
        return self._refusals.get(identity, "")

    def is_visitor(self, identity: str) -> bool:
        """Whether it has beaten within a lease without counting."""
        return identity in self._visits

    def renew(self, now: float) -> None:
        """Nobody could be heard for a while: all leases begin anew."""
        self._leases.start_all(now)
        self._visits.start_all(now)

    def expire(self, now: float) -> list[str]:
        """Remove and return the peers whose lease has ended, and the visitors that have left."""
        visitors, gone = self._visits.late(now), self._leases.late(now)
        for identity in visitors:
            self._visits.stop(identity)
        for identity in gone:
            self._forget(identity)
        return gone + visitors

    def beat_of(self, identity: str) -> Beat | None:
        """The newest beat of a live peer."""
        return self._beats.get(identity)

    def all(self, beat_type: type[BeatT]) -> Mapping[str, BeatT]:
        """The live peers of a kind (`Beat`: of all kinds) and their newest beats, by identity."""
        return cast(Mapping[str, BeatT], self._beats if beat_type is Beat else self._by_type.get(beat_type, {}))

    def identities(self) -> list[str]:
        """All live peers."""
        return list(self._beats)

    def _forget(self, identity: str) -> None:
        self._leases.stop(identity)
        beat = self._beats.pop(identity, None)
        if beat is not None:
            del self._by_type[type(beat)][identity]
