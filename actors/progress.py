"""What the packer tells screens beyond the steps: who was heard when, how full each stage is, and what each may hold.

Consumes beats and the machine's state; `values` are plain, for ObserverState and for progress.json. Means are over the
last MEAN_SECONDS: a stage's mean number of groups is the time that a group spends there, in units of the run's pace
(Little's law), so the stage with the most groups is where the time goes, whatever the moment shows.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.ledger import GroupState, Machine
from actors.telemetry.reporter import writing
from schemas.config import RunConfig
from schemas.messages import Beat, InferenceBeat, ObserverBeat, RewardBeat, RolloutBeat, TrainerBeat

MEAN_SECONDS = 15.0
"""After so long two thirds of a mean are new."""
FORGET_SECONDS = 600.0
"""For so long an actor that has left without a word is told of by name."""
FILE_SECONDS = 5.0
"""Between two writes of progress.json: what is known of a run whose packer has died."""
NAMED_SETTINGS = (
    ("rollout", "max_concurrent_groups"),
    ("reward", "max_concurrent_groups"),
    ("packer", "groups_per_step"),
    ("packer", "order"),
    ("packer", "max_async_level"),
    ("packer", "oversampling_factor"),
    ("trainer", "num_ranks"),
)
"""What advice about a bottleneck depends on, or names."""


@dataclass
class _Heard:
    """The newest beat of a name."""

    beat: Beat
    at: float


class Progress:
    """Follows one run."""

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        self._config, self._machine = config, machine
        self._heard: dict[str, _Heard] = {}
        self._restarts: dict[str, int] = {}
        self._means: dict[str, float] = {}
        self._sampled_at: float | None = None

    def heard(self, now: float, identity: str, beat: Beat) -> None:
        """Take note of a beat that counts; who says that it is done has left."""
        if self._machine.peers.beat_of(identity) is not beat or isinstance(beat, ObserverBeat):
            return
        before = self._heard.pop(beat.name, None)
        if before is not None and before.beat.boot_id != beat.boot_id:
            self._restarts[beat.name] = self._restarts.get(beat.name, 0) + 1
        if beat.phase != "done":
            self._heard[beat.name] = _Heard(beat, now)

    def sample(self, now: float) -> None:
        """Bring the means up to now; called about twice a second. They begin with the first step."""
        self._heard = {name: h for name, h in self._heard.items() if now - h.at < FORGET_SECONDS}
        if self._machine.phase == "starting":
            return
        past = math.inf if self._sampled_at is None else now - self._sampled_at
        self._sampled_at, share = now, 1.0 - math.exp(-past / MEAN_SECONDS)
        for stage, (groups, _) in self._queues().items():
            mean = self._means.get(stage, 0.0)
            self._means[stage] = mean + share * (groups - mean)

    def values(self, now: float) -> dict[str, Any]:
        """The plain values."""
        machine = self._machine
        engines = machine.peers.all(InferenceBeat)
        slots = getattr(self._config.inference.engine, "max_sequences", None)
        return {
            "lease": machine.settings.lease,
            "served": machine.engines.served_version(engines),
            "durable": machine.durable_step,
            "actors": [self._entry(heard, now) for _, heard in sorted(self._heard.items())],
            "restarts": dict(self._restarts),
            "queues": self._queues(),
            "means": {stage: round(mean, 2) for stage, mean in self._means.items()},
            "engine_load": sum(beat.load for beat in engines.values()),
            "engine_slots": slots and slots * len(engines),
            "reissued": machine.groups.counters["reissued"],
            "settings": {
                f"{section}.{key}": getattr(getattr(self._config, section), key) for section, key in NAMED_SETTINGS
            },
        }

    def _queues(self) -> dict[str, tuple[int, int]]:
        """(groups, as many as may be there) of each stage; evaluations are sampled and scored among the others.

        With reward actors are also groups that wait there, so there may be more than are scored at once.

        Batches are those that ranks should have and have not said to have received.
        """
        machine, config, s = self._machine, self._config, self._machine.settings
        num_held = sum(len(ordinals) for ordinals in machine.groups.held_by.values())
        sampling = sum(self._sampling(identity, len(held)) for identity, held in machine.groups.held_by.items())
        trainers = machine.peers.all(TrainerBeat)
        gang_is_there = all(identity in trainers for identity in machine.gang.members.values())
        num_rollouts, num_rewards = len(machine.peers.all(RolloutBeat)), len(machine.peers.all(RewardBeat))
        return {
            "sampling": (sampling, num_rollouts * config.rollout.max_concurrent_groups),
            "scoring": (num_held - sampling, num_rewards * config.reward.max_concurrent_groups),
            "scored": (len(machine.groups.settled), (s.max_async_level + 1) * s.groups_per_step + s.surplus),
            "packed": (machine.groups.counts("train")[GroupState.COMPOSED], 2 * s.groups_per_step),
            "batches": (len(machine.batches_wanted()) if gang_is_there else 0, 2 * s.num_ranks),
        }

    def _sampling(self, identity: str, num_held: int) -> int:
        """Of the groups that a rollout holds, those that it has not sampled yet: the others are with reward actors.

        A rollout says at once that a slot is free, and a reward actor once a second what it has got; so this is told by
        slots. Tickets that a rollout has not seen are on their way to a slot.
        """
        beat = self._machine.peers.beat_of(identity)
        if not isinstance(beat, RolloutBeat) or beat.phase != "running":  # who drains has no free slots, busy or not
            return num_held
        named = self._machine.rollout_holds.of(identity)
        rows = (self._machine.groups.rows[ordinal] for ordinal in self._machine.groups.held_by[identity])
        unseen = sum((group.ordinal, group.attempt) not in named for group in rows)
        return min(num_held, unseen + self._config.rollout.max_concurrent_groups - beat.free_slots)

    def _entry(self, heard: _Heard, now: float) -> dict[str, Any]:
        """One actor: name, kind, seconds since it was heard, and what its beat says of its work."""
        beat = heard.beat
        kind = beat.kind.removesuffix("_beat")
        entry = {"name": beat.name, "kind": kind, "age": round(now - heard.at, 1), "phase": beat.phase}
        if isinstance(beat, InferenceBeat):
            state = "quarantined" if beat.boot_id in self._machine.updates.quarantined else beat.engine_state
            version = beat.policy and beat.policy.version
            entry |= {"engine": state, "version": version, "load": beat.load, "error": beat.error}
        elif isinstance(beat, TrainerBeat):
            entry |= {"next_step": beat.next_step}
        elif isinstance(beat, RewardBeat):
            entry |= {"load": beat.load}
        elif isinstance(beat, RolloutBeat):
            entry |= {"holds": len(beat.holds), "free_slots": beat.free_slots}
        return entry


class ProgressFile:
    """Writes progress.json, atomically: at most every FILE_SECONDS, and whenever the phase has changed."""

    def __init__(self, output: Path) -> None:
        self._path = output / "progress.json"
        self._phase, self._next = "", 0.0

    def is_due(self, now: float, phase: str) -> bool:
        """Whether it is time."""
        return phase != self._phase or now >= self._next

    def write(self, now: float, progress: dict[str, Any]) -> None:
        """Write it, with the time of the wall clock.

        Raises:
            WriteError: it can't be written now.
        """
        staging = self._path.with_name(f".{self._path.name}")
        with writing(self._path):
            staging.write_text(json.dumps({"time": time.time()} | progress) + "\n", encoding="utf-8")
            staging.replace(self._path)
        self._phase, self._next = progress["phase"], now + FILE_SECONDS
