"""State machine of the protocol: consumes heartbeats, scored groups and the time; emits rows and directives.

A round of the packer: `heard` and `scored` for all that has arrived, then `decide`. Then the store commits
`take_changes()`, and only afterwards the directives of `directives()` and the batches of composed steps are sent. So
everything that a peer can know is durable (P9, P18).

A group moves through these states (P21), each by one method:

    issued `_grant`   settled `scored`   composed `_compose`   trained and durable `_follow_trainer`
    dropped `scored` (a verdict), `_compose` (stale) or `_give_up_after` (a fork or a rewind)
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from actors.algorithms.fair_shares import drawable, limits_of, overtaken_of, slow_groups
from actors.algorithms.lag import min_version, newest_allowed, tickets_allowed
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.composed_steps import ComposedSteps
from actors.ledger.engines import Engines
from actors.ledger.evaluations import Evaluations
from actors.ledger.gang import Gang
from actors.ledger.groups import Groups, Verdict
from actors.ledger.holds import Holds
from actors.ledger.neighbours import Neighbourhood, Shown
from actors.ledger.peers import Peers
from actors.ledger.returned_examples import Draw, ReturnedExamples
from actors.ledger.rows import (
    AttemptOutcome,
    Changes,
    ExampleRef,
    Group,
    GroupFacts,
    GroupState,
    RewindOrder,
    Rewound,
    Settings,
    Step,
)
from actors.ledger.turns import Turns
from actors.ledger.waiting import Offers
from actors.ledger.weight_updates import PATIENCE_TIMEOUTS, Updates
from schemas.errors import ProtocolError
from schemas.messages import (
    Directive,
    Heartbeat,
    InferenceHeartbeat,
    ObserverHeartbeat,
    RewardHeartbeat,
    RolloutDirective,
    RolloutHeartbeat,
    RunPhase,
    TrainerHeartbeat,
    fingerprint,
)

MIN_POISON_IN_A_ROW = 32
"""Poison drops in a row, without a settlement between, after which the run fails: nothing can be sampled or scored."""
REWARD_ERRORS = ("reward_raised", "reward_invalid")
"""Reasons of failed attempts that are errors of a reward function. A late function is none."""
COMPACTED_GROUPS_PER_ROUND = 1024
"""Greatest number of groups compacted in a round (at least one step); further rounds compact the rest."""


class Machine:
    """Absolute state of a run.

    Args:
        settings: part of the configuration that the protocol reads.
        run, term: identity of the ledger (P1) and of this start of the packer (P2).
        now: the time on the clock of leases (P8): the packer's monotonic clock, which stands still while no heartbeats
            are read. `arrived` and `listened` below are on this clock; left out, it never stands still.
        draw: draws the example of the next train ordinal, called once per ordinal (P10).
        eval_examples: examples of each evaluation.
        packer_address: address to which reward actors send scored groups.
        still_there: tells whether an example dropped by a fork can be issued again.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        term: int,
        now: float,
        draw: Draw,
        eval_examples: Sequence[ExampleRef] = (),
        packer_address: str = "",
        still_there: Callable[[ExampleRef], bool] = lambda example: True,
    ) -> None:
        self.settings, self.run, self.term, self.packer_address = settings, run, term, packer_address
        self._eval_examples = list(eval_examples)
        self._changes = Changes()
        self.examples = ReturnedExamples(draw, still_there, self._changes)
        self.groups = Groups(settings, self._changes)
        self.steps = ComposedSteps(settings, self._changes)
        self.gang = Gang(settings.num_ranks, settings.max_steps, self._changes)
        self.engines = Engines(self._changes)
        self.updates = Updates(term, PATIENCE_TIMEOUTS * settings.weights_timeout)
        self.turns = Turns(settings.turns, term, now)
        labels = {example.environment for example in self._eval_examples}
        self.evaluations = Evaluations(settings, labels, self.groups, self._changes)
        self.peers = Peers(settings.lease)
        self.rollout_holds, self.reward_holds = Holds(), Holds()
        self.compacted = CompactedHistory()
        self.trained_step = 0
        """Newest step trained by all ranks."""
        self.durable_step = 0
        """Newest trained step with a good checkpoint."""
        self.recorded_step = 0
        """Newest step in the run's record (metrics file)."""
        self.finished_evals: list[int] = []
        """Versions with a finished, not yet recorded evaluation."""
        self.failure = ""
        """Reason of the run's failure; empty: none."""
        self.digests: dict[int, str] = {}
        """Payload digests of settled groups not yet in a step, by ordinal."""
        self._reissue_after = self._listened = now
        """End of the pause in which nothing is issued again, and the time of the newest round; clock of leases."""
        self._expected_holders: set[str] = set()
        """Holders named by stored rows, without a heartbeat since the packer's restart."""
        self._asking: dict[str, int] = {}
        """Free slots by rollout actor, less the tickets not yet named by the actor (P9); only numbers above 0."""
        self.rewind_order: RewindOrder | None = None
        """Return to an older checkpoint, to be carried out when the next gang forms (P23)."""
        self.rewound: Rewound | None = None
        """Return carried out in this round; cleared by the packer."""
        self._dead_chains: set[str] = set()
        """Chains of steps abandoned by forks; a trainer may still have checkpoints of these steps."""
        self._saved_steps: list[int] = []
        """Steps with a good checkpoint of the live gang, ascending."""
        self._served: int | None = None
        """Newest version of an engine open for new work, and the state of peers and lineages that gave it."""
        self._served_at = (-1, -1)
        self._touched: set[str] = set()
        """Peers to which something may have to be said."""
        self._everybody = False
        """True if all peers must get a directive."""
        self.neighbourhood = Neighbourhood()
        self.told: dict[str, RolloutDirective] = {}
        """Newest directive of each rollout actor with groups, by identity."""
        self.told_alike: dict[type[Directive], tuple[Directive, dict[str, Any], tuple[object, ...]]] = {}
        """Newest directive of all peers of a kind without a part of their own, and the values that it was made of."""
        self._told: tuple[Any, ...] = ()
        """Values for all peers, as last sent."""

    # --- what comes in -------------------------------------------------------------------------------------------

    def heard(self, now: float, identity: str, heartbeat: Heartbeat, arrived: float | None = None) -> None:
        """Take in a heartbeat: run (P1), name (P3), unknown ordinals (P5), tickets (P9), failures (P11).

        Args:
            now: the time.
            identity: name and boot id of the peer.
            heartbeat: the message.
            arrived: time at which the heartbeat was read, on the clock of leases. None: now.

        Raises:
            ProtocolError: the heartbeat names an ordinal or step that this ledger does not know (P5), or a newer term
                (P2).
        """
        # every heartbeat is answered, also a refused or a late one (P6)
        self._touched.add(identity)
        at = now if arrived is None else arrived
        if self._says_nothing_new(identity, heartbeat) and self._renew(at, identity, heartbeat, heartbeat.sequence):
            return
        # two packers of one run: the one with the newer term is followed, and this one ends (P2)
        if heartbeat.run == self.run and heartbeat.term > self.term:
            raise ProtocolError(
                f"{heartbeat.name} has heard term {heartbeat.term} of this run, and this packer has term {self.term}: "
                "another packer has taken over with another copy of the ledger. If this copy is a backup that was put "
                "in its place on purpose, start all other processes of the run again, `actors top` and "
                "`actors status` too"
            )
        refusal, foreign = _refusal(heartbeat, self.settings), bool(heartbeat.run) and heartbeat.run != self.run
        if refusal or foreign:  # a process of another run learns of this run by its directive; its groups are not ours
            self.lost(now, identity)
            self.peers.refuse(identity, refusal)
        before = self.peers.heartbeat_of(identity)
        counts, replaced = self.peers.heard(at, identity, heartbeat)
        if replaced is not None:
            self._gone(now, replaced)
        if not counts:  # a visitor's or an old heartbeat is answered, nothing more
            return
        # rollout actors connect to engines and reward actors by directives: a change must not wait for their next
        # heartbeat
        if _shown_to_others(heartbeat) != _shown_to_others(before):
            self.tell_everybody()
        if isinstance(heartbeat, RolloutHeartbeat):
            self._heard_rollout(now, identity, heartbeat)
        elif isinstance(heartbeat, RewardHeartbeat):
            self._heard_reward(now, identity, heartbeat)
        elif isinstance(heartbeat, TrainerHeartbeat):
            self._heard_trainer(heartbeat)

    def renewed(self, arrived: float, identity: str, heartbeat: Heartbeat, sequence: int) -> bool:
        """Renew the lease of a peer without work by a heartbeat that repeats its newest one, but for the number.

        Args:
            arrived: time at which the repetition was read, on the clock of leases.
            identity: name and boot id of the peer.
            heartbeat: the heartbeat at rest (`Heartbeat.at_rest`) that is repeated.
            sequence: number of the repetition.

        Returns:
            False if there is more to do: `heard` takes the whole heartbeat in.
        """
        if self.peers.heartbeat_of(identity) is not heartbeat or not self.is_idle(identity):
            return False
        if not self._renew(arrived, identity, heartbeat, sequence):
            return False
        # `replies.directives` finds changes for all rollout actors at rest
        if not isinstance(heartbeat, RolloutHeartbeat):
            self._touched.add(identity)
        return True

    def scored(self, facts: GroupFacts) -> Verdict:
        """Take in a scored group. If the verdict is SETTLED, the caller stores the payload in the same commit.

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        verdict = self.groups.settle(facts)
        if verdict is Verdict.SETTLED and facts.ordinal >= 0:
            self.digests[facts.ordinal] = facts.digest
        if verdict is Verdict.FILTERED:
            self._replace_filtered(self.groups.rows[facts.ordinal], 1)
        return verdict

    def lost(self, now: float, identity: str) -> None:
        """End the lease of a peer now, if any: connection lost (P3), or member of another run (P1)."""
        if self.peers.heartbeat_of(identity) is not None:
            self.peers.forget(identity)
            self._gone(now, identity)

    def decide(self, now: float, listened: float | None = None) -> None:
        """Apply all rules to the heartbeats and groups taken in so far and to the time; call once per round.

        Args:
            now: the time.
            listened: the time on the clock of leases; `heard` has been called for every heartbeat read before. None:
                now.
        """
        self._listened = now if listened is None else listened
        for identity in self.peers.expire(self._listened):
            self._gone(now, identity)
        if self._expected_holders and self._listened >= self._reissue_after:
            # holders from before the restart had a whole lease to come back
            for identity in sorted(self._expected_holders.difference(self.peers.identities())):
                self._gone(now, identity)
            self._expected_holders.clear()
        # after all of the round's groups were settled: a good copy wins over failures and deadlines (P11)
        self.groups.fail_late(now)
        for group in self.groups.drop_exhausted():
            # a replacement keeps the place's count of filtered groups; without such a count any new ordinal will do
            if group.resamples:
                self._replace_filtered(group, 0)
        # the trainer first: all rules below read its trained and durable steps
        self._follow_trainer()
        # evaluations before engines: an engine's target must not pass the policy of an evaluation (P26)
        self._follow_evaluations()
        self._compose()
        self._take_turns()
        # engines at rest load nothing: the newest version is theirs once they have their turn
        if self.turns.may_use("engines"):
            self._retarget_engines(now)
        self._compact_steps()
        if not self.failure:
            self._grant(now)
        self._fail_hopeless()

    def note_recorded(self, step: int) -> None:
        """Note the newest step in the record."""
        self.recorded_step = step
        self._changes.values["recorded_step"] = step
        # the trainer keeps and repeats a report until a directive names its step as recorded
        self._touched.update(self.gang.members.values())

    def note_evaluated(self, versions: Iterable[int]) -> None:
        """Note evaluations in the record, and compact the rows of their groups."""
        done = set(versions)
        if not done:
            return
        rows = self.groups.rows.values()
        past = [g.ordinal for g in rows if g.policy and g.policy.version in done and g.state is not GroupState.ISSUED]
        for group in self.groups.compact(past):
            if group.reason is None:
                self.compacted.evaluated += 1
            else:
                self.compacted.dropped["eval"][group.reason] += 1
        if past:
            self._changes.values["folded"] = self.compacted.record()

    # --- what goes out -------------------------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """Return the changes since the last call; commit them before any message of the round is sent."""
        # a shallow copy takes the containers; all parts of the machine share the object that is emptied here
        taken = replace(self._changes)
        self._changes.groups, self._changes.steps, self._changes.values = {}, [], {}
        self._changes.gone_groups, self._changes.gone_steps = [], []
        return taken

    def tell_everybody(self) -> None:
        """Answer all peers in the next round, also peers for which nothing has changed."""
        self._everybody = True

    def take_concerned(self) -> tuple[set[str], set[str]]:
        """Return the peers, gone ones included, for which something may have changed since the last call (P6).

        Returns:
            peers whose own part may have changed; and further ones, for which only values for all peers have changed.
        """
        holders, ended = self.groups.take_concerned()
        identities = self._touched.union(holder for holder in holders if self.peers.heartbeat_of(holder))
        for ordinal in ended:
            identities |= self.rollout_holds.naming(ordinal) | self.reward_holds.naming(ordinal)
        # values that concern all peers
        told = (self.phase, self.trained_step, self.engines.update_id, self.failure)
        everybody = set(self.peers.identities()) if self._everybody or told != self._told else set()
        self._touched, self._everybody, self._told = set(), False, told
        return identities, everybody - identities

    @property
    def shown(self) -> Shown:
        """Engines and reward actors, as all rollout actors are told of them."""
        return self.neighbourhood.shown(self.run, self.peers, self.engines)

    def is_idle(self, identity: str) -> bool:
        """Return whether a rollout actor has no group, by its newest heartbeat and by the ledger."""
        return not self.rollout_holds.of(identity) and not self.groups.held_by.get(identity)

    def batches_wanted(self) -> list[tuple[str, TrainerHeartbeat, Step]]:
        """Return (identity, heartbeat, step) of each composed step to send to a rank: the next and one in advance.

        Steps named as received in the rank's heartbeat are left out.
        """
        if not self.turns.may_use("trainer"):
            return []
        heartbeats = self.peers.all(TrainerHeartbeat)
        wanted = []
        for identity in self.gang.members.values():
            heartbeat = heartbeats[identity]
            # a rank that has not followed the gang's order yet would drop the batch
            if heartbeat.incarnation == self.gang.incarnation:
                ahead = [self.steps.composed.get(heartbeat.next_step + i) for i in range(2)]
                wanted += [
                    (identity, heartbeat, step) for step in ahead if step and step.step not in heartbeat.received
                ]
        return wanted

    def has_arrived(self, step: int, incarnation: int) -> bool:
        """Return whether no rank will ask for a step's batch any more: all have it, or the gang is gone."""
        if incarnation != self.gang.incarnation:
            return True
        heartbeats = self.peers.all(TrainerHeartbeat)
        of_gang = [heartbeats.get(identity) for identity in self.gang.members.values()]
        return all(
            heartbeat is not None
            and heartbeat.incarnation == incarnation
            and (heartbeat.next_step > step or step in heartbeat.received)
            for heartbeat in of_gang
        )

    @property
    def phase(self) -> RunPhase:
        """Phase of the run (P27): done after a durable last checkpoint, the last evaluation and the last record."""
        if self.failure:
            return "failed"
        if self.rewind_order:  # until a gang has formed, the step to continue from is unknown, whatever the rows say
            return "starting"
        if self.trained_step < self.settings.max_steps:
            return "running" if self.groups.num_issued["train"] else "starting"
        done = self.durable_step >= self.settings.max_steps and self.evaluations.next_version() is None
        return "done" if done and self.recorded_step >= self.settings.max_steps else "finishing"

    @property
    def everybody_left(self) -> bool:
        """True if the heartbeats of all live peers except observers are in phase `done` (P27)."""
        heartbeats = self.peers.all(Heartbeat).values()
        return all(heartbeat.phase == "done" or isinstance(heartbeat, ObserverHeartbeat) for heartbeat in heartbeats)

    # --- restore -------------------------------------------------------------------------------------------------

    def restore(
        self,
        now: float,
        groups: Iterable[Group],
        steps: list[Step],
        values: dict[str, Any],
        digests: Mapping[int, str],
        listened: float | None = None,
    ) -> None:
        """Load a stored ledger. Nothing is issued again before one full lease has passed (P8).

        Args:
            now: the time.
            groups, steps, values: contents of the store.
            digests: payload digests of settled groups, by ordinal.
            listened: the time on the clock of leases. None: now.
        """
        reported = {dropped.ordinal for step in steps for dropped in step.dropped}
        self.compacted = CompactedHistory.of(values.get("folded"))
        counts = (values.get("num_issued", {}), values.get("counters", {}))
        self.groups.restore(groups, *counts, reported, self.compacted, now)
        self.steps.restore(steps, self.compacted)
        if "gang" in values:
            self.gang.restore(values["gang"])
        if "target" in values:
            self.engines.restore(values["target"])
        self.evaluations.restore(values.get("evals_done", []))
        rows = self.groups.rows.values()
        past = (GroupState.TRAINED, GroupState.DURABLE)
        compacted = self.compacted.step
        self.trained_step = max((g.step or 0 for g in rows if g.state in past), default=compacted)
        self.durable_step = max((g.step or 0 for g in rows if g.state is GroupState.DURABLE), default=compacted)
        self.recorded_step = values.get("recorded_step", 0)
        self.examples.restore(values)
        self._dead_chains = set(values.get("dead_chains", []))
        # a finished evaluation may be missing from the record, which follows one commit later
        unwritten = {
            g.policy.version
            for g in rows
            if g.policy and g.state is GroupState.SETTLED and str(g.policy.version) not in values.get("evals", {})
        }
        self.finished_evals = [version for version in self.evaluations.done if version in unwritten]
        self.evaluations.drop_unknown()
        self.digests = {ordinal: digests[ordinal] for ordinal in self.groups.settled}
        # holders have a lease to come back with their work: issued again now, it would be done twice
        self._reissue_after = self.turns.first_at = (now if listened is None else listened) + self.settings.lease
        self._expected_holders = set(self.groups.held_by)
        if values.get("going_back"):
            self.rewind(**values["going_back"])

    def rewind(self, at_most: int | None = None, sample_anew: bool = True) -> None:
        """Order the next gang to start from the newest good checkpoint, even if later steps were trained (P23).

        Only the trainer's disk shows which checkpoint that is, so the order is carried out when the next gang forms.
        A live gang is told to exit. The order is stored, so a packer restarted before then still knows it.

        Args:
            at_most: greatest step of the checkpoint. None: no limit.
            sample_anew: True: drop all groups after the checkpoint and sample again, as a fork does. False: train the
                later steps again from the same groups.
        """
        self.rewind_order = RewindOrder(at_most, sample_anew)
        self._changes.values["going_back"] = asdict(self.rewind_order)
        self.gang.disband()
        if sample_anew:
            # policies of the abandoned history must not sample for the new one
            self.engines.forget(self.gang.lineage)
        if at_most is not None:
            self._roll_back_to(at_most)

    # --- rules ---------------------------------------------------------------------------------------------------

    def _renew(self, at: float, identity: str, heartbeat: Heartbeat, sequence: int) -> bool:
        """Renew the lease of a peer without work, and note what it asks for; return False for a late heartbeat."""
        if not self.peers.renew(at, identity, heartbeat, sequence):
            return False
        if isinstance(heartbeat, RolloutHeartbeat):
            self._ask(identity, heartbeat.free_slots if heartbeat.phase == "running" else 0)
        return True

    def _says_nothing_new(self, identity: str, heartbeat: Heartbeat) -> bool:
        """Return whether a heartbeat only renews a lease: it repeats the one before, of a peer without work."""
        if not heartbeat.quiet:
            return False
        return heartbeat.repeats(self.peers.heartbeat_of(identity)) and self.is_idle(identity)

    def _heard_rollout(self, now: float, identity: str, heartbeat: RolloutHeartbeat) -> None:
        for failure in heartbeat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
        for ordinal, attempt in self.rollout_holds.update(identity, heartbeat.holds.tolist()):
            self.groups.take_back(ordinal, attempt, identity, now)
        named = self.rollout_holds.of(identity)
        held = [self.groups.rows[ordinal] for ordinal in self.groups.held_by.get(identity, ())]
        # free_slots was counted before the unseen tickets arrived, so they are subtracted
        unseen = sum((group.ordinal, group.attempt) not in named for group in held)
        takes_more = heartbeat.phase == "running" and not any(group.alone for group in held)
        self._ask(identity, heartbeat.free_slots - unseen if takes_more else 0)

    def _heard_reward(self, now: float, identity: str, heartbeat: RewardHeartbeat) -> None:
        for failure in heartbeat.failures:
            self.groups.fail(failure.ordinal, failure.attempt, failure.reason, failure.detail)
            group = self.groups.known(failure.ordinal)  # None: compacted, so the failure is an old one
            fatal = self.settings.fails_on_reward_error and failure.reason in REWARD_ERRORS
            if fatal and group is not None and not self.failure:
                example = group.example
                self.failure = (
                    f"a reward function failed (reward.on_error: fail): {failure.detail}; "
                    f"{example.environment} example {example.index} ({example.key})"
                )
        for ordinal, attempt in self.reward_holds.update(identity, heartbeat.holds.tolist()):
            self.groups.scoring(ordinal, attempt, now)

    def _heard_trainer(self, heartbeat: TrainerHeartbeat) -> None:
        self.failure = self.failure or heartbeat.failure
        known = [c.step for c in heartbeat.checkpoints if c.chain not in self._dead_chains]
        if not 0 < heartbeat.incarnation <= self.engines.dead_lineage:  # a gang from before a fork may know later steps
            known += [heartbeat.next_step - 1, *heartbeat.received.tolist()]
        newest = max(known, default=0)
        if newest > self.steps.last:
            raise ProtocolError(
                f"{heartbeat.name} knows step {newest}, but this ledger has composed only {self.steps.last}: it has "
                "lost commits. With ledger.sync: process a power loss does that; set ledger.sync: node, and start a "
                "new run."
            )

    def _gone(self, now: float, identity: str) -> None:
        """Free the groups of a peer at once: the lease has ended, or another process has taken the name (P3)."""
        self.groups.holder_gone(identity)
        self.rollout_holds.forget(identity)
        for ordinal, attempt in self.reward_holds.forget(identity):
            if not self.reward_holds.is_named((ordinal, attempt)):  # another reward actor may have a copy
                self.groups.scorer_gone(ordinal, attempt, now)
        self._ask(identity, 0)
        self._touched.add(identity)
        # rollout actors send the groups of a dead reward actor again, and leave a dead engine (P13)
        self.tell_everybody()

    def _ask(self, identity: str, free_slots: int) -> None:
        self._asking.pop(identity, None)
        if free_slots > 0:
            self._asking[identity] = free_slots

    def _follow_trainer(self) -> None:
        heartbeats, chains = self.peers.all(TrainerHeartbeat), self.steps.chains
        if self.rewind_order and self.rewind_order.at_most is not None:
            # a new gang may start from no later checkpoint than ordered, however good
            chains = {step: chain for step, chain in chains.items() if step <= self.rewind_order.at_most}
        event = self.gang.update(heartbeats, chains)
        if event:
            self.tell_everybody()
        if event == "formed":
            if self.durable_step:  # before the first checkpoint, a rank that sees none is no error
                self.failure = self.failure or self.gang.blind_rank(heartbeats)
            self._roll_back_to(self.gang.checkpoint)
            if self.rewind_order and not self.failure:
                self._carry_out(self.rewind_order, self.gang.checkpoint)
        trained = self.gang.trained_step(heartbeats)
        if trained is not None and trained > self.trained_step:
            self._move(self.trained_step, trained, GroupState.TRAINED)
            self.trained_step = trained
        self._saved_steps = self.gang.saved_steps(heartbeats, self.steps.chains)
        # rank 0 may have saved a step that another rank is still training
        durable = min(max(self._saved_steps, default=0), self.trained_step)
        if durable > self.durable_step:
            self._move(self.durable_step, durable, GroupState.DURABLE)
            self.durable_step = durable

    def _take_turns(self) -> None:
        """Give the devices to trainer or engines, by what is composed and by what the live ones hold."""
        ranks = self.peers.all(TrainerHeartbeat)
        of_the_gang = [ranks[i] for i in self.gang.members.values()]
        composed = any(
            rank.incarnation == self.gang.incarnation and rank.next_step in self.steps.composed for rank in of_the_gang
        )
        engines = self.peers.all(InferenceHeartbeat).values()
        if self.turns.update(self._listened, ranks.values(), engines, composed):
            self.tell_everybody()

    def _roll_back_to(self, checkpoint: int) -> None:
        """Move the steps after a checkpoint back to composed; a new lineage trains the same groups again (P18, P21)."""
        if checkpoint < self.compacted.step:
            self.failure = (
                f"no good checkpoint from step {self.compacted.step} on is left, and the ledger keeps groups from "
                "there on only; the trainer's log names what is wrong with each. Bring a checkpoint back, or go on "
                "from an older one in a new output_dir (model.path: .../checkpoints/step_N)"
            )
            return
        self._move(checkpoint, self.trained_step, GroupState.COMPOSED)
        self.trained_step = min(self.trained_step, checkpoint)
        self.durable_step = min(self.durable_step, checkpoint)

    def _carry_out(self, rewind_order: RewindOrder, base: int) -> None:
        """Complete a return: the gang starts from `base`, so records of later steps are void (P23)."""
        given_up = self._give_up_after(base) if rewind_order.sample_anew else 0
        self.recorded_step = min(self.recorded_step, base)
        self._changes.values["recorded_step"] = self.recorded_step
        self.evaluations.forget_after(base)
        self.finished_evals = [version for version in self.finished_evals if version <= base]
        self.rewind_order, self._changes.values["going_back"] = None, None
        self.rewound = Rewound(base, rewind_order.sample_anew, given_up)

    def _give_up_after(self, base: int) -> int:
        """Drop, as `forked`, all groups not trained by a step up to `base`; return the number.

        Examples that still exist are issued again. A drop reported by an abandoned step is reported again by
        the next step.
        """
        cut = self.steps.cut(base)
        self.groups.unreported_drops += [drop.ordinal for step in cut for drop in step.dropped]
        self._dead_chains.update(step.chain for step in cut)
        self._changes.values["dead_chains"] = sorted(self._dead_chains)
        rows = [self.groups.rows[ordinal] for ordinal in sorted(self.groups.rows) if ordinal >= 0]
        given_up = [g for g in rows if g.state is not GroupState.DROPPED and (g.step is None or g.step > base)]
        for group in given_up:
            self.digests.pop(group.ordinal, None)
            self.groups.drop(group, "forked")
        self.examples.add(given_up)
        return len(given_up)

    def _move(self, after: int, last: int, state: GroupState) -> None:
        """Move the groups of steps after + 1 … last to a state."""
        for step in range(after + 1, last + 1):
            self.groups.move(self.steps.composed[step].ordinals, state, step)

    def _compact_steps(self) -> None:
        """Compact the steps up to the oldest kept checkpoint, if enough checkpoints are kept (P21)."""
        if len(self._saved_steps) < self.settings.min_checkpoints:
            return
        kept = self.trained_step - self.settings.keep_steps
        slice_end = self.compacted.step + max(1, COMPACTED_GROUPS_PER_ROUND // self.settings.groups_per_step)
        last = min(self._saved_steps[0], self.durable_step, self.recorded_step, kept, slice_end)
        if last <= self.compacted.step:
            return
        for step in self.steps.compact(last):
            self.groups.compact(self.compacted.take(step))
        self._changes.values["folded"] = self.compacted.record()

    def _follow_evaluations(self) -> None:
        evaluations = self.evaluations
        if evaluations.policy is not None and not evaluations.open:
            self.finished_evals.append(evaluations.finish())
        if evaluations.policy is None and evaluations.next_version() is None:
            return
        served = [b.policy for b in self.engines.serving(self.peers.all(InferenceHeartbeat)).values() if b.policy]
        published = [manifest.policy for manifest in self.gang.published(self.peers.all(TrainerHeartbeat))]
        if evaluations.policy is not None and evaluations.policy not in [*served, *published] and self.gang.members:
            evaluations.void()
        if evaluations.policy is not None:
            return
        version = evaluations.next_version()
        # the evaluation of the last version waits for its durable checkpoint (P27)
        if version is None or (version == self.settings.max_steps and self.durable_step < version):
            return
        policy = next((policy for policy in served if policy.version == version), None)
        if policy is not None:
            due = evaluations.due(version)
            for i, example in enumerate(self._eval_examples):
                if example.environment in due:
                    # the number among all examples: the seeds of an evaluation do not depend on the others
                    seed, rule = self._seed_of(f"eval {i}"), self.settings.eval_rule(example.environment)
                    self.groups.new(example, seed, rule.completions, policy.version, policy=policy)
            evaluations.begin(policy)
        elif version < max(self.engines.floor, min((p.version for p in published), default=0)):
            evaluations.skip(version)  # engines (P22) or trainer have passed the version; nothing brings it back

    def _retarget_engines(self, now: float) -> None:
        trainers, engines = self.peers.all(TrainerHeartbeat), self.peers.all(InferenceHeartbeat)
        published, target = self.gang.published(trainers), self.engines.target
        if not self.updates.under_way:  # during an update its members receive the target, so it must not change
            served = self._served_version()
            due, pinned = self.evaluations.next_version(), self.evaluations.policy
            self.engines.retarget(published, pinned, due, served or 0, self._newest_allowed())
            target = self.engines.target
        held = target if target in published else None  # a dead trainer's versions are gone
        if self.updates.decide(now, held, engines, trainers.get(self.gang.members.get(0, ""))):
            self.tell_everybody()

    def _served_version(self) -> int | None:
        """Return the newest version of an engine open for new work, computed after a change only."""
        state = (self.peers.changes[InferenceHeartbeat], self.engines.dead_lineage)
        if state != self._served_at:
            self._served_at = state
            self._served = self.engines.served_version(self.peers.all(InferenceHeartbeat))
        return self._served

    def _newest_allowed(self) -> int | None:
        """Return the newest version that engines may serve before older ones have done their work (P22)."""
        s, groups = self.settings, self.groups
        if not s.strict_async_level:
            return None
        under_way = (groups.rows[o].min_version for ordinals in groups.under_way.values() for o in ordinals)
        position = groups.num_issued["train"] - groups.num_dropped("train")
        return newest_allowed(under_way, position, s.groups_per_step, s.max_async_level, s.max_steps)

    def _compose(self) -> None:
        """Compose steps up to two ahead of the newest trained step: the trainer's next step and another in advance."""
        while self.steps.last <= self.trained_step + 1 and not self.rewind_order:
            step, stale = self.steps.compose_next(self.groups, self.digests)
            for group in stale:  # the example comes back under a new ordinal (P17)
                self._new_train_group(group.example, group.ordinal, group.resamples)
            # digests are kept for settled groups alone: a step has its own, a dropped group needs none
            for ordinal in step.ordinals if step else (group.ordinal for group in stale):
                del self.digests[ordinal]
            if step is None and not stale:
                return

    def _grant(self, now: float) -> None:
        """Give tickets to the rollout actors with free slots, most free slots first.

        Evaluations are given first, then waiting train groups, then new ordinals.
        """
        served = self._served_version() if self._asking else None
        if served is None:
            return
        rows, s, issued = self.groups.rows, self.settings, self.groups.num_issued["train"]
        dropped = self.groups.num_dropped("train")
        # new train ordinals allowed now (P15: no ordinal is issued too far ahead of the served version)
        beyond = s.surplus + (min(slow_groups(*self._standing()), s.allowance) if s.allowance else 0)
        allowed = tickets_allowed(issued, dropped, served, s.groups_per_step, s.max_async_level, s.max_steps, beyond)
        if not allowed and not self.groups.waiting:  # most rounds: thousands of actors may be asking for nothing
            return
        again = self._listened >= self._reissue_after
        offers = self.groups.waiting.offers(
            again=again, served=served, min_version=lambda ordinal: rows[ordinal].min_version
        )
        passed_over: deque[Group] = deque()
        # a heap by negated free slots; an entry is replaced after each ticket
        emptiest = [(-slots, identity) for identity, slots in self._asking.items()]
        heapq.heapify(emptiest)
        while emptiest:
            slots, identity = emptiest[0]
            group = self._next_ready(offers, passed_over, alone=identity not in self.groups.held_by)
            if group is None and allowed:
                excluded = self._excluded()
                # all environments have their share under way: no ticket in this round
                allowed = 0 if len(excluded) == len(s.shares) > 0 else allowed
                if allowed:
                    group, allowed = self._new_train_group(*self.examples.next(excluded)), allowed - 1
            if group is None and not passed_over:
                break
            if group is None:  # all groups left need a rollout actor that holds nothing, and this one holds some
                heapq.heappop(emptiest)
                continue
            self.groups.give(group, identity, now, served)
            left = 0 if group.alone else -slots - 1
            self._ask(identity, left)
            if left:
                heapq.heapreplace(emptiest, (-left, identity))
            else:
                heapq.heappop(emptiest)
        offers.close()

    def _next_ready(self, offers: Offers, passed_over: deque[Group], *, alone: bool) -> Group | None:
        """Return the first waiting group suited to the rollout actor; None without any.

        A group still named by a live reward actor is skipped, since it may settle soon.

        Args:
            offers: waiting groups of this round.
            passed_over: earlier groups, for a rollout actor without other groups; extended in place.
            alone: True if the rollout actor holds nothing.
        """
        if alone and passed_over:
            return passed_over.popleft()
        while (ordinal := offers.next()) is not None:
            group = self.groups.rows[ordinal]
            ended = group.outcome is AttemptOutcome.FAILED or not self.reward_holds.is_named((ordinal, group.attempt))
            if group.attempt and not ended:
                continue
            if alone or not group.alone:
                return group
            passed_over.append(group)
        return None

    def _replace_filtered(self, group: Group, filtered: int) -> None:
        """Issue another example in the place of a dropped group; the number of undropped ordinals stays (P15)."""
        self._new_train_group(self.examples.draw(self._excluded()), group.ordinal, group.resamples + filtered)

    def _standing(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the numbers of groups under way and of overtaken groups, by environment."""
        under_way = self.groups.under_way
        numbers = {label: len(ordinals) for label, ordinals in under_way.items()}
        return numbers, overtaken_of(under_way, self.groups.newest_settled)

    def _excluded(self) -> set[str]:
        """Return the environments with their whole share under way, of which nothing is drawn now (P15)."""
        s = self.settings
        if not s.allowance:
            return set()
        rollouts = sum(one.phase == "running" for one in self.peers.all(RolloutHeartbeat).values())
        window = (s.max_async_level + 1) * s.groups_per_step + s.surplus
        limits = limits_of(s.shares, window, s.allowance, rollouts * s.max_concurrent_groups)
        return set(s.shares).difference(drawable(limits, *self._standing()))

    def _new_train_group(self, example: ExampleRef, origin: int | None = None, resamples: int = 0) -> Group:
        s = self.settings
        ordinal = self.groups.num_issued["train"]
        # each drop so far has moved all later ordinals up by a place
        position = ordinal - self.groups.num_dropped("train")
        oldest = min_version(position, s.groups_per_step, s.max_async_level, s.surplus + s.allowance)
        seed = self._seed_of(str(ordinal))
        return self.groups.new(example, seed, s.group_size, oldest, origin=origin, resamples=resamples)

    def _seed_of(self, what: str) -> int:
        """Return the sampling seed of a group; completion i adds i (P10). Seeds stay below 2^53, exact in JSON."""
        digest = hashlib.sha256(f"{self.settings.seed} {what}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    def _fail_hopeless(self) -> None:
        # either nothing works any more, or too large a share of the data is lost
        limit = max(MIN_POISON_IN_A_ROW, 4 * self.settings.groups_per_step)
        if self.groups.poison_in_a_row >= limit and not self.failure:
            self.failure = (
                f"{limit} groups in a row were dropped as poison after three failed attempts each; "
                f"the last failure: {self.groups.last_failure}"
            )
        newest = self.groups.newest_were_poison
        dropped, window = sum(newest), len(newest)
        share = self.settings.max_drop_fraction
        if window == newest.maxlen and dropped > share * window and not self.failure:
            self.failure = (
                f"{dropped} of the last {window} groups were dropped as poison after three failed attempts each, more "
                f"than packer.max_drop_fraction {share:g} allows: the others are no fair sample of the data; "
                f"the last failure: {self.groups.last_failure}"
            )


def _refusal(heartbeat: Heartbeat, settings: Settings) -> str:
    """Return why a process can't take part in the run; empty: no reason."""
    # the fingerprint is a digest over all message classes
    if heartbeat.fingerprint is not None and heartbeat.fingerprint != fingerprint():
        return (
            f"{heartbeat.name} speaks messages {heartbeat.fingerprint}, the packer {fingerprint()}: "
            "they are different builds of grpo-actors; install the same one everywhere"
        )
    if isinstance(heartbeat, TrainerHeartbeat) and not 0 <= heartbeat.rank < heartbeat.num_ranks == settings.num_ranks:
        return (
            f"{heartbeat.name} is rank {heartbeat.rank} of {heartbeat.num_ranks}, the packer's trainer.num_ranks is "
            f"{settings.num_ranks}; start all processes with the same configuration"
        )
    return ""


def _shown_to_others(heartbeat: Heartbeat | None) -> tuple[Any, ...] | None:
    """Return the parts of a heartbeat to be passed on in other peers' directives at once; the load can wait."""
    if isinstance(heartbeat, InferenceHeartbeat):
        return heartbeat.phase, heartbeat.engine_state, heartbeat.policy, heartbeat.url
    if isinstance(heartbeat, RewardHeartbeat):
        return heartbeat.phase, heartbeat.address
    return None
