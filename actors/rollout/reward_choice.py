"""Choice of the reward actor for a group, with a memory of reward actors at which groups have not arrived.

A reward actor heard by the packer but out of reach for this rollout (firewall, wrong route) has no work, and so the
lowest load of all. Without a memory each group would go there first.
"""

from collections.abc import Mapping

from schemas.messages import RewardPeer

LONGEST_PAUSE_SECONDS = 3600.0
"""Upper limit of the doubling pause."""


class RewardChoice:
    """Memory of the reward actors at which groups were lost: sent there and not reported in time.

    After a loss a reward actor gets no group for a pause, which doubles with each loss. After the pause the reward
    actor gets a single group at a time, until a group is reported.

    Args:
        pause: seconds; the pause after the first loss is twice as long.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._lost: dict[str, int] = {}
        """Losses in a row, by identity."""
        self._until: dict[str, float] = {}
        """End of the pause, by identity."""

    @property
    def avoided(self) -> list[str]:
        """Identities of the reward actors with a loss and no arrival since."""
        return list(self._lost)

    def lost(self, identity: str, now: float) -> float:
        """Record a loss: a peer has not reported a group in time. Return the seconds of pause left for the peer.

        Groups on the way at the same time are lost at the same time, so together count as a single loss.
        """
        if now < self._until.get(identity, now):
            return self._until[identity] - now
        self._lost[identity] = self._lost.get(identity, 0) + 1
        # doubling: a peer behind a firewall costs one lost group per pause, and is found again when the wall falls
        # the exponent has a limit: after a thousand losses the power would be too large for a float
        pause = min(self._pause * 2 ** min(self._lost[identity], 20), LONGEST_PAUSE_SECONDS)
        self._until[identity] = now + pause
        return float(pause)

    def arrived(self, identity: str) -> None:
        """Record an arrival: a peer has reported a group, so the peer is reachable."""
        # a single arrival clears all losses: the way is open
        self._lost.pop(identity, None)
        self._until.pop(identity, None)

    def forget(self, identity: str) -> None:
        """Drop the record of a peer that is gone."""
        self.arrived(identity)

    def order(
        self, peers: Mapping[str, RewardPeer], on_the_way: Mapping[str, int], now: float, avoid: str | None = None
    ) -> list[str]:
        """Return the identities of peers in the order in which to try: lowest load first, peers to avoid last.

        Args:
            peers: reward actors open to new groups, by identity.
            on_the_way: number of this rollout's groups at each peer, added to the peer's reported load.
            now: time on this process's monotonic clock.
            avoid: identity to be tried last.
        """

        def rank(identity: str) -> tuple[bool, int, str]:
            unnamed = on_the_way.get(identity, 0)
            # after its pause, a peer with losses is tried with one group at a time
            paused = identity in self._lost and (now < self._until[identity] or unnamed > 0)
            return identity == avoid or paused, peers[identity].load + unnamed, identity

        return sorted(peers, key=rank)
