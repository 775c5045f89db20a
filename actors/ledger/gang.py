"""The trainer as a gang of ranks: incarnation, lineage, where it starts from, how far it is (P19).

waiting ──all ranks beat afresh──▶ running ──a rank is gone──▶ broken ──the others exit, all come back──▶ running

A restarted packer takes a gang over as it is, once all of the processes that it knows as its members have beaten.
"""

from collections.abc import Mapping
from typing import Any, Literal

from actors.ledger.rows import Changes
from schemas.messages import Manifest, TrainerBeat, TrainerOrder

GangEvent = Literal["", "formed", "adopted", "broken"]


class Gang:
    """`members` are the identities of the live incarnation by rank; empty while there is none."""

    def __init__(self, num_ranks: int, max_steps: int, changes: Changes) -> None:
        self._num_ranks, self._max_steps, self._changes = num_ranks, max_steps, changes
        self.incarnation = 0
        self.checkpoint = 0
        self.members: dict[int, str] = {}
        self._expected: dict[int, str] = {}
        """The members of before the packer's restart, until they are all there or one of them turns out to be gone."""

    def restore(self, record: dict[str, Any]) -> None:
        """Take over what the store has."""
        self.incarnation, self.checkpoint = record["incarnation"], record["checkpoint"]
        self._expected = dict(enumerate(record["members"]))

    @property
    def lineage(self) -> int:
        """One per start of the gang (P4)."""
        return self.incarnation

    def update(self, beats: Mapping[str, TrainerBeat], chains: Mapping[int, str]) -> GangEvent:
        """Look at the live ranks; returns what that changed.

        Args:
            beats: live trainer ranks by identity.
            chains: the ledger's chain after each step it has composed.
        """
        event: GangEvent = ""
        if self.members:
            if all(identity in beats for identity in self.members.values()):
                return ""
            self.members, event = {}, "broken"
            self._note()
        if self._expected and all(identity in beats for identity in self._expected.values()):
            self.members, self._expected = self._expected, {}
            return "adopted"
        # a rank that is "starting" has not read its checkpoints back yet
        fresh = {b.rank: i for i, b in beats.items() if b.incarnation == 0 and b.phase == "running"}
        if any(identity != self._expected.get(rank) for rank, identity in fresh.items()):
            self._expected = {}  # a rank has started anew, so the others must as well
        if self._expected or len(fresh) < self._num_ranks:
            return event
        self.incarnation += 1
        self.members = fresh
        self.checkpoint = newest_common_checkpoint([beats[i] for i in fresh.values()], chains)
        self._note()
        return "formed"

    def blind_rank(self, beats: Mapping[str, TrainerBeat]) -> str:
        """What is wrong when a rank has no checkpoint at all and rank 0, which writes them, has; else empty."""
        ranks = [beats[self.members[rank]] for rank in sorted(self.members)]
        blind = [beat.name for beat in ranks if not beat.checkpoints and ranks[0].checkpoints]
        if not blind:
            return ""
        return (
            f"{blind[0]} sees none of the checkpoints that {ranks[0].name} has written: "
            "output_dir must be on a disk that all trainer ranks share"
        )

    def order_for(self, identity: str, beat: TrainerBeat) -> TrainerOrder:
        """What one rank shall do."""
        if beat.incarnation not in (0, self.incarnation):
            return "exit"  # a member too: it took the order of a gang that broke while it loaded
        if identity in self.members.values():
            return "finish" if beat.next_step > self._max_steps else "run"
        return "exit" if beat.incarnation and identity not in self._expected.values() else "wait"

    def trained_step(self, beats: Mapping[str, TrainerBeat]) -> int | None:
        """The last step that all ranks are past; None while there is no gang, or it still loads."""
        steps = [beats[i].next_step - 1 for i in self.members.values() if beats[i].incarnation == self.incarnation]
        return min(steps) if len(steps) == self._num_ranks else None

    def saved_steps(self, beats: Mapping[str, TrainerBeat], chains: Mapping[int, str]) -> list[int]:
        """The steps of which the gang has a good checkpoint of this history, ascending. Rank 0 saves for all."""
        beat = beats.get(self.members.get(0, ""))
        return sorted(c.step for c in beat.checkpoints if chains.get(c.step) == c.chain) if beat else []

    def published(self, beats: Mapping[str, TrainerBeat]) -> list[Manifest]:
        """What rank 0 of the live incarnation has published."""
        beat = beats.get(self.members.get(0, ""))
        return [m for m in beat.published if m.policy.lineage == self.lineage] if beat else []

    def _note(self) -> None:
        members = [self.members[rank] for rank in sorted(self.members)]
        self._changes.values["gang"] = {
            "incarnation": self.incarnation,
            "checkpoint": self.checkpoint,
            "members": members,
        }


def newest_common_checkpoint(beats: list[TrainerBeat], chains: Mapping[int, str]) -> int:
    """The newest step that all ranks have a good checkpoint of, with a witness chain equal to the ledger's; 0: none."""
    good = [{c.step for c in beat.checkpoints if chains.get(c.step) == c.chain} for beat in beats]
    return max(set.intersection(*good), default=0)
