"""Signs of life of other processes, judged by the packer's directives alone.

A directive lists the boot ids of all live processes of a kind. Absence counts only while directives of the same term
keep coming. A just started packer has not heard every process yet, and while the packer is away no absence grows.

    Lease 3 s, B was listed at 9.0 s
    directives of term 2 without B from 10.0 to 13.1 s                       B is gone
    one of term 2 without B at 10.0 s, then one of term 3 at 11.0 s …        B may live until 14.0 s
    one of term 2 without B at 10.0 s, the next one without B at 60.0 s …    B may live until 63.0 s
"""

from collections.abc import Iterable
from typing import Protocol

MAX_REMEMBERED = 1000
"""Largest number of absent processes remembered; the oldest are forgotten first."""


class Peer(Protocol):
    """Process listed in a directive: an engine or a reward actor."""

    @property
    def name(self) -> str:
        """Name in the run."""
        ...

    @property
    def boot_id(self) -> str:
        """Random id of the process."""
        ...


class Presence:
    """Processes of a kind, and since when each is absent. A process not yet listed by any directive is not gone.

    Args:
        lease: seconds of absence after which a process counts as gone.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._term = -1
        """Term of the newest directive; -1 before the first."""
        self._told_at = 0.0
        self._told_since = 0.0
        """Time since which directives of the same term have come without a pause of a lease."""
        self._there: set[str] = set()
        """Boot ids in the newest directive."""
        self._absent_since: dict[str, float] = {}
        self._boot_of: dict[str, str] = {}
        """Boot ids by name: the newest process with each name."""

    @property
    def num_absent(self) -> int:
        """Number of absent processes remembered."""
        return len(self._absent_since)

    def note(self, now: float, term: int, live: Iterable[str], named: Iterable[Peer]) -> None:
        """Record a directive.

        Args:
            now: time on this process's monotonic clock.
            term: the packer's term in the directive.
            live: boot ids of all live processes.
            named: processes open to new work. Another process listed under a name has replaced the old process.
        """
        there, absent = set(live), self._absent_since
        if term != self._term or now - self._told_at > self._lease:
            # a new packer, or an old one after a pause: each absence starts again
            self._term, self._told_since, absent = term, now, dict.fromkeys(absent, now)
        for boot_id in self._there - there:  # listed before, and not any more
            absent[boot_id] = now
        kept = [boot_id for boot_id in absent if boot_id not in there][-MAX_REMEMBERED:]
        self._absent_since = {boot_id: absent[boot_id] for boot_id in kept}
        self._there, self._told_at = there, now
        # a name belongs to the newest process: a replaced process is gone at once, without the wait of a lease
        self._boot_of = {peer.name: peer.boot_id for peer in named}

    def told_for(self, since: float) -> float:
        """Return the seconds since a moment through which directives have come; 0 or less if none has come.

        A caller can conclude from silence: anything not reported in this time has not happened. The count starts again
        with each term, and after a lease without any directive, since the first directive after a packer's absence may
        be older than the absence.
        """
        return self._told_at - max(since, self._told_since)

    def is_gone(self, name: str, boot_id: str) -> bool:
        """Return whether a process has been absent for a lease, or another process has taken the name."""
        absent = self._told_at - self._absent_since.get(boot_id, self._told_at)
        return absent > self._lease or self._boot_of.get(name, boot_id) != boot_id
