"""Trainer ranks as a gang: incarnation, lineage, checkpoint to start from, progress (P19: ranks live and die together).

waiting ──all ranks start afresh──▶ running ──a rank is gone──▶ broken ──the others exit, all come back──▶ running

A restarted packer adopts a running gang once all of its stored members have sent a heartbeat.
"""

from collections.abc import Mapping
from typing import Any, Literal

from actors.ledger.rows import Changes
from schemas.messages import Manifest, TrainerHeartbeat, TrainerOrder

GangEvent = Literal["", "formed", "adopted", "broken"]
"""Change of the gang in a round; empty: none."""


class Gang:
    """Live incarnation of the trainer's ranks."""

    def __init__(self, num_ranks: int, max_steps: int, changes: Changes) -> None:
        self._num_ranks, self._max_steps, self._changes = num_ranks, max_steps, changes
        self.incarnation = 0
        """Number of starts of the gang; 0 before the first."""
        self.checkpoint = 0
        """Step of the checkpoint that the incarnation started from; 0: none."""
        self.members: dict[int, str] = {}
        """Identities of the live incarnation by rank; empty while no gang is formed."""
        self._expected: dict[int, str] = {}
        """Members before the packer's restart, until all have sent a heartbeat or a member turns out to be gone."""

    def restore(self, record: dict[str, Any]) -> None:
        """Load the stored gang; members are expected, not yet live."""
        self.incarnation, self.checkpoint = record["incarnation"], record["checkpoint"]
        self._expected = dict(enumerate(record["members"]))

    def disband(self) -> None:
        """End the live incarnation, or the expected incarnation after a restart; all ranks are told to exit."""
        self.members, self._expected = {}, {}
        self._note()

    @property
    def lineage(self) -> int:
        """Lineage of the published versions (P4: every start of the gang is a new lineage)."""
        return self.incarnation

    def update(self, heartbeats: Mapping[str, TrainerHeartbeat], chains: Mapping[int, str]) -> GangEvent:
        """Update the gang from the live ranks; return the change (formed, adopted, broken or none).

        Args:
            heartbeats: newest heartbeats of the live trainer ranks, by identity.
            chains: the ledger's chain of witnesses after each composed step; a checkpoint with another chain is of
                another history.
        """
        event: GangEvent = ""
        if self.members:
            if all(identity in heartbeats for identity in self.members.values()):
                return ""
            self.members, event = {}, "broken"
            self._note()
        if self._expected and all(identity in heartbeats for identity in self._expected.values()):
            self.members, self._expected = self._expected, {}
            return "adopted"
        # a rank in phase "starting" has not checked its checkpoints yet
        fresh = {b.rank: i for i, b in heartbeats.items() if b.incarnation == 0 and b.phase == "running"}
        if any(identity != self._expected.get(rank) for rank, identity in fresh.items()):
            self._expected = {}  # a rank has restarted, so the others must restart too
        if self._expected or len(fresh) < self._num_ranks:
            return event
        self.incarnation += 1
        self.members = fresh
        self.checkpoint = newest_common_checkpoint([heartbeats[i] for i in fresh.values()], chains)
        self._note()
        return "formed"

    def blind_rank(self, heartbeats: Mapping[str, TrainerHeartbeat]) -> str:
        """Return an error if a rank sees no checkpoint while rank 0, the writer, sees some; else empty."""
        ranks = [heartbeats[self.members[rank]] for rank in sorted(self.members)]
        blind = [heartbeat.name for heartbeat in ranks if not heartbeat.checkpoints and ranks[0].checkpoints]
        if not blind:
            return ""
        return (
            f"{blind[0]} sees none of the checkpoints that {ranks[0].name} has written: "
            "output_dir must be on a disk that all trainer ranks share"
        )

    def order_for(self, identity: str, heartbeat: TrainerHeartbeat) -> TrainerOrder:
        """Return the order for a rank: wait, run, finish or exit."""
        if heartbeat.incarnation not in (0, self.incarnation):
            return "exit"  # even a member: it may have followed an older gang, which broke while the rank was loading
        if identity in self.members.values():
            return "finish" if heartbeat.next_step > self._max_steps else "run"
        return "exit" if heartbeat.incarnation and identity not in self._expected.values() else "wait"

    def trained_step(self, heartbeats: Mapping[str, TrainerHeartbeat]) -> int | None:
        """Return the newest step completed by all ranks; None while no gang is formed or a rank is still loading."""
        # a member with another incarnation in its heartbeat has not taken this gang's order yet
        steps = [
            heartbeats[i].next_step - 1 for i in self.members.values() if heartbeats[i].incarnation == self.incarnation
        ]
        return min(steps) if len(steps) == self._num_ranks else None

    def saved_steps(self, heartbeats: Mapping[str, TrainerHeartbeat], chains: Mapping[int, str]) -> list[int]:
        """Return the steps with a good checkpoint of this history, ascending, as told by rank 0 (the writer)."""
        heartbeat = heartbeats.get(self.members.get(0, ""))
        return sorted(c.step for c in heartbeat.checkpoints if chains.get(c.step) == c.chain) if heartbeat else []

    def published(self, heartbeats: Mapping[str, TrainerHeartbeat]) -> list[Manifest]:
        """Return the versions of the live lineage published by rank 0; empty without a gang."""
        heartbeat = heartbeats.get(self.members.get(0, ""))
        return [m for m in heartbeat.published if m.policy.lineage == self.lineage] if heartbeat else []

    def _note(self) -> None:
        members = [self.members[rank] for rank in sorted(self.members)]
        self._changes.values["gang"] = {
            "incarnation": self.incarnation,
            "checkpoint": self.checkpoint,
            "members": members,
        }


def newest_common_checkpoint(heartbeats: list[TrainerHeartbeat], chains: Mapping[int, str]) -> int:
    """Return the newest step with a good checkpoint on all ranks and a chain equal to the ledger's; 0 if none."""
    # by chain: a checkpoint of a history that was given up has a step's number too
    good = [{c.step for c in heartbeat.checkpoints if chains.get(c.step) == c.chain} for heartbeat in heartbeats]
    return max(set.intersection(*good), default=0)
