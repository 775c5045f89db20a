"""Directives for each peer, computed from the machine alone (P6: a directive has absolute values, so may be lost).

A directive lists tickets unknown to the peer (P9) and groups to release (P13).
"""

from collections.abc import Callable, Iterable
from functools import cache, cached_property
from operator import is_
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.lag import step_of
from actors.algorithms.schedules import sampling_temperature
from actors.ledger.machine import Machine
from actors.ledger.rows import AttemptOutcome, Group, GroupState, Settings
from schemas import limits
from schemas.messages import (
    Directive,
    Heartbeat,
    InferenceDirective,
    InferenceHeartbeat,
    ObserverDirective,
    ObserverHeartbeat,
    RewardDirective,
    RewardHeartbeat,
    RolloutDirective,
    RolloutHeartbeat,
    Ticket,
    TrainerDirective,
    TrainerHeartbeat,
)

DirectiveT = TypeVar("DirectiveT", bound=Directive)


def directives(machine: Machine, progress: Callable[[], dict[str, Any]] = dict) -> dict[bytes, Directive | None]:
    """Return the new directive of each concerned peer since the last call (P6), by identity; None: the peer is gone.

    Args:
        machine: state machine with all changes committed.
        progress: returns the figures shown to observers; called at most once, and only if an observer is concerned.
    """
    replies = _Replies(machine, progress)
    own, others = machine.take_concerned()
    # rollout actors at rest have one directive, and their heartbeats do not ask for it (`Machine.renewed`)
    if replies.is_new_for_idle:
        others |= {identity for identity in machine.peers.all(RolloutHeartbeat) if machine.is_idle(identity)} - own
    told = {identity.encode(): replies.directive_for(identity) for identity in own}
    return told | {identity.encode(): replies.directive_for(identity, own_part=False) for identity in others}


def loads(machine: Machine) -> NDArray[np.int16]:
    """Return the newest loads of engines and reward actors, for the answers to all rollout actors (`Message.loads`)."""
    return machine.shown.loads


class _Replies:
    """Builder of the directives of one round; parts common to several peers are computed once."""

    def __init__(self, machine: Machine, make_progress: Callable[[], dict[str, Any]]) -> None:
        self._machine = machine
        self._progress = cache(make_progress)  # all observers of a round see the same figures, computed at most once

    def directive_for(self, identity: str, own_part: bool = True) -> Directive | None:
        """Return the directive of one peer; None if the peer is gone.

        Args:
            identity: name and boot id of the peer.
            own_part: False if only values for all peers have changed since the peer's last directive.
        """
        machine, heartbeat = self._machine, self._machine.peers.heartbeat_of(identity)
        if heartbeat is None:
            # a visitor (refused, or waiting for its name) is answered too, or it would think the packer silent
            machine.told.pop(identity, None)
            if not machine.peers.is_visitor(identity):
                return None
            refusal = machine.peers.refusal_of(identity)
            # a name may come free again, so the process may wait; any other refusal is final
            taken = machine.peers.is_refused_for_name(identity)
            return ObserverDirective(
                **self._common | {"refusal": refusal or machine.failure}, progress={}, name_taken=taken
            )
        if isinstance(heartbeat, RolloutHeartbeat):
            return self._rollout_directive(identity, own_part)
        if isinstance(heartbeat, RewardHeartbeat):
            return self._reward_directive(identity, heartbeat)
        if isinstance(heartbeat, TrainerHeartbeat):
            return self._trainer_directive(identity, heartbeat)
        if isinstance(heartbeat, InferenceHeartbeat):
            return self._for_engines
        assert isinstance(heartbeat, ObserverHeartbeat)
        return ObserverDirective(**self._common, progress=self._progress())

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
    def _trainer_ready(self) -> bool:
        return bool(self._machine.gang.published(self._machine.peers.all(TrainerHeartbeat)))

    @cached_property
    def _for_rollouts(self) -> dict[str, Any]:
        """Fields that are equal in the directives of all rollout actors."""
        shown = self._machine.shown
        return self._common | shown.fields | {RolloutDirective.loads: shown.loads}

    @cached_property
    def _idle(self) -> RolloutDirective:
        """The directive of every rollout actor without a group."""
        nothing = _pairs(())
        return self._alike(
            RolloutDirective,
            (self._machine.shown.fields,),
            lambda: self._for_rollouts | {"tickets": [], "scoring": nothing, "release": nothing},
        )

    @cached_property
    def _for_engines(self) -> InferenceDirective:
        """The directive of every engine."""
        machine = self._machine
        own = {
            "update_id": machine.engines.update_id,
            "manifest": machine.engines.target,
            "update": machine.updates.current,
            "trainer_ready": self._trainer_ready,
            "turn": machine.turns.number,
            "has_turn": machine.turns.may_use("engines"),
        }
        return self._alike(InferenceDirective, tuple(own.values()), lambda: self._common | own)

    def _alike(self, kind: type[DirectiveT], own: tuple[object, ...], make: Callable[[], dict[str, Any]]) -> DirectiveT:
        """Return the directive that many peers have: the same object as before, while its values are.

        Args:
            kind: kind of the directive.
            own: values that the directive is made of, without `_common`; objects that are replaced when they change.
            make: returns the fields.
        """
        directive, common, before = self._machine.told_alike.get(kind, (None, {}, ()))
        if not isinstance(directive, kind) or common != self._common or not all(map(is_, before, own)):
            directive = kind(**make())
            self._machine.told_alike[kind] = directive, self._common, own
        return directive

    @property
    def is_new_for_idle(self) -> bool:
        """True if the rollout actors without a group were told something else before."""
        before = self._machine.told_alike.get(RolloutDirective)
        return before is None or self._idle is not before[0]

    def _rollout_directive(self, identity: str, own_part: bool) -> RolloutDirective:
        machine = self._machine
        if machine.is_idle(identity):
            machine.told.pop(identity, None)
            return self._idle
        if not own_part and (last := machine.told.get(identity)) is not None:
            directive = last.model_copy(update=self._for_rollouts)
        else:
            directive = self._busy(identity)
        machine.told[identity] = directive
        return directive

    def _busy(self, identity: str) -> RolloutDirective:
        machine, named = self._machine, self._machine.rollout_holds.of(identity)
        held = [machine.groups.rows[ordinal] for ordinal in sorted(machine.groups.held_by.get(identity, ()))]
        mine = {(group.ordinal, group.attempt): group for group in held}
        # the rest follows with later directives, once the peer has named the first ones
        unseen = [group for hold, group in mine.items() if hold not in named][: limits.DIRECTIVE_TICKETS]
        return RolloutDirective(
            **self._for_rollouts,
            tickets=[ticket_of(group, machine.settings) for group in unseen],
            scoring=_pairs(sorted(hold for hold in named & mine.keys() if machine.reward_holds.is_named(hold))),
            # named by the actor but not its own any more: settled, failed, dropped, or given to another
            release=_pairs(sorted(named - mine.keys())),
        )

    def _reward_directive(self, identity: str, heartbeat: RewardHeartbeat) -> RewardDirective:
        # the machine has taken in the failures of this heartbeat, so the actor need not repeat them
        failed = {(failure.ordinal, failure.attempt) for failure in heartbeat.failures}
        named = sorted(self._machine.reward_holds.of(identity))
        release = [hold for hold in named if hold in failed or self._ended(*hold)]
        fields = self._common | {"packer_address": self._machine.packer_address, "release": _pairs(release)}
        if release:
            return RewardDirective(**fields)
        return self._alike(RewardDirective, (self._machine.packer_address,), lambda: fields)

    def _ended(self, ordinal: int, attempt: int) -> bool:
        """Return whether a reward actor may release an attempt: ordinal settled or dropped, or attempt failed (P13).

        An attempt older than the newest is kept, since the first good copy wins, of whichever attempt (P11).
        """
        group = self._machine.groups.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED:
            return True
        return group.attempt == attempt and group.outcome is AttemptOutcome.FAILED

    def _trainer_directive(self, identity: str, heartbeat: TrainerHeartbeat) -> TrainerDirective:
        machine, gang = self._machine, self._machine.gang
        pinned = machine.evaluations.policy
        versions = (machine.evaluations.next_version(), pinned.version if pinned else None)
        return TrainerDirective(
            **self._common,
            order=gang.order_for(identity, heartbeat),
            # only a member may take batches of the incarnation
            incarnation=gang.incarnation if identity in gang.members.values() else 0,
            lineage=gang.lineage,
            checkpoint=gang.checkpoint,
            recorded_step=machine.recorded_step,
            # the trainer must not remove versions that an evaluation still needs
            keep_version=min([machine.settings.max_steps, *(v for v in versions if v is not None)]),
            update=machine.updates.current,
            has_turn=machine.turns.may_use("trainer"),
        )


def ticket_of(group: Group, settings: Settings) -> Ticket:
    """Return the ticket for the current attempt of a group; evaluations are sampled with other parameters."""
    rule = settings.eval_rule(group.example.environment)
    sampling, max_tokens = rule.sampling, rule.max_tokens or settings.max_tokens
    if group.policy is None:  # of a train group
        max_tokens = settings.max_tokens
        step, start = step_of(group.position, settings.groups_per_step), settings.sampling.temperature
        temperature = sampling_temperature(step, start, settings.temperature_schedule, settings.max_steps)
        sampling = settings.sampling.model_copy(update={"temperature": temperature})
    return Ticket(
        ordinal=group.ordinal,
        attempt=group.attempt,
        purpose=group.purpose,
        environment=group.example.environment,
        index=group.example.index,
        example_key=group.example.key,
        seed=group.seed,
        num_completions=group.num_completions,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=list(settings.stop),
        ignore_eos=settings.ignore_eos and group.policy is None,
        min_version=group.min_version,
        policy=group.policy,
    )


def _pairs(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def heartbeats_by_role(machine: Machine) -> dict[str, list[Heartbeat]]:
    """Return the newest heartbeats of live peers by role (`rollout`, `reward`, …), for progress and metrics."""
    return {kind.kind.removesuffix("_heartbeat"): list(found.values()) for kind, found in machine.peers.by_type.items()}
