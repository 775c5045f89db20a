"""The trainer as a gang of ranks: incarnation, lineage, where it starts from, how far it is (P19).

waiting ──all ranks beat afresh──▶ running ──a rank is gone──▶ broken ──the others exit, all come back──▶ running
"""

from collections.abc import Mapping

from actors.ledger.rows import Changes
from schemas.messages import Manifest, TrainerBeat, TrainerOrder


class Gang:
    """`members` are the identities of the live incarnation by rank; empty while there is none."""

    def __init__(self, num_ranks: int, max_steps: int, changes: Changes) -> None:
        self._num_ranks, self._max_steps, self._changes = num_ranks, max_steps, changes
        self.incarnation = 0
        self.checkpoint = 0
        self.members: dict[int, str] = {}
        self.restored = False

    def restore(self, incarnation: int, checkpoint: int) -> None:
        """After a restart of the packer a gang that runs on is taken over as it is."""
        self.incarnation, self.checkpoint, self.restored = incarnation, checkpoint, incarnation > 0

    @property
    def lineage(self) -> int:
        """One per start of the gang (P4)."""
        return self.incarnation

    def update(self, beats: Mapping[str, TrainerBeat], chains: Mapping[int, str]) -> bool:
        """Look at the live ranks; True when the gang formed, broke or was taken over.

        Args:
            beats: live trainer ranks by identity.
            chains: the ledger's chain after each step it has composed.
        """
        if self.members:
            if all(identity in beats for identity in self.members.values()):
                return False
            self.members = {}
            return True
        running = {b.rank: i for i, b in beats.items() if b.incarnation == self.incarnation}
        if self.restored and len(running) == self._num_ranks:
            self.members, self.restored = running, False
            return True
        fresh = {b.rank: i for i, b in beats.items() if b.incarnation == 0}
        if len(fresh) < self._num_ranks:
            return False
        self.incarnation += 1
        self.restored = False
        self.members = fresh
        self.checkpoint = newest_common_checkpoint([beats[i] for i in fresh.values()], chains)
        self._changes.values["gang"] = {"incarnation": self.incarnation, "checkpoint": self.checkpoint}
        return True

    def order_for(self, identity: str, beat: TrainerBeat) -> TrainerOrder:
        """What one rank shall do."""
        if identity in self.members.values():
            return "finish" if beat.next_step > self._max_steps else "run"
        stale = beat.incarnation not in (0, self.incarnation) or (beat.incarnation > 0 and not self.restored)
        return "exit" if stale else "wait"

    def trained_step(self, beats: Mapping[str, TrainerBeat]) -> int | None:
        """The last step that all ranks are past; None while there is no gang, or it still loads."""
        steps = [beats[i].next_step - 1 for i in self.members.values() if beats[i].incarnation == self.incarnation]
        return min(steps) if len(steps) == self._num_ranks else None

    def published(self, beats: Mapping[str, TrainerBeat]) -> list[Manifest]:
        """What rank 0 of the live incarnation has published."""
        beat = beats.get(self.members.get(0, ""))
        return [m for m in beat.published if m.policy.lineage == self.lineage] if beat else []


def newest_common_checkpoint(beats: list[TrainerBeat], chains: Mapping[int, str]) -> int:
    """The newest step that all ranks have a good checkpoint of, with a witness chain equal to the ledger's; 0: none."""
    good = [{c.step for c in beat.checkpoints if chains.get(c.step) == c.chain} for beat in beats]
    return max(set.intersection(*good), default=0)
