"""Numbers of processes that the packer wants, from heartbeats and the ledger's state.

The rules are in `actors.algorithms.scaling`. Consumes a look at the machine every half second. Emits numbers by role
for screens, for `actors up` and as a metric.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from actors.algorithms.scaling import ROLES, Bounds, Sample, State, Use, look
from actors.ledger import GroupState, Machine
from actors.packer.progress import Progress
from schemas.config import RunConfig
from schemas.messages import InferenceHeartbeat, RewardHeartbeat, RolloutHeartbeat, TrainerHeartbeat

log = structlog.get_logger("packer")

STORED = "scale"
"""Key of the numbers in the ledger."""


class Scaling:
    """Numbers of processes of the roles in `scale`.

    Args:
        config: configuration of the run.
        stored: numbers by role that an earlier packer of the run has wanted; empty: none.
    """

    def __init__(self, config: RunConfig, stored: Mapping[str, int]) -> None:
        self._config = config
        self._bounds = {str(role): Bounds(keys.min, keys.most) for role, keys in config.scale.roles.items()}
        at_start: dict[str, int] = {str(role): number for role, number in config.processes.items()}
        self._state = State(at_start | {role: stored[role] for role in self._bounds if role in stored})
        self._has_begun = bool(stored)
        """True once numbers have been wanted, from which later ones follow."""

    @property
    def wanted(self) -> dict[str, int]:
        """Processes wanted of each role in `scale`."""
        return {role: self._state.wanted[role] for role in self._bounds}

    @property
    def values(self) -> dict[str, Any]:
        """Values for screens and for `actors up`."""
        keys = self._config.scale.roles
        return {
            "wanted": self.wanted,
            "because": self._state.because,
            "cost": sum(one.price * self._state.wanted[role] for role, one in keys.items()),
        }

    def look(self, now: float, machine: Machine, progress: Progress) -> bool:
        """Take in the state of the run; return whether other numbers are wanted now.

        Args:
            now: monotonic time.
            machine: the ledger's machine.
            progress: progress of the run, for the groups in each stage.
        """
        if not self._bounds:
            return False
        queues = progress.queues
        sample = moment(now, machine, self._uses(machine, queues["sampling"][0], queues["scoring"][0]))
        if not self._has_begun:
            # the run may have been started with more processes than `up` names, as on a cluster
            there = {role: max(use.there, self._config.processes[role]) for role, use in sample.roles.items()}  # type: ignore[index]
            bounded = {role: min(max(there[role], bound.least), bound.most) for role, bound in self._bounds.items()}
            self._state = replace(self._state, wanted=there | bounded)
            self._has_begun = sample.counts
        before = self._state.wanted
        self._state = look(self._state, sample, self._bounds, self._config.scale.window)
        for role, number in self._state.wanted.items():
            if number != before[role]:
                log.info("scaled", role=role, before=before[role], wanted=number, because=self._state.because)
        return self._state.wanted != before

    def _uses(self, machine: Machine, sampling: int, scoring: int) -> dict[str, Use]:
        config = self._config
        rollouts = [one for one in machine.peers.all(RolloutHeartbeat).values() if one.phase == "running"]
        rewards = [one for one in machine.peers.all(RewardHeartbeat).values() if one.phase == "running"]
        engines = [
            one
            for one in machine.peers.all(InferenceHeartbeat).values()
            if one.phase == "running" and one.engine_state in ("clean", "updating")
        ]
        slots, places = config.rollout.max_concurrent_groups, config.reward.max_concurrent_groups
        return {
            "inference": Use(len(engines), sum(one.load > 0 for one in engines), sampling),
            "reward": Use(len(rewards), sum(min(one.load, places) for one in rewards) / places, scoring),
            # groups of draining actors are not in the way of new ones
            "rollout": Use(len(rollouts), sum(max(0, slots - one.free_slots) for one in rollouts) / slots, sampling),
        }


def moment(now: float, machine: Machine, uses: Mapping[str, Use]) -> Sample:
    """Return the state of a run now.

    Args:
        now: seconds on the caller's clock.
        machine: the ledger's machine.
        uses: use of each role.
    """
    trainers, counts = machine.peers.all(TrainerHeartbeat), machine.groups.counts("train")
    has_gang = bool(machine.gang.members) and all(one in trainers for one in machine.gang.members.values())
    in_flight = counts[GroupState.ISSUED]
    return Sample(
        now,
        # an evaluation comes first, and then says nothing about training
        machine.phase == "running"
        and has_gang
        and not machine.evaluations.open
        and all(uses[role].there for role in ROLES),
        counts[GroupState.COMPOSED] == 0,
        in_flight,
        machine.groups.num_issued["train"] - in_flight,
        uses,
    )
