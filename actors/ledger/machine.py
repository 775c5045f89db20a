"""The protocol: beats, scored groups and the time go in; rows to write and States to send come out.

One round of the packer is `heard`/`scored` for all that has come, then `decide`, then the store commits
`take_changes()`, and only then do the States of `states()` and the batches of composed steps leave the process. So
whatever a peer can know is durable (P9, P18), without a rule at each place where something is sent.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from actors.algorithms.lag import min_version, tickets_allowed
from actors.ledger import engines, replies
from actors.ledger.evaluations import Evaluations
from actors.ledger.gang import Gang
from actors.ledger.groups import Groups, Verdict
from actors.ledger.peers import Peers
from actors.ledger.rows import Changes, ExampleRef, Group, GroupFacts, GroupState, Settings, Step
from actors.ledger.steps import Steps
from schemas.errors import ProtocolError
from schemas.messages import (
    Beat,
    InferenceBeat,
    ObserverBeat,
    RewardBeat,
    RolloutBeat,
    RunPhase,
    State,
    TrainerBeat,
    fingerprint,
)

MIN_POISON_IN_A_ROW = 32
"""Poison drops without one settlement between them after which the run fails: nothing can be sampled or scored."""


class Machine:
    """The run's absolute state.

    Args:
        settings: the protocol's part of the configuration.
        run, term: identity of the ledger and of this start of the packer (P1, P2).
        now: the packer's monotonic clock.
        draw: the example of the next train ordinal, drawn once (P10).
        eval_examples: what each evaluation asks for.
        packer_address: where reward actors send scored groups.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        term: int,
        now: float,
        draw: Callable[[], ExampleRef],
        eval_examples: Sequence[ExampleRef] = (),
        packer_address: str = "",
    ) -> None:
        self.settings, self.run, self.term, self.packer_address = settings, run, term, packer_address
        self._draw, self._eval_examples = draw, list(eval_examples)
        self._changes = Changes()
        self.groups = Groups(settings, self._changes)
        self.steps = Steps(settings, self._changes)
        self.gang = Gang(settings.num_ranks, settings.max_steps, self._changes)
        self.engines = engines.Engines()
        self.evaluations = Evaluations(settings, bool(self._eval_examples), self._changes)
        self.peers = Peers(settings.lease)
        self.trained_step = 0
        self.durable_step = 0
        self.digests: dict[int, str] = {}
        self.refused: dict[str, str] = {}
        self.finished_evals: list[int] = []
        self.recorded_step = 0
        self.failure = ""
        self._reissue_after = now
        self._expected_holders: set[str] = set()
        """Holders that the stored rows name and that have not beaten yet."""
        self._touched: set[str] = set()
        self._everybody = False

    # --- what comes in -------------------------------------------------------------------------------------------

    def heard(self, now: float, identity: str, beat: Beat) -> None:
        """A beat (P3, P5, P9, P11)."""
        self._touched.add(identity)
        if beat.fingerprint is not None and beat.fingerprint != fingerprint():
            self.refused[identity] = (
                f"{beat.name} speaks messages {beat.fingerprint}, the packer {fingerprint()}: "
                "they are different builds of grpo-actors; install the same one everywhere"
            )
        if identity in self.refused or (beat.run and beat.run != self.run):
            return
        counts, replaced = self.peers.heard(now, identity, beat)
        if replaced is not None:
            self._gone(replaced)
        if not counts:
            return
        if isinstance(beat, RolloutBeat):
            self._heard_rollout(now, identity, beat)
        elif isinstance(beat, RewardBeat):
            self._heard_reward(now, beat)

    def scored(self, facts: GroupFacts) -> Verdict:
        """A scored group; call it with the payload at hand, which is stored in the same commit."""
        verdict = self.groups.settle(facts)
        if verdict is Verdict.SETTLED:
            self.digests[facts.ordinal] = facts.digest
            self._close_eval(facts.ordinal)
        self._everybody = True
        return verdict

    def decide(self, now: float) -> None:
        """Everything that follows from what has been heard and from the time."""
        for identity in self.peers.expire(now):
            self._gone(identity)
        if self._expected_holders and now >= self._reissue_after:
            for identity in sorted(self._expected_holders - set(self.peers.identities())):
                self._gone(identity)
            self._expected_holders.clear()
        self._fail_late(now)
        self._follow_trainer()
        self._follow_evaluations()
        self._retarget_engines()
        self._compose()
        if not self.failure:
            self._grant(now)
        self._fail_hopeless()

    def note_recorded(self, step: int) -> None:
        """The reporter has written this step down."""
        self.recorded_step = step
        self._changes.values["recorded_step"] = step
        self._everybody = True

    # --- what goes out -------------------------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """What has changed since the last call; to be committed before anything below is sent."""
        taken = replace(self._changes)
        self._changes.groups, self._changes.steps, self._changes.values = {}, [], {}
        return taken

    def states(self, progress: dict[str, Any] | None = None) -> dict[bytes, State | None]:
        """The State of every peer that may see a new one since the last call."""
        identities = {*self.peers.identities(), *self._touched} if self._everybody else self._touched
        self._touched, self._everybody = set(), False
        return {identity.encode(): replies.state_for(self, identity, progress or {}) for identity in identities}

    def batches_wanted(self) -> list[tuple[str, TrainerBeat, Step]]:
        """Per live rank the composed steps it should have and does not: its next one, and one more to have at hand."""
        beats = self.peers.all(TrainerBeat)
        wanted = []
        for identity in self.gang.members.values():
            beat = beats[identity]
            if beat.incarnation == self.gang.incarnation:
                ahead = [self.steps.composed.get(beat.next_step + i) for i in range(2)]
                wanted += [(identity, beat, step) for step in ahead if step and step.step not in beat.received]
        return wanted

    @property
    def phase(self) -> RunPhase:
        """Where the run stands (P27): the end is a durable last checkpoint and the last evaluation."""
        if self.failure:
            return "failed"
        if self.trained_step < self.settings.max_steps:
            return "running" if self.groups.num_issued["train"] else "starting"
        done = self.durable_step >= self.settings.max_steps and self.evaluations.next_version() is None
        return "done" if done and self.recorded_step >= self.settings.max_steps else "finishing"

    @property
    def everybody_left(self) -> bool:
        """Whether every live peer has said that it is done (P27); who only watches is not waited for."""
        beats = self.peers.all(Beat).values()
        return all(beat.phase == "done" or isinstance(beat, ObserverBeat) for beat in beats)

    # --- restore -------------------------------------------------------------------------------------------------

    def restore(
        self, now: float, groups: Iterable[Group], steps: list[Step], values: dict[str, Any], digests: dict[int, str]
    ) -> None:
        """Take over a stored ledger. Nothing is issued again before one full lease has passed (P8)."""
        reported = {dropped.ordinal for step in steps for dropped in step.dropped}
        self.groups.restore(groups, values.get("num_issued", {}), values.get("counters", {}), reported)
        self.steps.restore(steps)
        gang = values.get("gang", {"incarnation": 0, "checkpoint": 0})
        self.gang.restore(gang["incarnation"], gang["checkpoint"])
        rows = self.groups.rows.values()
        self.evaluations.restore(
            values.get("evals_done", []),
            [(g.ordinal, g.policy) for g in rows if g.policy and g.state is GroupState.ISSUED],
        )
        self.trained_step = max(
            (g.step or 0 for g in rows if g.state in (GroupState.TRAINED, GroupState.DURABLE)), default=0
        )
        self.recorded_step = values.get("recorded_step", 0)
        self.digests = digests
        for group in rows:
            group.issued_at = now
        self._reissue_after = now + self.settings.lease
        self._expected_holders = set(self.groups.held_by)

    # --- rules ---------------------------------------------------------------------------------------------------

    def _heard_rollout(self, now: float, identity: str, beat: RolloutBeat) -> None:
        for failure in beat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
            self._close_eval(failure.ordinal)
        for ordinal, attempt in beat.holds.tolist():
            group = self.groups.known(ordinal)
            free = group is not None and group.state is GroupState.ISSUED and group.holder is None
            if group is not None and free and group.attempt == attempt and not _failed(beat, ordinal, attempt):
                self.groups.take_back(group, identity, now)

    def _heard_reward(self, now: float, beat: RewardBeat) -> None:
        for failure in beat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
            self._close_eval(failure.ordinal)
        for ordinal, attempt in beat.holds.tolist():
            group = self.groups.known(ordinal)
            if group is not None and group.attempt == attempt and group.scoring_since is None:
                group.scoring_since = now

    def _gone(self, identity: str) -> None:
        """A peer's lease ended, or a newer process has taken its name: what it held is free at once (P3)."""
        held = list(self.groups.held_by.get(identity, ()))
        self.groups.holder_gone(identity)
        for ordinal in held:
            self._close_eval(ordinal)
        self._touched.add(identity)
        self._everybody = True

    def _fail_late(self, now: float) -> None:
        """Attempts past their deadline fail as `timeout` (P12)."""
        s = self.settings
        for holder in list(self.groups.held_by.values()):
            for group in [self.groups.rows[ordinal] for ordinal in sorted(holder)]:
                scoring = group.scoring_since
                late = (
                    now
                    > (group.issued_at + s.group_timeout if scoring is None else scoring + s.reward_timeout) + s.lease
                )
                if late:
                    doing = "sampled" if scoring is None else "scored"
                    self.groups.fail(group.ordinal, group.attempt, "timeout", f"not {doing} in time by {group.holder}")
                    self._close_eval(group.ordinal)
                    self._everybody = True

    def _follow_trainer(self) -> None:
        beats = self.peers.all(TrainerBeat)
        if self.gang.update(beats, self.steps.chains):
            self._everybody = True
            if self.gang.members:
                self._roll_back_to(self.gang.checkpoint)
        trained = self.gang.trained_step(beats)
        if trained is not None and trained > self.trained_step:
            self._advance(trained)
        self._note_checkpoints(beats)

    def _roll_back_to(self, checkpoint: int) -> None:
        """A new lineage trains the steps after its checkpoint again, from the same groups (P18, P21)."""
        for group in self.groups.rows.values():
            after = group.step is not None and group.step > checkpoint
            if after and group.state in (GroupState.TRAINED, GroupState.DURABLE):
                self.groups.move(group, GroupState.COMPOSED)
        self.trained_step = min(self.trained_step, checkpoint)

    def _advance(self, trained: int) -> None:
        for number in range(self.trained_step + 1, trained + 1):
            if number not in self.steps.composed:
                raise ProtocolError(
                    f"the trainer says it is past step {number}, but this ledger has composed only "
                    f"{self.steps.last}: it has lost commits. Set ledger.sync: node, or start a new run."
                )
            for ordinal in self.steps.composed[number].ordinals:
                self.groups.move(self.groups.rows[ordinal], GroupState.TRAINED)
        self.trained_step = trained
        self._everybody = True

    def _note_checkpoints(self, beats: dict[str, TrainerBeat]) -> None:
        members = [beats[i] for i in self.gang.members.values() if i in beats]
        if len(members) < self.settings.num_ranks:
            return
        good = [{c.step for c in beat.checkpoints if self.steps.chains.get(c.step) == c.chain} for beat in members]
        durable = max((step for step in set.intersection(*good) if step <= self.trained_step), default=0)
        if durable <= self.durable_step:
            return
        for number in range(self.durable_step + 1, durable + 1):
            for ordinal in self.steps.composed[number].ordinals:
                self.groups.move(self.groups.rows[ordinal], GroupState.DURABLE)
        self.durable_step = durable
        self._everybody = True

    def _follow_evaluations(self) -> None:
        beats = engines.clean(self.peers.all(InferenceBeat))
        policy = self.evaluations.policy
        if policy is not None:
            receivable = any(m.policy == policy for m in self.gang.published(self.peers.all(TrainerBeat)))
            if not receivable and not any(beat.policy == policy for beat in beats.values()) and self.gang.members:
                for ordinal in self.evaluations.void():
                    self.groups.drop(self.groups.rows[ordinal], "eval_void")
            return
        version = self.evaluations.next_version()
        served = next((b.policy for b in beats.values() if b.policy and b.policy.version == version), None)
        if version is None or served is None or (version == self.settings.max_steps and self.durable_step < version):
            return
        new = [
            self.groups.new(example, self._seed_of(f"eval {i}"), self.settings.eval_completions, version, policy=served)
            for i, example in enumerate(self._eval_examples)
        ]
        self.evaluations.begin(served, [group.ordinal for group in new])

    def _close_eval(self, ordinal: int) -> None:
        group = self.groups.rows.get(ordinal)
        if ordinal < 0 and group is not None and group.state is not GroupState.ISSUED:
            version = self.evaluations.closed(ordinal)
            if version is not None:
                self.finished_evals.append(version)
                self._everybody = True

    def _retarget_engines(self) -> None:
        published = self.gang.published(self.peers.all(TrainerBeat))
        served = engines.served_version(self.peers.all(InferenceBeat))
        if self.engines.retarget(published, self.evaluations.policy, self.evaluations.next_version(), served or 0):
            self._everybody = True

    def _compose(self) -> None:
        while self.steps.last <= self.trained_step + 1:
            step, stale = self.steps.compose_next(self.groups, self.digests)
            for group in stale:  # its example comes back under a new ordinal
                self._new_train_group(group.example, origin=group.ordinal)
            if step is None and not stale:
                return

    def _grant(self, now: float) -> None:
        """Give tickets to the rollouts that asked, the emptiest first: evaluations, then repeats, then new ordinals."""
        rollouts = self.peers.all(RolloutBeat)
        served = engines.served_version(self.peers.all(InferenceBeat))
        if served is None:
            return
        slots = {i: self._free_slots(i, beat) for i, beat in rollouts.items() if beat.phase == "running"}
        ready = self._ready_to_reissue(now)
        while slots:
            identity = max(slots, key=lambda i: slots[i])
            if slots[identity] <= 0:
                return
            group = self._next_ticket(ready, served, alone=not self._holds_anything(identity))
            if group is None:
                return
            self.groups.give(group, identity, now)
            self._touched.add(identity)
            slots[identity] = 0 if group.alone else slots[identity] - 1

    def _free_slots(self, identity: str, beat: RolloutBeat) -> int:
        """What the beat says less the tickets it has not seen (P9); 0 while it holds one that is to be alone."""
        named = {ordinal for ordinal, _ in beat.holds.tolist()}
        held = self.groups.held_by.get(identity, set())
        if any(self.groups.rows[ordinal].alone for ordinal in held):
            return 0
        return beat.free_slots - len(held - named)

    def _holds_anything(self, identity: str) -> bool:
        return bool(self.groups.held_by.get(identity))

    def _ready_to_reissue(self, now: float) -> list[Group]:
        """Waiting groups, evaluations first, that no live reward actor is about to settle."""
        if now < self._reissue_after:
            waiting = [o for o in self.groups.waiting if self.groups.rows[o].attempt == 0]
        else:
            waiting = list(self.groups.waiting)
        scoring = (
            {
                (o, a)
                for beat in self.peers.all(RewardBeat).values()
                for o, a in beat.holds.tolist()
                if not _failed(beat, o, a)
            }
            if waiting
            else set()
        )
        rows = [self.groups.rows[ordinal] for ordinal in waiting]
        ready = [group for group in rows if (group.ordinal, group.attempt) not in scoring]
        return sorted(ready, key=lambda group: (group.ordinal >= 0, abs(group.ordinal)), reverse=True)

    def _next_ticket(self, ready: list[Group], served: int, alone: bool) -> Group | None:
        for i in range(len(ready) - 1, -1, -1):
            group = ready[i]
            if group.min_version <= served and (alone or not group.alone):
                return ready.pop(i)
        s = self.settings
        dropped = self.groups.num_dropped("train")
        issued = self.groups.num_issued["train"]
        if tickets_allowed(issued, dropped, served, s.groups_per_step, s.max_async_level, s.max_steps) <= 0:
            return None
        return self._new_train_group(self._draw())

    def _new_train_group(self, example: ExampleRef, origin: int | None = None) -> Group:
        s = self.settings
        ordinal = self.groups.num_issued["train"]
        oldest = min_version(ordinal - self.groups.num_dropped("train"), s.groups_per_step, s.max_async_level)
        return self.groups.new(example, self._seed_of(str(ordinal)), s.group_size, oldest, origin=origin)

    def _seed_of(self, what: str) -> int:
        """Sampling seed of a group; completion i adds i (P10). Below 2^53, so that JSON keeps it whole."""
        digest = hashlib.sha256(f"{self.settings.seed} {what}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    def _fail_hopeless(self) -> None:
        limit = max(MIN_POISON_IN_A_ROW, 4 * self.settings.groups_per_step)
        if self.groups.poison_in_a_row >= limit and not self.failure:
            self.failure = (
                f"{limit} groups in a row were dropped as poison after three failed attempts each; "
                f"the last failure: {self.groups.last_failure}"
            )
            self._everybody = True


def _failed(beat: Any, ordinal: int, attempt: int) -> bool:
    return any(f.ordinal == ordinal and f.attempt == attempt for f in beat.failures)
