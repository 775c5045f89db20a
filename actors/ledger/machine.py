"""The protocol: beats, scored groups and the time go in; rows to write and States to send come out.

One round of the packer is `heard`/`scored` for all that has come, then `decide`, then the store commits
`take_changes()`, and only then do the States of `states()` and the batches of composed steps leave the process. So
whatever a peer can know is durable (P9, P18), without a rule at each place where something is sent.
"""

import hashlib
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from actors.algorithms.lag import min_version, tickets_allowed
from actors.ledger.engines import Engines
from actors.ledger.evaluations import Evaluations
from actors.ledger.folded import Folded
from actors.ledger.gang import Gang
from actors.ledger.groups import Groups, Verdict
from actors.ledger.holds import Holds
from actors.ledger.peers import Peers
from actors.ledger.rows import Attempt, Changes, ExampleRef, Group, GroupFacts, GroupState, Settings, Step
from actors.ledger.steps import Steps
from actors.ledger.updates import Updates
from schemas.errors import ProtocolError
from schemas.messages import (
    Beat,
    InferenceBeat,
    ObserverBeat,
    Policy,
    RewardBeat,
    RolloutBeat,
    RunPhase,
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
        self.engines = Engines(self._changes)
        self.updates = Updates(term)
        self.evaluations = Evaluations(settings, bool(self._eval_examples), self.groups, self._changes)
        self.peers = Peers(settings.lease, term)
        self.rollout_holds, self.reward_holds = Holds(), Holds()
        self.folded = Folded()
        self.trained_step = 0
        self.durable_step = 0
        self.recorded_step = 0
        self.finished_evals: list[int] = []
        self.failure = ""
        self._digests: dict[int, str] = {}
        """Of the payloads of settled groups, until a step takes them."""
        self._reissue_after = now
        self._expected_holders: set[str] = set()
        """Holders that the stored rows name and that have not beaten yet."""
        self._asking: dict[str, int] = {}
        """Free slots of the rollouts that have some, less the tickets they have not seen (P9)."""
        self._returning: list[tuple[ExampleRef, int]] = []
        """Examples that shall be issued again, with the ordinal that they were dropped under; before new ones."""
        self._saved_steps: list[int] = []
        """Steps of which the live gang has a good checkpoint."""
        self._touched: set[str] = set()
        self._everybody = False
        self._told: tuple[Any, ...] = ()

    # --- what comes in -------------------------------------------------------------------------------------------

    def heard(self, now: float, identity: str, beat: Beat) -> None:
        """A beat (P1, P3, P5, P9, P11).

        Raises:
            ProtocolError: it names an ordinal or step that this ledger does not know (P5).
        """
        self._touched.add(identity)
        refusal = _refusal(beat, self.settings)
        if refusal:
            self.peers.refuse(identity, refusal)
        if beat.run and beat.run != self.run:
            self.peers.refuse(identity)  # State tells it our run, and it starts over; what it holds is not of ours
        before = self.peers.beat_of(identity)
        counts, replaced = self.peers.heard(now, identity, beat)
        if replaced is not None:
            self._gone(now, replaced)
        if not counts:
            return
        if _shown_to_others(beat) != _shown_to_others(before):
            self._everybody = True
        if isinstance(beat, RolloutBeat):
            self._heard_rollout(now, identity, beat)
        elif isinstance(beat, RewardBeat):
            self._heard_reward(now, identity, beat)
        elif isinstance(beat, TrainerBeat):
            self._heard_trainer(beat)

    def scored(self, facts: GroupFacts) -> Verdict:
        """A scored group; call it with the payload at hand, which is stored in the same commit.

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        verdict = self.groups.settle(facts)
        if verdict is Verdict.SETTLED and facts.ordinal >= 0:
            self._digests[facts.ordinal] = facts.digest
        if verdict is Verdict.FILTERED:
            self._replace_filtered(self.groups.rows[facts.ordinal], 1)
        return verdict

    def stood_still(self, now: float) -> None:
        """The packer itself has heard nobody for a while, stopped or starved: that ends no lease (P8)."""
        self.peers.renew(now)

    def decide(self, now: float) -> None:
        """Everything that follows from what has been heard and from the time."""
        for identity in self.peers.expire(now):
            self._gone(now, identity)
        if self._expected_holders and now >= self._reissue_after:
            for identity in sorted(self._expected_holders.difference(self.peers.identities())):
                self._gone(now, identity)
            self._expected_holders.clear()
        self.groups.fail_late(now)
        for group in self.groups.drop_exhausted():
            if group.resamples:  # else its place is anybody's; here it goes on being counted, or poison would reset it
                self._replace_filtered(group, 0)
        self._follow_trainer()
        self._follow_evaluations()
        self._retarget_engines()
        self._compose()
        self._fold_steps()
        if not self.failure:
            self._grant(now)
        self._fail_hopeless()

    def note_recorded(self, step: int) -> None:
        """The reporter has written this step down."""
        self.recorded_step = step
        self._changes.values["recorded_step"] = step
        self._touched.update(self.gang.members.values())

    def note_evaluated(self, versions: Iterable[int]) -> None:
        """The reporter has written these evaluations down; the rows of their groups can go."""
        done = set(versions)
        if not done:
            return
        rows = self.groups.rows.values()
        past = [g.ordinal for g in rows if g.policy and g.policy.version in done and g.state is not GroupState.ISSUED]
        for group in self.groups.fold(past):
            if group.reason is None:
                self.folded.evaluated += 1
            else:
                self.folded.dropped["eval"][group.reason] += 1
        if past:
            self._changes.values["folded"] = self.folded.record()

    # --- what goes out -------------------------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """What has changed since the last call; to be committed before anything below is sent."""
        taken = replace(self._changes)
        self._changes.groups, self._changes.steps, self._changes.values = {}, [], {}
        self._changes.gone_groups, self._changes.gone_steps = [], []
        return taken

    def take_concerned(self) -> set[str]:
        """The peers that may be told something new since the last call (P6); those that are gone are among them."""
        holders, ended = self.groups.take_concerned()
        identities = self._touched.union(holder for holder in holders if self.peers.beat_of(holder))
        for ordinal in ended:
            identities |= self.rollout_holds.naming(ordinal) | self.reward_holds.naming(ordinal)
        told = (self.phase, self.trained_step, self.engines.update_id, self.failure)
        if self._everybody or told != self._told:
            identities.update(self.peers.identities())
        self._touched, self._everybody, self._told = set(), False, told
        return identities

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
        self, now: float, groups: Iterable[Group], steps: list[Step], values: dict[str, Any], digests: Mapping[int, str]
    ) -> None:
        """Take over a stored ledger. Nothing is issued again before one full lease has passed (P8)."""
        reported = {dropped.ordinal for step in steps for dropped in step.dropped}
        self.folded = Folded.of(values.get("folded"))
        counts = (values.get("num_issued", {}), values.get("counters", {}))
        self.groups.restore(groups, *counts, reported, self.folded, now)
        self.steps.restore(steps, self.folded)
        if "gang" in values:
            self.gang.restore(values["gang"])
        if "target" in values:
            self.engines.restore(values["target"])
        self.evaluations.restore(values.get("evals_done", []))
        rows = self.groups.rows.values()
        past = (GroupState.TRAINED, GroupState.DURABLE)
        folded = self.folded.step
        self.trained_step = max((g.step or 0 for g in rows if g.state in past), default=folded)
        self.durable_step = max((g.step or 0 for g in rows if g.state is GroupState.DURABLE), default=folded)
        self.recorded_step = values.get("recorded_step", 0)
        self._returning = [(ExampleRef(**example), origin) for example, origin in values.get("returning", [])]
        # an evaluation may be done and not yet written down: the reporter's part comes one commit later
        unwritten = {
            g.policy.version
            for g in rows
            if g.policy and g.state is GroupState.SETTLED and str(g.policy.version) not in values.get("evals", {})
        }
        self.finished_evals = [version for version in self.evaluations.done if version in unwritten]
        self._digests = {ordinal: digests[ordinal] for ordinal in self.groups.settled}
        self._reissue_after = now + self.settings.lease
        self._expected_holders = set(self.groups.held_by)

    def fork(self, environments: Collection[str]) -> list[int]:
        """Give up all that came after the newest durable step (P23); returns the ordinals that are `forked`.

        Their examples are issued again, as far as their environments are still there. What a given-up step had told to
        be dropped is told by the next one.
        """
        base = self.durable_step
        untold = [drop.ordinal for step in self.steps.cut(base) for drop in step.dropped]
        self.groups.unreported_drops += untold
        over = (GroupState.DROPPED, GroupState.DURABLE)
        given_up = [g for g in self.groups.rows.values() if g.ordinal >= 0 and g.state not in over]
        for group in given_up:
            self._digests.pop(group.ordinal, None)
            self.groups.drop(group, "forked")
            if group.example.environment in environments:
                self._returning.append((group.example, group.ordinal))
        self._note_returning()
        self.trained_step = min(self.trained_step, base)
        self.recorded_step = min(self.recorded_step, base)
        self._changes.values["recorded_step"] = self.recorded_step
        self.engines.forget(self.gang.lineage)
        self.evaluations.forget_after(base)
        return [group.ordinal for group in given_up]

    # --- rules ---------------------------------------------------------------------------------------------------

    def _heard_rollout(self, now: float, identity: str, beat: RolloutBeat) -> None:
        for failure in beat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
        for ordinal, attempt in self.rollout_holds.update(identity, beat.holds.tolist()):
            self.groups.take_back(ordinal, attempt, identity, now)
        named = self.rollout_holds.of(identity)
        held = [self.groups.rows[ordinal] for ordinal in self.groups.held_by.get(identity, ())]
        unseen = sum((group.ordinal, group.attempt) not in named for group in held)
        takes_more = beat.phase == "running" and not any(group.alone for group in held)
        self._ask(identity, beat.free_slots - unseen if takes_more else 0)

    def _heard_reward(self, now: float, identity: str, beat: RewardBeat) -> None:
        for failure in beat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
        for ordinal, attempt in self.reward_holds.update(identity, beat.holds.tolist()):
            self.groups.scoring(ordinal, attempt, now)

    def _heard_trainer(self, beat: TrainerBeat) -> None:
        self.failure = self.failure or beat.failure
        newest = max([beat.next_step - 1, *(c.step for c in beat.checkpoints), *beat.received.tolist()])
        if newest > self.steps.last:
            raise ProtocolError(
                f"{beat.name} knows step {newest}, but this ledger has composed only {self.steps.last}: it has lost "
                "commits. With ledger.sync: process a power loss does that; set ledger.sync: node, and start a new run."
            )

    def _gone(self, now: float, identity: str) -> None:
        """A peer's lease ended, or a newer process has taken its name: what it held is free at once (P3)."""
        self.groups.holder_gone(identity)
        self.rollout_holds.forget(identity)
        for ordinal, attempt in self.reward_holds.forget(identity):
            if not self.reward_holds.is_named((ordinal, attempt)):
                self.groups.scorer_gone(ordinal, attempt, now)
        self._ask(identity, 0)
        self._touched.add(identity)
        self._everybody = True

    def _ask(self, identity: str, free_slots: int) -> None:
        self._asking.pop(identity, None)
        if free_slots > 0:
            self._asking[identity] = free_slots

    def _follow_trainer(self) -> None:
        beats = self.peers.all(TrainerBeat)
        event = self.gang.update(beats, self.steps.chains)
        if event:
            self._everybody = True
        if event == "formed":
            if self.durable_step:  # else a rank may have looked before there was one
                self.failure = self.failure or self.gang.blind_rank(beats)
            self._roll_back_to(self.gang.checkpoint)
        trained = self.gang.trained_step(beats)
        if trained is not None and trained > self.trained_step:
            self._move(self.trained_step, trained, GroupState.TRAINED)
            self.trained_step = trained
        self._saved_steps = self.gang.saved_steps(beats, self.steps.chains)
        durable = min(max(self._saved_steps, default=0), self.trained_step)
        if durable > self.durable_step:
            self._move(self.durable_step, durable, GroupState.DURABLE)
            self.durable_step = durable

    def _roll_back_to(self, checkpoint: int) -> None:
        """A new lineage trains the steps after its checkpoint again, from the same groups (P18, P21)."""
        if checkpoint < self.folded.step:
            self.failure = (
                f"no good checkpoint from step {self.folded.step} on is left, and the ledger keeps groups from there "
                "on only; the trainer's log names what is wrong with each. Bring a checkpoint back, or go on from an "
                "older one in a new output_dir (model.path: .../checkpoints/step_N)"
            )
            return
        self._move(checkpoint, self.trained_step, GroupState.COMPOSED)
        self.trained_step = min(self.trained_step, checkpoint)
        self.durable_step = min(self.durable_step, checkpoint)

    def _move(self, after: int, last: int, state: GroupState) -> None:
        """The groups of the steps after + 1 … last."""
        for step in range(after + 1, last + 1):
            self.groups.move(self.steps.composed[step].ordinals, state, step)

    def _fold_steps(self) -> None:
        """Fold the steps up to the oldest checkpoint that is kept, when there are two at least (P21)."""
        if len(self._saved_steps) < 2:
            return
        kept = self.trained_step - self.settings.keep_steps
        last = min(self._saved_steps[0], self.durable_step, self.recorded_step, kept)
        if last <= self.folded.step:
            return
        self.folded.step, self.folded.chain = last, self.steps.chains[last]
        for step in self.steps.fold(last):
            dropped = [drop.ordinal for drop in step.dropped]
            self.groups.fold([*step.ordinals, *dropped])
            self.folded.trained += len(step.ordinals)
            self.folded.trained_twice += self.folded.finished.add([*step.ordinals, *dropped])
            self.folded.dropped["train"].update(drop.reason for drop in step.dropped)
        self._changes.values["folded"] = self.folded.record()

    def _follow_evaluations(self) -> None:
        evaluations = self.evaluations
        if evaluations.policy is not None and not evaluations.open:
            self.finished_evals.append(evaluations.finish())
        served = [b.policy for b in self.engines.serving(self.peers.all(InferenceBeat)).values() if b.policy]
        published = [manifest.policy for manifest in self.gang.published(self.peers.all(TrainerBeat))]
        if evaluations.policy is not None and evaluations.policy not in [*served, *published] and self.gang.members:
            evaluations.void()
        if evaluations.policy is not None:
            return
        version = evaluations.next_version()
        if version is None or (version == self.settings.max_steps and self.durable_step < version):
            return
        policy = next((policy for policy in served if policy.version == version), None)
        if policy is not None:
            self._evaluate(policy)
        elif version < max(self.engines.floor, min((p.version for p in published), default=0)):
            evaluations.skip(version)  # engines (P22) or trainer are past it: it can't be had any more

    def _evaluate(self, policy: Policy) -> None:
        for i, example in enumerate(self._eval_examples):
            seed = self._seed_of(f"eval {i}")
            self.groups.new(example, seed, self.settings.eval_completions, policy.version, policy=policy)
        self.evaluations.begin(policy)

    def _retarget_engines(self) -> None:
        trainers, engines = self.peers.all(TrainerBeat), self.peers.all(InferenceBeat)
        published, target = self.gang.published(trainers), self.engines.target
        if not self.updates.under_way:  # its members are receiving the target
            served = self.engines.served_version(engines)
            due, pinned = self.evaluations.next_version(), self.evaluations.policy
            self.engines.retarget(published, pinned, due, served or 0)
            target = self.engines.target
        held = target if target in published else None  # a dead trainer's versions went with it
        if self.updates.decide(held, engines, trainers.get(self.gang.members.get(0, ""))):
            self._everybody = True

    def _compose(self) -> None:
        """Compose up to two steps ahead of the trainer: its next one, and one more to have at hand."""
        while self.steps.last <= self.trained_step + 1:
            step, stale = self.steps.compose_next(self.groups, self._digests)
            for group in stale:  # its example comes back under a new ordinal
                self._new_train_group(group.example, group.ordinal, group.resamples)
            for ordinal in step.ordinals if step else (group.ordinal for group in stale):
                del self._digests[ordinal]
            if step is None and not stale:
                return

    def _grant(self, now: float) -> None:
        """Give tickets to the rollouts that asked, the emptiest first: evaluations, then repeats, then new ordinals."""
        served = self.engines.served_version(self.peers.all(InferenceBeat))
        if served is None or not self._asking:
            return
        ready, allowed = self._ready_to_reissue(now), self._allowed(served)
        emptiest = [(-slots, identity) for identity, slots in self._asking.items()]
        heapq.heapify(emptiest)
        while emptiest and (ready or allowed):
            slots, identity = emptiest[0]
            group = _take_ready(ready, served, alone=identity not in self.groups.held_by)
            if group is None and allowed:
                group, allowed = self._new_train_group(*self._next_example()), allowed - 1
            if group is None:  # what is ready is for a rollout that holds nothing, or for newer engines
                heapq.heappop(emptiest)
                continue
            self.groups.give(group, identity, now)
            left = 0 if group.alone else -slots - 1
            self._ask(identity, left)
            if left:
                heapq.heapreplace(emptiest, (-left, identity))
            else:
                heapq.heappop(emptiest)

    def _ready_to_reissue(self, now: float) -> list[Group]:
        """Waiting groups, the first one last: evaluations first, none that a live reward actor is about to settle."""
        ready = []
        for group in (self.groups.rows[ordinal] for ordinal in self.groups.waiting):
            ended = group.outcome is Attempt.FAILED or not self.reward_holds.is_named((group.ordinal, group.attempt))
            if group.attempt == 0 or (now >= self._reissue_after and ended):
                ready.append(group)
        return sorted(ready, key=lambda group: (group.ordinal >= 0, abs(group.ordinal)), reverse=True)

    def _allowed(self, served: int) -> int:
        """New train ordinals that may be issued (P15)."""
        s, issued, dropped = self.settings, self.groups.num_issued["train"], self.groups.num_dropped("train")
        return tickets_allowed(issued, dropped, served, s.groups_per_step, s.max_async_level, s.max_steps, s.surplus)

    def _next_example(self) -> tuple[ExampleRef, int | None]:
        """Of the next train ordinal, and whose example it was before."""
        if not self._returning:
            return self._draw(), None
        example, origin = self._returning.pop(0)
        self._note_returning()
        return example, origin

    def _note_returning(self) -> None:
        self._changes.values["returning"] = [[asdict(example), origin] for example, origin in self._returning]

    def _replace_filtered(self, group: Group, filtered: int) -> None:
        """Another example in the place of a group that has just been dropped: as many are undropped as before (P15)."""
        self._new_train_group(self._draw(), group.ordinal, group.resamples + filtered)

    def _new_train_group(self, example: ExampleRef, origin: int | None = None, resamples: int = 0) -> Group:
        s = self.settings
        ordinal = self.groups.num_issued["train"]
        position = ordinal - self.groups.num_dropped("train")
        oldest = min_version(position, s.groups_per_step, s.max_async_level, s.surplus)
        seed = self._seed_of(str(ordinal))
        return self.groups.new(example, seed, s.group_size, oldest, origin=origin, resamples=resamples)

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


def _take_ready(ready: list[Group], served: int, alone: bool) -> Group | None:
    """The first waiting group, which is the last here, that engines at this version and such a rollout may have."""
    for i in range(len(ready) - 1, -1, -1):
        group = ready[i]
        if group.min_version <= served and (alone or not group.alone):
            return ready.pop(i)
    return None


def _refusal(beat: Beat, settings: Settings) -> str:
    """Why this process can't be part of the run; empty where it can."""
    if beat.fingerprint is not None and beat.fingerprint != fingerprint():
        return (
            f"{beat.name} speaks messages {beat.fingerprint}, the packer {fingerprint()}: "
            "they are different builds of grpo-actors; install the same one everywhere"
        )
    if isinstance(beat, TrainerBeat) and not 0 <= beat.rank < beat.num_ranks == settings.num_ranks:
        return (
            f"{beat.name} is rank {beat.rank} of {beat.num_ranks}, the packer's trainer.num_ranks is "
            f"{settings.num_ranks}; start all processes with the same configuration"
        )
    return ""


def _shown_to_others(beat: Beat | None) -> tuple[Any, ...] | None:
    """What the States of other peers carry of this one and what can't wait for their next beat; its load can."""
    if isinstance(beat, InferenceBeat):
        return beat.phase, beat.engine_state, beat.policy, beat.url
    if isinstance(beat, RewardBeat):
        return beat.phase, beat.address
    return None
