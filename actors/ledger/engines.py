"""Which version the engines serve, and which one they shall serve (P15, P22, P25, P26)."""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.ledger.rows import Changes
from schemas.messages import InferenceBeat, Manifest, Policy


class Engines:
    """Targets for engines. `floor` is the newest version passed on or served: engines never go back behind it (P22).

    The target is stored, so that a restarted packer, which may hear a replaying trainer before the engines, sends none
    of them back.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.floor = 0
        self.update_id = 0
        self.target: Manifest | None = None
        self.dead_lineage = -1
        """Policies up to this lineage are of a history that a fork has given up: nobody may sample with them."""

    def restore(self, record: dict[str, Any]) -> None:
        """Take over what the store has."""
        if record["manifest"] is not None:
            self.target = Manifest.model_validate(record["manifest"])
            self.floor = self.target.policy.version
        self.update_id, self.dead_lineage = record["update_id"], record["dead_lineage"]

    def forget(self, dead_lineage: int) -> None:
        """The versions of these lineages are of a dead history: engines wait for the next one, however old it is."""
        self.floor, self.target, self.dead_lineage = 0, None, dead_lineage
        self._note()

    def serving(self, beats: Mapping[str, InferenceBeat]) -> dict[str, InferenceBeat]:
        """The engines that take new work: clean, and of a living history."""
        return {
            identity: beat
            for identity, beat in beats.items()
            if beat.engine_state == "clean" and beat.phase == "running" and self._alive(beat.policy)
        }

    def served_version(self, beats: Mapping[str, InferenceBeat]) -> int | None:
        """The newest version of an engine that takes new work; None when there is none."""
        return max((beat.policy.version for beat in self.serving(beats).values() if beat.policy), default=None)

    def _alive(self, policy: Policy | None) -> bool:
        return policy is not None and policy.lineage > self.dead_lineage

    def retarget(self, published: Iterable[Manifest], pinned: Policy | None, due: int | None, served: int) -> bool:
        """Choose what the engines shall serve; True when that changed.

        Args:
            published: versions of the live lineage that can still be received.
            pinned: the policy of an evaluation under way: nothing newer until it is done.
            due: the next version to be evaluated: nothing newer than it may pass before.
            served: the newest version that an engine serves.
        """
        self.floor = max(self.floor, served)
        wanted: Manifest | None = None
        for manifest in published:
            if self.target is not None and manifest.policy == self.target.policy:
                self.target = manifest  # with its key, which is not stored
            version = manifest.policy.version
            allowed = manifest.policy == pinned if pinned else due is None or version <= due
            if allowed and version >= self.floor and (wanted is None or version >= wanted.policy.version):
                wanted = manifest
        if wanted is None or (self.target is not None and wanted.policy == self.target.policy):
            return False
        self.target, self.floor = wanted, max(self.floor, wanted.policy.version)
        self.update_id += 1
        self._note()
        return True

    def _note(self) -> None:
        self._changes.values["target"] = {
            "manifest": self.target.model_dump(exclude={"key"}) if self.target else None,
            "update_id": self.update_id,
            "dead_lineage": self.dead_lineage,
        }
