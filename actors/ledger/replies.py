"""What the machine says to each peer: its State, absolute, from nothing but the machine's own state (P6, P9, P13)."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actors.ledger import engines
from actors.ledger.rows import Group, GroupState, Settings
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

if TYPE_CHECKING:
    from actors.ledger.machine import Machine


def state_for(machine: "Machine", identity: str, progress: dict[str, Any]) -> State | None:
    """The State of one peer; None when it is gone and shall be forgotten."""
    beat = machine.peers.beat_of(identity)
    refusal = machine.refused.get(identity, "")
    if beat is None:
        if machine.peers.is_superseded(identity):
            refusal = "a newer process has the same name; every process needs its own --name"
        if not refusal:
            return None
        return ObserverState(**_common(machine, refusal), progress={})
    common = _common(machine, refusal)
    if isinstance(beat, RolloutBeat):
        return _rollout_state(machine, identity, beat, common)
    if isinstance(beat, RewardBeat):
        return RewardState(**common, packer_address=machine.packer_address, release=_released_by_reward(machine, beat))
    if isinstance(beat, TrainerBeat):
        return _trainer_state(machine, identity, beat, common)
    if isinstance(beat, InferenceBeat):
        return InferenceState(**common, update_id=machine.engines.update_id, manifest=machine.engines.target)
    assert isinstance(beat, ObserverBeat)
    return ObserverState(**common, progress=progress)


def _common(machine: "Machine", refusal: str) -> dict[str, Any]:
    return {
        "run": machine.run,
        "term": machine.term,
        "phase": machine.phase,
        "step": machine.trained_step,
        "max_steps": machine.settings.max_steps,
        "refusal": refusal or machine.failure,
    }


def _rollout_state(machine: "Machine", identity: str, beat: RolloutBeat, common: dict[str, Any]) -> RolloutState:
    named = {(ordinal, attempt) for ordinal, attempt in beat.holds.tolist()}
    held = [machine.groups.rows[ordinal] for ordinal in sorted(machine.groups.held_by.get(identity, ()))]
    tickets = [ticket_of(group, machine.settings) for group in held if (group.ordinal, group.attempt) not in named]
    mine = {(group.ordinal, group.attempt) for group in held}
    serving = engines.clean(machine.peers.all(InferenceBeat))
    return RolloutState(
        **common,
        tickets=tickets,
        release=_pairs(hold for hold in sorted(named) if hold not in mine),
        engines=[
            EnginePeer(name=b.name, boot_id=b.boot_id, url=b.url, policy=b.policy, load=b.load)
            for b in serving.values()
            if b.policy is not None
        ],
        rewards=[
            RewardPeer(name=b.name, boot_id=b.boot_id, address=b.address, load=b.load)
            for b in machine.peers.all(RewardBeat).values()
            if b.phase == "running"
        ],
    )


def _released_by_reward(machine: "Machine", beat: RewardBeat) -> NDArray[np.int64]:
    """Holds of a reward actor that are settled or dropped, or whose failure has been noted (P13)."""
    failed = {(failure.ordinal, failure.attempt) for failure in beat.failures}
    released = []
    for ordinal, attempt in beat.holds.tolist():
        group = machine.groups.known(ordinal)
        ended = group is None or group.state is not GroupState.ISSUED
        if ended or (ordinal, attempt) in failed:
            released.append((ordinal, attempt))
    return _pairs(released)


def _trainer_state(machine: "Machine", identity: str, beat: TrainerBeat, common: dict[str, Any]) -> TrainerState:
    gang, due = machine.gang, machine.evaluations.next_version()
    pinned = machine.evaluations.policy
    keep = min(
        due if due is not None else machine.settings.max_steps, pinned.version if pinned else machine.settings.max_steps
    )
    order = gang.order_for(identity, beat)
    member = identity in gang.members.values()
    return TrainerState(
        **common,
        order=order,
        incarnation=gang.incarnation if member else 0,
        lineage=gang.lineage,
        checkpoint=gang.checkpoint,
        recorded_step=machine.recorded_step,
        keep_version=keep,
    )


def ticket_of(group: Group, settings: Settings) -> Ticket:
    """The order to sample the current attempt of a group."""
    train = group.policy is None
    return Ticket(
        ordinal=group.ordinal,
        attempt=group.attempt,
        purpose=group.purpose,
        environment=group.example.environment,
        index=group.example.index,
        example_key=group.example.key,
        seed=group.seed,
        num_completions=group.num_completions,
        temperature=settings.temperature if train else settings.eval_temperature,
        top_p=settings.top_p if train else 1.0,
        max_tokens=settings.max_tokens,
        min_version=group.min_version,
        policy=group.policy,
    )


def _pairs(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def beats_by_role(machine: "Machine") -> dict[str, list[Beat]]:
    """Live peers by actor, for progress and metrics."""
    roles: dict[str, list[Beat]] = {}
    for beat in machine.peers.all(Beat).values():
        roles.setdefault(beat.kind.removesuffix("_beat"), []).append(beat)
    return roles
