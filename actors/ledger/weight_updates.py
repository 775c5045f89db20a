"""Weight updates of channels that broadcast: members of each update, and recovery from a failed update (P24).

    idle ──engines lack the target──▶ under way ──all members serve it──▶ idle
                                          │ a member is gone, or a member or the trainer reports a failure, or
                                          │ no member has made progress for `patience` seconds
                                          ▼
                                        idle: the next update has a new group, without engines that missed three in a
                                        row

The members of an update are fixed. An engine that joins later, or has lost its loaded weights (its heartbeat then names
no policy), enters the next update, named as soon as this one has ended. The version is the same, and the trainer
holds a copy of it, so no file is needed and no step waits for a joiner.

Members and trainer have timeouts and report failures themselves. `patience` covers a failure that nobody reports, and
is longer than all these timeouts together, so a slow but progressing update is never cancelled.
"""

from collections.abc import Mapping, Sequence

from schemas.messages import InferenceHeartbeat, Manifest, TrainerHeartbeat, WeightMember, WeightUpdate

PATIENCE_TIMEOUTS = 4.0
"""`patience` as a multiple of `weights.timeout`: to meet, to receive, to pause the server, to switch its weights."""
MAX_REMEMBERED = 1_000
"""Number of dead engines with remembered failures."""
MAX_FAILURES = 3
"""Updates in a row failed or missed by an engine, after which the engine is named no more."""


class Updates:
    """The current weight update.

    Args:
        term: of the packer; term and a count form a name of the update, unique in the run.
        patience: seconds without progress of any member after which another update is named.
    """

    def __init__(self, term: int, patience: float) -> None:
        self._term, self._count, self._num_process_groups = term, 0, 0
        self._patience = patience
        self._progress: tuple[object, ...] = ()
        """Newest progress reported by the members."""
        self._since = 0.0
        """Time of the last change of `_progress`, on the packer's clock."""
        self.current: WeightUpdate | None = None
        """Update named in directives; a completed update stays until the next one."""
        self._under_way = False
        self._broken = True
        """True if the process group of the last update must not be used again."""
        self._failures: dict[str, int] = {}
        """Failures in a row, by boot id of the engine."""

    @property
    def under_way(self) -> bool:
        """True while members may still be receiving; the engines' target must not change meanwhile."""
        return self._under_way

    @property
    def quarantined(self) -> set[str]:
        """Boot ids of engines excluded from all updates; the engines must restart."""
        return {boot_id for boot_id, failures in self._failures.items() if failures >= MAX_FAILURES}

    def decide(
        self,
        now: float,
        target: Manifest | None,
        engines: Mapping[str, InferenceHeartbeat],
        trainer: TrainerHeartbeat | None,
    ) -> bool:
        """Follow the current update, and name the next if engines lack the target; return True for a new update.

        Args:
            now: the time on the packer's clock.
            target: version to serve. None: no version, or the trainer is gone.
            engines: newest heartbeats of the live engines, by identity.
            trainer: newest heartbeat of rank 0. None: no gang.
        """
        is_possible = target is not None and target.is_broadcast and trainer is not None
        if not (self._under_way or is_possible):
            return False  # at once: with files there is nothing to look at in any round
        live = {
            heartbeat.boot_id: heartbeat
            for heartbeat in engines.values()
            if heartbeat.weight_ranks and heartbeat.phase == "running"
        }
        # a dead engine never returns under its boot id, so the oldest dead one may be forgotten
        if len(self._failures) > MAX_REMEMBERED + len(live):
            del self._failures[next(boot_id for boot_id in self._failures if boot_id not in live)]
        if self._under_way:
            self._follow(now, live, trainer)
        if self._under_way or target is None or not target.is_broadcast or trainer is None:
            return False
        # sorted, so that the same engines are the same members and may keep their process group
        lacking = [
            WeightMember(boot_id=boot_id, num_ranks=_ranks(target, heartbeat))
            for boot_id, heartbeat in sorted(live.items())
            if heartbeat.policy != target.policy and boot_id not in self.quarantined
        ]
        lacking = _one_rank_each(lacking, live)
        if not lacking:
            return False
        self._name(target, lacking)
        self._progress, self._since = _progress([member.boot_id for member in lacking], live), now
        return True

    def _follow(self, now: float, live: Mapping[str, InferenceHeartbeat], trainer: TrainerHeartbeat | None) -> None:
        """End the current update after success or failure."""
        update = self.current
        assert update is not None
        members = [member.boot_id for member in update.members]
        said = [trainer.failed_update if trainer is not None else None]
        said += [live[boot_id].failed_update for boot_id in members if boot_id in live]
        failed = [failure for failure in said if failure is not None and failure.update == update.update]
        missed = {boot_id for failure in failed for boot_id in failure.missed}
        progress = _progress(members, live)
        if progress != self._progress:
            self._progress, self._since = progress, now
        late = now - self._since > self._patience
        if late:
            # nobody reported a failure, so the members behind the others are blamed; if all are, the fault is the
            # trainer's
            behind = {boot_id for boot_id in members if boot_id in live and live[boot_id].policy != update.policy}
            missed |= behind if len(behind) < len(members) else set()
        if trainer is None or failed or late or any(boot_id not in live for boot_id in members):
            # gloo can't go on with a group that has lost a member or a bucket: the next update gets a new one
            self._under_way, self._broken = False, True
            for boot_id in missed:
                self._failures[boot_id] = self._failures.get(boot_id, 0) + 1
        elif all(live[boot_id].policy == update.policy for boot_id in members):
            self._under_way = False
            for boot_id in members:
                self._failures.pop(boot_id, None)

    def _name(self, target: Manifest, members: list[WeightMember]) -> None:
        before = self.current
        # the same members after a success keep their process group: to form one costs seconds
        if self._broken or before is None or before.members != members:
            self._num_process_groups += 1
        self._count += 1
        self.current = WeightUpdate(
            update=f"{self._term}.{self._count}",
            process_group=f"{self._term}.{self._num_process_groups}",
            policy=target.policy,
            members=members,
        )
        self._under_way, self._broken = True, False


def _one_rank_each(members: list[WeightMember], live: Mapping[str, InferenceHeartbeat]) -> list[WeightMember]:
    """Return members of which no two have ranks on one GPU, which NCCL refuses; the others enter the next update."""
    taken, kept = set[str](), list[WeightMember]()
    for member in members:
        place = live[member.boot_id].weight_place
        if member.num_ranks and place.startswith("cuda:"):
            if place in taken:
                continue
            taken.add(place)
        kept.append(member)
    return kept


def _ranks(target: Manifest, engine: InferenceHeartbeat) -> int:
    """Return the number of ranks of an engine in an update: none in the place of the trainer's copy, which it maps."""
    return 0 if target.place and engine.weight_place == target.place else engine.weight_ranks


def _progress(members: Sequence[str], live: Mapping[str, InferenceHeartbeat]) -> tuple[object, ...]:
    """Return the progress reported by the live members; the value changes with any data received by a member."""
    return tuple((b, live[b].policy, live[b].update_progress) for b in members if b in live)
