"""What the machine says to each peer: its State, absolute, from nothing but the machine's own state (P6, P9, P13)."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.lag import step_of
from actors.algorithms.schedules import sampling_temperature
from actors.ledger.machine import Machine
from actors.ledger.rows import Attempt, Group, GroupState, Settings
from schemas.messages import (
    Beat,
    EnginePeer,
    InferenceBeat,
    InferenceState,
    ObserverBeat,
    ObserverState,
    RewardBeat,
    RewardPeer,
    RewardState,
    RolloutBeat,
    RolloutState,
    State,
    Ticket,
    TrainerBeat,
    TrainerState,
)


def states(machine: Machine, progress: Callable[[], dict[str, Any]] = dict) -> dict[bytes, State | None]:
    """The State of every peer that may see a new one since the last call (P6); None: it is gone, forget it.

    Args:
        machine: whose changes have been committed.
        progress: what observers are shown; called when there is one to tell.
    """
    replies = _Replies(machine, progress)
    return {identity.encode(): replies.state_for(identity) for identity in machine.take_concerned()}


class _Replies:
    """The States of one round: what all peers are told is put together once."""

    def __init__(self, machine: Machine, make_progress: Callable[[], dict[str, Any]]) -> None:
        self._machine, self._make_progress = machine, make_progress

    def state_for(self, identity: str) -> State | None:
        """The State of one peer; None when it is gone and shall be forgotten."""
        machine, beat = self._machine, self._machine.peers.beat_of(identity)
        if beat is None:
            if not machine.peers.is_visitor(identity):
                return None
            refusal = machine.peers.refusal_of(identity) or machine.failure
            return ObserverState(**self._common | {"refusal": refusal}, progress={})
        if isinstance(beat, RolloutBeat):
            return self._rollout_state(identity)
        if isinstance(beat, RewardBeat):
            return self._reward_state(identity, beat)
        if isinstance(beat, TrainerBeat):
            return self._trainer_state(identity, beat)
        if isinstance(beat, InferenceBeat):
            return InferenceState(
                **self._common,
                update_id=machine.engines.update_id,
                manifest=machine.engines.target,
                update=machine.updates.current,
            )
        assert isinstance(beat, ObserverBeat)
        return ObserverState(**self._common, progress=self._progress)

    @cached_property
    def _progress(self) -> dict[str, Any]:
        return self._make_progress()

    @cached_property
    def _common(self) -> dict[str, Any]:
        machine = self._machine
        return {
            "run": machine.run,
            "term": machine.term,
            "phase": machine.phase,
            "step": machine.trained_step,
            "max_steps": machine.settings.max_steps,
            "refusal": machine.failure,
        }

    @cached_property
    def _engines(self) -> list[EnginePeer]:
        return [
            EnginePeer(name=b.name, boot_id=b.boot_id, url=b.url, policy=b.policy, load=b.load)
            for b in self._machine.engines.serving(self._machine.peers.all(InferenceBeat)).values()
            if b.policy is not None
        ]

    @cached_property
    def _rewards(self) -> list[RewardPeer]:
        return [
            RewardPeer(name=b.name, boot_id=b.boot_id, address=b.address, load=b.load)
            for b in self._machine.peers.all(RewardBeat).values()
            if b.phase == "running"
        ]

    def _rollout_state(self, identity: str) -> RolloutState:
        machine, named = self._machine, self._machine.rollout_holds.of(identity)
        held = [machine.groups.rows[ordinal] for ordinal in sorted(machine.groups.held_by.get(identity, ()))]
        mine = {(group.ordinal, group.attempt): group for group in held}
        return RolloutState(
            **self._common,
            tickets=[ticket_of(group, machine.settings) for hold, group in mine.items() if hold not in named],
            release=_pairs(sorted(named - mine.keys())),
            engines=self._engines,
            live_engines=sorted(beat.boot_id for beat in machine.peers.all(InferenceBeat).values()),
            rewards=self._rewards,
        )

    def _reward_state(self, identity: str, beat: RewardBeat) -> RewardState:
        failed = {(failure.ordinal, failure.attempt) for failure in beat.failures}
        named = sorted(self._machine.reward_holds.of(identity))
        return RewardState(
            **self._common,
            packer_address=self._machine.packer_address,
            release=_pairs(hold for hold in named if hold in failed or self._ended(*hold)),
        )

    def _ended(self, ordinal: int, attempt: int) -> bool:
        """Whether a reward actor shall let an attempt go: its ordinal is settled or dropped, or it has failed (P13).

        It keeps an older attempt than the newest: the first good copy wins, whichever it is (P11).
        """
        group = self._machine.groups.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED:
            return True
        return group.attempt == attempt and group.outcome is Attempt.FAILED

    def _trainer_state(self, identity: str, beat: TrainerBeat) -> TrainerState:
        machine, gang = self._machine, self._machine.gang
        pinned = machine.evaluations.policy
        versions = (machine.evaluations.next_version(), pinned.version if pinned else None)
        return TrainerState(
            **self._common,
            order=gang.order_for(identity, beat),
            incarnation=gang.incarnation if identity in gang.members.values() else 0,
            lineage=gang.lineage,
            checkpoint=gang.checkpoint,
            recorded_step=machine.recorded_step,
            keep_version=min([machine.settings.max_steps, *(v for v in versions if v is not None)]),
            update=machine.updates.current,
        )


def ticket_of(group: Group, settings: Settings) -> Ticket:
    """The order to sample the current attempt of a group."""
    train, step = group.policy is None, step_of(group.position, settings.groups_per_step)
    heat = sampling_temperature(step, settings.temperature, settings.temperature_schedule, settings.max_steps)
    return Ticket(
        ordinal=group.ordinal,
        attempt=group.attempt,
        purpose=group.purpose,
        environment=group.example.environment,
        index=group.example.index,
        example_key=group.example.key,
        seed=group.seed,
        num_completions=group.num_completions,
        temperature=heat if train else settings.eval_temperature,
        top_p=settings.top_p if train else 1.0,
        top_k=settings.top_k if train else 0,
        min_p=settings.min_p if train else 0.0,
        max_tokens=settings.max_tokens,
        min_version=group.min_version,
        policy=group.policy,
    )


def _pairs(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def beats_by_role(machine: Machine) -> dict[str, list[Beat]]:
    """Live peers by actor, for progress and metrics."""
    roles: dict[str, list[Beat]] = {}
    for beat in machine.peers.all(Beat).values():
        roles.setdefault(beat.kind.removesuffix("_beat"), []).append(beat)
    return roles
