"""Groups and their attempts, from issue (P9) over failures and deadlines (P11, P12) to settlement or drop.

`Groups.settle` alone settles a group. The first good copy wins, of whichever attempt (P11). The head of `machine.py`
names the method behind each later state.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from actors.ledger.clock import Clock
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.rows import (
    DROP_WINDOW,
    MAX_FAILURES,
    AttemptOutcome,
    Changes,
    ExampleRef,
    Group,
    GroupFacts,
    GroupState,
    Settings,
    purpose_of,
)
from actors.ledger.waiting import Waiting
from schemas.errors import ProtocolError
from schemas.messages import PolicyVersion

COUNTERS = ("copies_dropped", "reissued", "deaths", "settlements", "resampled_in_vain")
"""Counters stored with the ledger."""


class Verdict(StrEnum):
    """Outcome of a scored group."""

    SETTLED = "settled"
    """Accepted; the payload is stored."""
    FILTERED = "filtered"
    """Dropped by a group filter; another example takes its place (P15)."""
    COPY = "copy"
    """Ignored, since the ordinal is settled or dropped already."""
    FAILED = "failed"
    """Does not fit its ticket; the attempt fails (P25)."""


class Groups:
    """Table of groups with indices over it.

    Rows are changed only in `_change` and `move`, which update the indices and record the change. So a round costs
    the changes of the round, however many rows exist.
    """

    def __init__(self, settings: Settings, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self.rows: dict[int, Group] = {}
        """Rows by ordinal, without compacted ones."""
        self.num_issued = {"train": 0, "eval": 0}
        """Ordinals issued so far, by purpose, compacted ordinals included."""
        self.dropped: dict[str, Counter[str]] = {"train": Counter(), "eval": Counter()}
        """Dropped ordinals by purpose and reason, compacted ordinals included."""
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        """Counters of COUNTERS over the whole run."""
        self.unreported_drops: list[int] = []
        """Dropped train ordinals not yet reported by a step (P20)."""
        self.held_by: dict[str, set[int]] = {}
        """Ordinals by holder."""
        self.waiting = Waiting()
        """Issued groups without a holder."""
        self.settled: dict[int, Group] = {}
        """Settled train groups not yet in a step, in the order of arrival."""
        self.under_way: dict[str, list[int]] = {}
        """Ordinals of the train groups neither settled nor dropped, by environment, ascending."""
        self.newest_settled: dict[str, int] = {}
        """Greatest train ordinal with a good copy, by environment."""
        self.open_evals: set[int] = set()
        """Eval groups neither settled nor dropped."""
        self._tally: dict[str, Counter[GroupState]] = {"train": Counter(), "eval": Counter()}
        # + lease: rollout and reward actors enforce the same timeouts and should report first, with a better reason
        self._sampling: Clock[int] = Clock(settings.group_timeout + settings.lease)
        self._scoring: Clock[int] = Clock(settings.reward_timeout + settings.lease)
        self._exhausted: list[int] = []
        """Groups with the last allowed failure in this round."""
        self._ended: set[int] = set()
        """Ordinals with an ended attempt since the last `take_concerned`."""
        self._holders: set[str] = set()
        """Holders with groups received or lost since the last `take_concerned`."""
        self.last_failure = ""
        """Example and cause of the newest failed attempt since this packer's start."""
        self.num_failed_attempts = 0
        """Failed attempts since this packer's start."""
        self.poison_in_a_row = 0
        """Groups dropped as poison since the last settlement."""
        self.newest_were_poison: deque[bool] = deque(maxlen=DROP_WINDOW)
        """Poison or not, for the last 100 train groups with all attempts over, since this packer's start."""

    def restore(
        self,
        rows: Iterable[Group],
        num_issued: dict[str, int],
        counters: dict[str, int],
        reported: set[int],
        compacted: CompactedHistory,
        now: float,
    ) -> None:
        """Load the stored rows and counts; deadlines start again.

        Args:
            rows: all stored rows.
            num_issued, counters: stored values.
            reported: dropped ordinals already reported by a step.
            compacted: summary of the compacted steps.
            now: the time.
        """
        self.num_issued.update(num_issued)
        self.counters.update(counters)
        for (purpose, state, _), count in compacted.counts().items():
            self._tally[purpose][GroupState(state)] += count
        for purpose, reasons in compacted.dropped.items():
            self.dropped[purpose].update(reasons)
        # in the order of arrival, since `settled` keeps the order of insertion
        for row in sorted(rows, key=lambda row: -1 if row.arrival is None else row.arrival):
            self.rows[row.ordinal] = row
            self._index(row)
            row.sampled_from = row.min_version
            if row.arrival is not None:
                self._note_settled(row)
            if row.holder is not None:
                # deadlines are not stored: monotonic times of another process mean nothing
                row.issued_at = now
                self._sampling.start(row.ordinal, now)
            if row.reason is not None:
                self.dropped[row.purpose][row.reason] += 1
                if row.purpose == "train" and row.ordinal not in reported:
                    self.unreported_drops.append(row.ordinal)
        self.take_concerned()  # a restored row is no news to anybody

    def new(
        self,
        example: ExampleRef,
        seed: int,
        num_completions: int,
        min_version: int,
        policy: PolicyVersion | None = None,
        origin: int | None = None,
        resamples: int = 0,
    ) -> Group:
        """Issue a new ordinal, which waits for a holder. With a policy, the group belongs to an evaluation."""
        purpose = "train" if policy is None else "eval"
        count = self.num_issued[purpose]
        # 0, 1, 2, … for training and −1, −2, … for evaluations
        ordinal = count if purpose == "train" else -1 - count
        self.num_issued[purpose] = count + 1
        self._changes.values["num_issued"] = dict(self.num_issued)
        position = count - self.num_dropped(purpose) if purpose == "train" else 0
        asked = (ordinal, example, seed, num_completions, min_version, policy)
        group = Group(*asked, origin=origin, resamples=resamples, position=position)
        self.rows[ordinal] = group
        self._index(group)
        self._changes.groups[ordinal] = group
        return group

    # --- attempts ------------------------------------------------------------------------------------------------

    def give(self, group: Group, holder: str, now: float, served: int) -> None:
        """Give a waiting group to a holder and start the next attempt (P9), while engines serve this version."""
        assert group.state is GroupState.ISSUED
        assert group.holder is None
        if group.attempt:
            self._count("reissued")
        # an older attempt may still be scored; its deadline must not end the new attempt
        self._scoring.stop(group.ordinal)
        self._sampling.start(group.ordinal, now)
        group.issued_at, group.sampled_from = now, served
        self._change(group, holder=holder, attempt=group.attempt + 1, outcome=AttemptOutcome.OPEN)

    def take_back(self, ordinal: int, attempt: int, holder: str, now: float) -> None:
        """Give an attempt back to a holder declared dead by mistake, unless another holder has the group.

        The attempt continues, and the death is no longer counted.
        """
        group = self.known(ordinal)
        lost = group is not None and group.state is GroupState.ISSUED and group.holder is None
        if group is None or not lost or group.attempt != attempt or group.outcome is AttemptOutcome.FAILED:
            return
        if ordinal not in self._scoring:
            self._sampling.start(ordinal, now)
        group.issued_at = now
        # the death was counted as a failure only if the holder had held nothing else
        counted = int(group.outcome is AttemptOutcome.DIED)
        self._change(
            group,
            holder=holder,
            outcome=AttemptOutcome.OPEN,
            deaths=group.deaths - 1,
            failures=group.failures - counted,
        )

    def scoring(self, ordinal: int, attempt: int, now: float) -> None:
        """Switch an attempt, now named by a reward actor, to the deadline of scoring (P12)."""
        group = self.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED or group.attempt != attempt:
            return
        if group.outcome is not AttemptOutcome.FAILED and ordinal not in self._scoring:
            self._sampling.stop(ordinal)
            self._scoring.start(ordinal, now)

    def scorer_gone(self, ordinal: int, attempt: int, now: float) -> None:
        """Restart the deadline of scoring after the death of a reward actor.

        The rollout actor sends the group to another reward actor, which gets the whole time.
        """
        if ordinal in self._scoring and self.rows[ordinal].attempt == attempt:
            self._scoring.stop(ordinal)
            if self.rows[ordinal].holder is not None:  # without a rollout actor nobody sends the group again
                self._scoring.start(ordinal, now)

    def fail(self, ordinal: int, attempt: int, reason: str, detail: str) -> None:
        """Fail an attempt; the ordinal then waits for the next attempt (P11). Repeated reports count once.

        Args:
            ordinal, attempt: the failed attempt.
            reason: short word of the cause.
            detail: message for log and error.

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        group = self.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED or group.attempt != attempt:
            return  # another copy was faster, or another attempt is under way
        if group.outcome is AttemptOutcome.FAILED:
            return  # heartbeats repeat a failure until it is released
        self._note_failure(group, f"{reason}: {detail}")
        # an attempt counted as died is not counted again
        counted = int(group.outcome is AttemptOutcome.OPEN)
        self._change(group, holder=None, outcome=AttemptOutcome.FAILED, failures=group.failures + counted)

    def holder_gone(self, holder: str) -> None:
        """Free the groups of a dead holder (P11). The death is a failed attempt only if the holder held a single group.

        With several groups held, nothing tells which group caused the death.
        """
        held = sorted(self.held_by.get(holder, ()))
        for ordinal in held:
            group = self.rows[ordinal]
            self._count("deaths")
            self._sampling.stop(ordinal)
            if len(held) == 1:
                self._note_failure(group, f"{holder} died while holding it")
                self._change(
                    group,
                    holder=None,
                    deaths=group.deaths + 1,
                    outcome=AttemptOutcome.DIED,
                    failures=group.failures + 1,
                )
            else:
                self._change(group, holder=None, deaths=group.deaths + 1)

    def fail_late(self, now: float) -> None:
        """Fail the attempts past the deadline as `timeout` (P12)."""
        for ordinal in self._sampling.late(now):
            self.fail(ordinal, self.rows[ordinal].attempt, "timeout", "not sampled within rollout.group_timeout")
        for ordinal in self._scoring.late(now):
            self.fail(ordinal, self.rows[ordinal].attempt, "timeout", "not scored within reward.timeout")

    def drop_exhausted(self) -> list[Group]:
        """Drop as poison the groups with no attempt left and no good copy in this round (P11)."""
        groups = [self.rows[ordinal] for ordinal in dict.fromkeys(self._exhausted)]
        poison = [group for group in groups if group.state is GroupState.ISSUED and group.failures >= MAX_FAILURES]
        self.poison_in_a_row += len(poison)
        for group in poison:
            self.drop(group, "poison")
            self._note_end(group, was_poison=True)
        self._exhausted.clear()
        return poison

    # --- the end of attempts -------------------------------------------------------------------------------------

    def settle(self, facts: GroupFacts) -> Verdict:
        """Judge a scored group; the first copy that fits the ticket settles an ordinal for good (P11, P25).

        A group rejected by a group filter is dropped, unless max_resample_times groups were filtered in its place
        before. Then it is taken as it is, so that a place costs at most 1 + max_resample_times groups and every step
        is filled (P15).

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        group = self.known(facts.ordinal)
        if group is None or group.state is not GroupState.ISSUED:
            self._count("copies_dropped")
            return Verdict.COPY
        problem = self._problem_with(group, facts)
        if problem:
            self.fail(facts.ordinal, facts.attempt, *problem)
            return Verdict.FAILED
        # a single good group shows that sampling and scoring work
        self.poison_in_a_row = 0
        self._note_end(group, was_poison=False)
        self._note_settled(group)
        if facts.rejected_as and group.purpose == "train":
            if group.resamples < self._settings.max_resample_times:
                self.drop(group, facts.rejected_as)
                return Verdict.FILTERED
            self._count("resampled_in_vain")
        arrival = self.counters["settlements"]
        self._count("settlements")
        self._change(group, state=GroupState.SETTLED, holder=None, oldest_version=facts.oldest_version, arrival=arrival)
        return Verdict.SETTLED

    def drop(self, group: Group, reason: str) -> None:
        """Drop a group for good, for a counted reason."""
        self.dropped[group.purpose][reason] += 1
        if group.purpose == "train":
            self.unreported_drops.append(group.ordinal)
        self._change(group, state=GroupState.DROPPED, reason=reason, holder=None)

    def move(self, ordinals: Iterable[int], state: GroupState, step: int) -> None:
        """Move groups on, settled → composed → trained → durable, or back to composed for an older checkpoint.

        All attempts of these groups are over, so only the indices `settled` and `_tally` need an update.
        """
        for ordinal in ordinals:
            group = self.rows[ordinal]
            self.settled.pop(ordinal, None)
            self._tally[group.purpose][group.state] -= 1
            self._tally[group.purpose][state] += 1
            group.state, group.step = state, step
            self._changes.groups[ordinal] = group

    def compact(self, ordinals: Iterable[int]) -> list[Group]:
        """Remove and return rows without any future change; the counts still include them."""
        gone = [self.rows.pop(ordinal) for ordinal in ordinals]
        for group in gone:
            # the commit deletes rows before it writes rows: a row changed in this round would be there again
            self._changes.groups.pop(group.ordinal, None)
            self._changes.gone_groups.append(group.ordinal)
        return gone

    # --- what is known -------------------------------------------------------------------------------------------

    def known(self, ordinal: int) -> Group | None:
        """Return the row of an ordinal; None if it is compacted.

        Raises:
            ProtocolError: the ledger has never issued the ordinal (P5).
        """
        purpose = purpose_of(ordinal)
        issued = self.num_issued[purpose]
        # ordinals of a purpose have no gap, so the count tells whether this one was issued
        if (ordinal + 1 if ordinal >= 0 else -ordinal) > issued:
            raise ProtocolError(
                f"a peer names ordinal {ordinal}, but this ledger has issued {issued} {purpose} ordinals: it has lost "
                "commits. With ledger.sync: process a power loss does that; set ledger.sync: node, and start a new run."
            )
        return self.rows.get(ordinal)

    def num_dropped(self, purpose: str) -> int:
        """Return the number of dropped ordinals of a purpose, compacted ordinals included."""
        return self.dropped[purpose].total()

    def counts(self, purpose: str) -> Counter[GroupState]:
        """Return the number of ordinals by state, compacted ordinals included."""
        return +self._tally[purpose]  # `+` leaves out counts of 0

    def take_concerned(self) -> tuple[set[str], set[int]]:
        """Return holders with groups received or lost, and ordinals with an ended attempt, since the last call."""
        taken = self._holders, self._ended
        self._holders, self._ended = set(), set()
        return taken

    def _problem_with(self, group: Group, facts: GroupFacts) -> tuple[str, str] | None:
        if facts.example_key != group.example.key:
            return "wrong_example", f"sampled example {facts.example_key}, the ticket named {group.example.key}"
        if facts.num_completions != group.num_completions:
            return "wrong_size", f"{facts.num_completions} completions, the ticket asked for {group.num_completions}"
        # evaluations are not packed, so their samples may be longer than a micro-batch
        if facts.longest_sample > self._settings.sequence_len and group.purpose == "train":
            return (
                "too_long",
                f"a sample of {facts.longest_sample} tokens, packer.sequence_len is {self._settings.sequence_len}",
            )
        if group.policy is not None and facts.policies != {group.policy}:
            return "wrong_policy", f"sampled by {sorted(map(str, facts.policies))}, the evaluation is of {group.policy}"
        if facts.oldest_version < group.min_version:
            return (
                "wrong_policy",
                f"sampled by version {facts.oldest_version}, the ticket asked for ≥ {group.min_version}",
            )
        return None

    def _note_end(self, group: Group, was_poison: bool) -> None:
        if group.purpose == "train":
            self.newest_were_poison.append(was_poison)

    def _note_settled(self, group: Group) -> None:
        label = group.example.environment
        if group.purpose == "train":
            self.newest_settled[label] = max(group.ordinal, self.newest_settled.get(label, 0))

    def _note_failure(self, group: Group, what: str) -> None:
        example = group.example
        self.num_failed_attempts += 1
        self.last_failure = f"{example.environment} example {example.index} ({example.key}): {what}"
        # + 1: the caller counts this failure after the note
        if group.failures + 1 >= MAX_FAILURES:
            self._exhausted.append(group.ordinal)

    def _count(self, counter: str) -> None:
        self.counters[counter] += 1
        self._changes.values["counters"] = dict(self.counters)

    def _change(self, group: Group, **fields: Any) -> None:
        ordinal = group.ordinal
        # out of the indices by the old values, the exact reverse of `_index`
        self._tally[group.purpose][group.state] -= 1
        self.open_evals.discard(ordinal)
        if group.state is GroupState.ISSUED and ordinal >= 0:
            under_way = self.under_way[group.example.environment]
            del under_way[bisect_left(under_way, ordinal)]
        self.waiting.discard(ordinal)
        self.settled.pop(ordinal, None)
        if group.holder is not None:
            self._holders.add(group.holder)
            held = self.held_by[group.holder]
            held.discard(ordinal)
            if not held:
                del self.held_by[group.holder]
        for name, value in fields.items():
            setattr(group, name, value)
        self._index(group)
        self._changes.groups[ordinal] = group

    def _index(self, group: Group) -> None:
        ordinal, issued = group.ordinal, group.state is GroupState.ISSUED
        self._tally[group.purpose][group.state] += 1
        if issued and ordinal < 0:
            self.open_evals.add(ordinal)
        if issued and ordinal >= 0:
            insort(self.under_way.setdefault(group.example.environment, []), ordinal)
        if issued and group.holder is None:
            self.waiting.add(ordinal, again=group.attempt > 0)
        if group.state is GroupState.SETTLED and ordinal >= 0:
            self.settled[ordinal] = group
        if group.holder is not None:
            self._holders.add(group.holder)
            self.held_by.setdefault(group.holder, set()).add(ordinal)
        if not issued or group.outcome is AttemptOutcome.FAILED:
            # no deadline outlives its attempt: `fail_late` fails the newest attempt, whichever has started the time
            self._ended.add(ordinal)
            self._sampling.stop(ordinal)
            self._scoring.stop(ordinal)
