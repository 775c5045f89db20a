"""Progress values for screens: when each actor was heard, how full each stage is, and its capacity.

Consumes heartbeats and the machine's state. Values are plain, for ObserverDirective and progress.json. Means are over
the last MEAN_SECONDS. By Little's law the mean number of groups in a stage is proportional to the time that groups
spend there, so the stage with the most groups takes the most time, whatever a single moment shows.
"""

import heapq
import json
import math
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.ledger import GroupState, Machine
from actors.packer.evaluation_clock import EvaluationClock
from actors.process.devices import has_gpu
from actors.telemetry.reporter import replace
from actors.telemetry.writer import Writer
from schemas import limits
from schemas.config import RunConfig
from schemas.messages import (
    Heartbeat,
    InferenceHeartbeat,
    ObserverHeartbeat,
    RewardHeartbeat,
    RolloutHeartbeat,
    TrainerHeartbeat,
)

MEAN_SECONDS = 15.0
"""Time constant of the means: after this time two thirds of a mean are new."""
MAX_GONE = 1_000
"""Largest number of gone actors whose restarts and notes are kept."""
FORGET_SECONDS = 600.0
"""Seconds for which an actor that vanished without a farewell is still listed."""
FILE_SECONDS = 5.0
"""Seconds between two writes of progress.json, which tells of the run while no packer runs."""
ALIVE_SECONDS = 3 * FILE_SECONDS + 1.0
"""Age of progress.json up to which its packer is taken to run, where only the file can be seen."""
NAMED_SETTINGS = (
    ("rollout", "max_concurrent_groups"),
    ("reward", "max_concurrent_groups"),
    ("reward", "timeout"),
    ("packer", "groups_per_step"),
    ("packer", "order"),
    ("packer", "max_async_level"),
    ("packer", "oversampling_factor"),
    ("trainer", "num_ranks"),
    ("bus", "control"),
)
"""Keys shown with the progress, for advice about a bottleneck."""


@dataclass
class _Heard:
    """Newest heartbeat under a name, with the monotonic time of its arrival."""

    heartbeat: Heartbeat
    at: float


class Progress:
    """Progress of a run, collected from heartbeats and from the machine."""

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        self._config, self._machine = config, machine
        self._heard: dict[str, _Heard] = {}
        self._restarts: dict[str, int] = {}
        self._calls = self._late_calls = 0
        """Calls of reward functions, all and late, over all reward actors since this packer's start."""
        self._notes: dict[str, list[str]] = {}
        """Notes of reward actors by name; kept when an actor has left."""
        self._means: dict[str, float] = {}
        """Mean number of groups by stage."""
        self._sampled_at: float | None = None
        self._evaluation = EvaluationClock()

    def heard(self, now: float, identity: str, heartbeat: Heartbeat) -> None:
        """Record a heartbeat, if the machine counts it. An actor whose phase is "done" has left."""
        if self._machine.peers.heartbeat_of(identity) is not heartbeat or isinstance(heartbeat, ObserverHeartbeat):
            return
        # pop and insert again: the dict stays in the order of the newest heartbeat
        before = self._heard.pop(heartbeat.name, None)
        if before is not None and before.heartbeat.boot_id != heartbeat.boot_id:
            self._restarts[heartbeat.name] = self._restarts.get(heartbeat.name, 0) + 1
        if isinstance(heartbeat, RewardHeartbeat):
            self._notes[heartbeat.name] = heartbeat.notes
            # counts of a process only grow, so the difference to its last heartbeat is new; a new process counts from 0
            last = before.heartbeat if before is not None and before.heartbeat.boot_id == heartbeat.boot_id else None
            counted = (last.calls, last.late_calls) if isinstance(last, RewardHeartbeat) else (0, 0)
            self._calls += heartbeat.calls - counted[0]
            self._late_calls += heartbeat.late_calls - counted[1]
        if heartbeat.phase != "done":
            self._heard[heartbeat.name] = _Heard(heartbeat, now)

    def renewed(self, now: float, name: str) -> None:
        """Record that an actor has said again what it had said."""
        # an actor whose phase is "done" has left
        if (heard := self._heard.get(name)) is not None:
            heard.at = now

    def sample(self, now: float) -> None:
        """Update means and the evaluation's count; called about twice a second. Means start with the first step."""
        self._evaluation.look(now, self._machine)
        self._heard = {name: h for name, h in self._heard.items() if now - h.at < FORGET_SECONDS}
        for table in (self._restarts, self._notes):
            gone = [name for name in table if name not in self._heard]
            for name in gone[: max(0, len(gone) - MAX_GONE)]:
                del table[name]
        if self._machine.phase == "starting":
            return
        # weight of the newest sample by the time since the last one: e-folding after MEAN_SECONDS; 1 for the first
        past = math.inf if self._sampled_at is None else now - self._sampled_at
        self._sampled_at, share = now, 1.0 - math.exp(-past / MEAN_SECONDS)
        for stage, (groups, _) in self.queues.items():
            mean = self._means.get(stage, 0.0)
            self._means[stage] = mean + share * (groups - mean)

    def values(self, now: float) -> dict[str, Any]:
        """Return the progress as plain values."""
        machine = self._machine
        engines = machine.peers.all(InferenceHeartbeat)
        slots = self._config.inference.engine.num_slots
        return {
            "lease": machine.settings.lease,
            "evaluation": self._evaluation.values,
            "served": machine.engines.served_version(engines),
            "durable": machine.durable_step,
            # no more than a directive has room for, longest unheard first: these are most likely in trouble
            "actors": [
                self._entry(heard, now)
                for _, heard in sorted(
                    heapq.nsmallest(limits.ACTORS_SHOWN, self._heard.items(), key=lambda item: item[1].at)
                )
            ],
            "actors_left_out": max(0, len(self._heard) - limits.ACTORS_SHOWN),
            "restarts": dict(sorted(self._restarts.items(), key=lambda item: -item[1])[: limits.ACTORS_SHOWN]),
            "queues": self.queues,
            "means": {stage: round(mean, 2) for stage, mean in self._means.items()},
            # without a GPU all actors share the cores, and a screen can tell that these are the bottleneck
            "cpu_cores": None if has_gpu() else os.cpu_count(),
            "computing": len(engines) + machine.settings.num_ranks,
            "engine_load": sum(heartbeat.load for heartbeat in engines.values()),
            "engine_slots": slots and slots * len(engines),
            "notes": sorted({note for notes in self._notes.values() for note in notes}),
            "reward_calls": self._calls,
            "late_reward_calls": self._late_calls,
            "reissued": machine.groups.counters["reissued"],
            "settings": {
                f"{section}.{key}": getattr(getattr(self._config, section), key) for section, key in NAMED_SETTINGS
            },
        }

    @property
    def queues(self) -> dict[str, tuple[int, int]]:
        """Return (groups, capacity) of each stage. Groups of evaluations count in the first two stages.

        `scoring` includes groups waiting at reward actors, so may exceed the capacity (groups scored at the same time).
        `batches` counts batches due to ranks and not yet confirmed.
        """
        machine, config, s = self._machine, self._config, self._machine.settings
        num_held = sum(len(ordinals) for ordinals in machine.groups.held_by.values())
        sampling = sum(self._sampling(identity, len(held)) for identity, held in machine.groups.held_by.items())
        trainers = machine.peers.all(TrainerHeartbeat)
        # without a whole gang nothing is due to anybody
        gang_is_there = all(identity in trainers for identity in machine.gang.members.values())
        num_rollouts, num_rewards = len(machine.peers.all(RolloutHeartbeat)), len(machine.peers.all(RewardHeartbeat))
        return {
            "sampling": (sampling, num_rollouts * config.rollout.max_concurrent_groups),
            "scoring": (num_held - sampling, num_rewards * config.reward.max_concurrent_groups),
            "scored": (len(machine.groups.settled), (s.max_async_level + 1) * s.groups_per_step + s.surplus),
            "packed": (machine.groups.counts("train")[GroupState.COMPOSED], 2 * s.groups_per_step),
            "batches": (len(machine.batches_wanted()) if gang_is_there else 0, 2 * s.num_ranks),
        }

    def _sampling(self, identity: str, num_held: int) -> int:
        """Return how many of a rollout's groups are not sampled yet; the others are with reward actors.

        Free slots tell this best: a rollout reports a free slot at once, a reward actor its groups once a second.
        Tickets not yet named by the rollout are on their way to a slot.
        """
        heartbeat = self._machine.peers.heartbeat_of(identity)
        # a draining rollout reports no free slots, busy or not
        if not isinstance(heartbeat, RolloutHeartbeat) or heartbeat.phase != "running":
            return num_held
        named = self._machine.rollout_holds.of(identity)
        rows = (self._machine.groups.rows[ordinal] for ordinal in self._machine.groups.held_by[identity])
        unseen = sum((group.ordinal, group.attempt) not in named for group in rows)
        return min(num_held, unseen + self._config.rollout.max_concurrent_groups - heartbeat.free_slots)

    def _entry(self, heard: _Heard, now: float) -> dict[str, Any]:
        """Return an actor's entry: name, kind, phase, and the age and work of the newest heartbeat."""
        heartbeat = heard.heartbeat
        kind = heartbeat.kind.removesuffix("_heartbeat")
        entry = {"name": heartbeat.name, "kind": kind, "age": round(now - heard.at, 1), "phase": heartbeat.phase}
        if isinstance(heartbeat, InferenceHeartbeat):
            state = "quarantined" if heartbeat.boot_id in self._machine.updates.quarantined else heartbeat.engine_state
            version = heartbeat.policy and heartbeat.policy.version
            entry |= {"engine": state, "version": version, "load": heartbeat.load, "error": heartbeat.error}
        elif isinstance(heartbeat, TrainerHeartbeat):
            entry |= {"next_step": heartbeat.next_step}
        elif isinstance(heartbeat, RewardHeartbeat):
            entry |= {"load": heartbeat.load}
        elif isinstance(heartbeat, RolloutHeartbeat):
            entry |= {"holds": len(heartbeat.holds), "free_slots": heartbeat.free_slots}
        if (task := heartbeat.task) is not None:
            # clocks of two machines may differ: a start in the future is now
            seconds = round(max(0.0, time.time() - task.since), 1)
            entry |= {"task": task.model_dump(exclude={"since"}) | {"seconds": seconds}}
        return entry


class ProgressFile:
    """Writer of progress.json: atomic, every FILE_SECONDS at most, and at once when the phase changes."""

    def __init__(self, output: Path, writer: Writer) -> None:
        self._path, self._writer = output / "progress.json", writer
        self._phase, self._next = "", 0.0

    def is_due(self, now: float, phase: str) -> bool:
        """Return whether the file should be written now."""
        return phase != self._phase or now >= self._next

    def write(self, now: float, progress: dict[str, Any]) -> None:
        """Write the file, with the wall-clock time added.

        Raises:
            WriteError: the file can't be written now.
        """
        text = json.dumps({"time": time.time()} | progress) + "\n"
        self._writer.write(self._path, progress["phase"], partial(replace, self._path, text))
        self._phase, self._next = progress["phase"], now + FILE_SECONDS
