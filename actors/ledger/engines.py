"""Policy versions of the engines: newest served (P15, P25) and next to serve (P22, P26)."""

from collections.abc import Collection, Mapping
from typing import Any

from actors.ledger.rows import Changes
from schemas.messages import InferenceHeartbeat, Manifest, PolicyVersion


class Engines:
    """Target version of the engines.

    The target is stored, so that a restarted packer sends no engine back to an older version, although the first
    heartbeats may come from a trainer that repeats old steps.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.floor = 0
        """Newest version named as target or served; engines never go below (P22)."""
        self.update_id = 0
        """Number of targets so far; a new number tells engines of a new target."""
        self.target: Manifest | None = None
        """Manifest of the version to serve; None before the first."""
        self.dead_lineage = -1
        """Newest lineage of a history that a fork has abandoned; policies up to there must not sample any more."""

    def restore(self, record: dict[str, Any]) -> None:
        """Load the stored target."""
        if record["manifest"] is not None:
            self.target = Manifest.model_validate(record["manifest"])
            self.floor = self.target.policy.version
        self.update_id, self.dead_lineage = record["update_id"], record["dead_lineage"]

    def forget(self, dead_lineage: int) -> None:
        """Declare lineages up to this one dead; engines wait for the next published version, however low."""
        self.floor, self.target, self.dead_lineage = 0, None, dead_lineage
        self._note()

    def serving(self, heartbeats: Mapping[str, InferenceHeartbeat]) -> dict[str, InferenceHeartbeat]:
        """Return the engines open for new work: running, with clean weights of a live lineage."""
        return {
            identity: heartbeat
            for identity, heartbeat in heartbeats.items()
            if heartbeat.engine_state == "clean"
            and heartbeat.phase == "running"
            # a lineage ends with a fork: its weights must not sample for the new history
            and heartbeat.policy is not None
            and heartbeat.policy.lineage > self.dead_lineage
        }

    def served_version(self, heartbeats: Mapping[str, InferenceHeartbeat]) -> int | None:
        """Return the newest version among `serving` engines; None without any."""
        versions = [one.policy.version for one in self.serving(heartbeats).values() if one.policy]
        return max(versions, default=None)

    def retarget(
        self,
        published: Collection[Manifest],
        pinned: PolicyVersion | None,
        due: int | None,
        served: int,
        newest: int | None = None,
    ) -> bool:
        """Choose the version for the engines to serve; return True for a new choice.

        Args:
            published: versions of the live lineage that can still be received.
            pinned: policy of the running evaluation, kept until the evaluation is done. None: no evaluation runs.
            due: next version to evaluate; no newer version is named before. None: no further evaluation.
            served: newest version served by an engine.
            newest: newest version to name, unless only newer ones are left. None: any.
        """
        self.floor = max(self.floor, served)
        if newest is not None:
            published = _up_to(max(newest, self.floor), published, self.floor)
        wanted: Manifest | None = None
        for manifest in published:
            if self.target is not None and manifest.policy == self.target.policy:
                self.target = manifest  # after a restart: the published manifest has the key, the stored one has not
            version = manifest.policy.version
            # during an evaluation only its policy; before one nothing newer than the version to evaluate
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


def _up_to(newest: int, published: Collection[Manifest], floor: int) -> list[Manifest]:
    """Return the versions up to a newest one; if none of them can be received any more, the next one after it."""
    usable = [one for one in published if one.policy.version >= floor]
    within = [one for one in usable if one.policy.version <= newest]
    return within or sorted(usable, key=lambda one: one.policy.version)[:1]
