"""Weight updates of the rendezvous channel: who enters which, and what becomes of one that fails (P24).

    idle ──engines lack the target──▶ under way ──all members serve it──▶ idle
                                          │ a member is gone, or somebody says that it failed
                                          ▼
                                        idle: the next one has a new group, and nobody who missed three in a row

The members of an update are frozen. An engine that comes later, or that no longer has what it had loaded (its beat
names no policy then), enters the next one, which is named as soon as this one has ended, for the same version: the
trainer holds a copy of it. So no file is needed, and no step waits for a joiner.
"""

from collections.abc import Mapping

from schemas.messages import InferenceBeat, Manifest, TrainerBeat, UpdateFailure, WeightMember, WeightUpdate

MAX_FAILURES = 3
"""Updates that an engine may fail in a row, or be missed by, until it is left out for good."""


class Updates:
    """The update under way.

    Args:
        term: of the packer; with a count it makes a name that no other packer of the run has used.
    """

    def __init__(self, term: int) -> None:
        self._term, self._count, self._groups = term, 0, 0
        self.current: WeightUpdate | None = None
        """What State names; it stays when all have it, until the next one."""
        self._under_way = False
        self._broken = True
        """Whether the group of the last update must not be used again."""
        self._failures: dict[str, int] = {}

    @property
    def under_way(self) -> bool:
        """Whether members may still be receiving: the target is not changed meanwhile."""
        return self._under_way

    @property
    def quarantined(self) -> set[str]:
        """Boot ids of engines that no update names any more: they must start anew."""
        return {boot_id for boot_id, failures in self._failures.items() if failures >= MAX_FAILURES}

    def decide(
        self, target: Manifest | None, engines: Mapping[str, InferenceBeat], trainer: TrainerBeat | None
    ) -> bool:
        """Look at the live engines and at rank 0 of the trainer; True when State has something new to name."""
        live = {beat.boot_id: beat for beat in engines.values() if beat.weight_ranks and beat.phase == "running"}
        if self._under_way:
            self._follow(live, trainer)
        if self._under_way or target is None or target.channel != "rendezvous" or trainer is None:
            return False
        lacking = [
            WeightMember(boot_id=boot_id, num_ranks=beat.weight_ranks)
            for boot_id, beat in sorted(live.items())
            if beat.policy != target.policy and boot_id not in self.quarantined
        ]
        if not lacking:
            return False
        self._name(target, lacking)
        return True

    def _follow(self, live: Mapping[str, InferenceBeat], trainer: TrainerBeat | None) -> None:
        """End the update under way when it has succeeded or failed."""
        update = self.current
        assert update is not None
        members = [member.boot_id for member in update.members]
        failed = _failure_of(trainer.failed_update, update) if trainer is not None else None
        missed = set(failed.missed) if failed else set()
        missed |= {b for b in members if b in live and _failure_of(live[b].failed_update, update)}
        if trainer is None or failed or missed or any(boot_id not in live for boot_id in members):
            self._under_way, self._broken = False, True
            for boot_id in missed:
                self._failures[boot_id] = self._failures.get(boot_id, 0) + 1
        elif all(live[boot_id].policy == update.policy for boot_id in members):
            self._under_way = False
            for boot_id in members:
                self._failures.pop(boot_id, None)

    def _name(self, target: Manifest, members: list[WeightMember]) -> None:
        before = self.current
        if self._broken or before is None or before.members != members:
            self._groups += 1
        self._count += 1
        self.current = WeightUpdate(
            update=f"{self._term}.{self._count}",
            group=f"{self._term}.{self._groups}",
            policy=target.policy,
            members=members,
        )
        self._under_way, self._broken = True, False


def _failure_of(failure: UpdateFailure | None, update: WeightUpdate) -> UpdateFailure | None:
    return failure if failure is not None and failure.update == update.update else None
