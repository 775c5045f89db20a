"""Every group's attempts, from issue to settlement or drop (P9–P13).

This is where a group is settled: `Groups.settle`. The first good copy wins, whichever attempt it is of.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from actors.ledger.clock import Clock
from actors.ledger.folded import Folded
from actors.ledger.rows import (
    MAX_FAILURES,
    Attempt,
    Changes,
    ExampleRef,
    Group,
    GroupFacts,
    GroupState,
    Settings,
    purpose_of,
)
from schemas.errors import ProtocolError
from schemas.messages import Policy

COUNTERS = ("copies_dropped", "reissued", "deaths", "settlements", "resampled_in_vain")


class Verdict(StrEnum):
    """What became of a scored group."""

    SETTLED = "settled"
    FILTERED = "filtered"
    COPY = "copy"
    FAILED = "failed"


class Groups:
    """The table of groups. A row changes in `_change` and `move` alone: they keep the indices true and note it.

    So a round costs what has happened in it, however many rows there are.
    """

    def __init__(self, settings: Settings, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self.rows: dict[int, Group] = {}
        self.num_issued = {"train": 0, "eval": 0}
        self.dropped: dict[str, Counter[str]] = {"train": Counter(), "eval": Counter()}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.unreported_drops: list[int] = []
        self.held_by: dict[str, set[int]] = {}
        self.waiting: set[int] = set()
        """Issued and without a holder."""
        self.settled: dict[int, Group] = {}
        """Train groups that no step has taken yet, in the order of arrival."""
        self.open_evals: set[int] = set()
        """Eval groups that are neither settled nor dropped."""
        self._tally: dict[str, Counter[GroupState]] = {"train": Counter(), "eval": Counter()}
        self._sampling: Clock[int] = Clock(settings.group_timeout + settings.lease)
        self._scoring: Clock[int] = Clock(settings.reward_timeout + settings.lease)
        self._exhausted: list[int] = []
        self._ended: set[int] = set()
        self._holders: set[str] = set()
        self.last_failure = ""
        self.num_failed_attempts = 0
        """Since this packer's start, as is the last failure."""
        self.poison_in_a_row = 0

    def restore(
        self,
        rows: Iterable[Group],
        num_issued: dict[str, int],
        counters: dict[str, int],
        reported: set[int],
        folded: Folded,
        now: float,
    ) -> None:
        """Take over what the store has; `reported` are drops that a step has already carried. Deadlines begin anew."""
        self.num_issued.update(num_issued)
        self.counters.update(counters)
        for (purpose, state, _), count in folded.counts().items():
            self._tally[purpose][GroupState(state)] += count
        for purpose, reasons in folded.dropped.items():
            self.dropped[purpose].update(reasons)
        for row in sorted(rows, key=lambda row: -1 if row.arrival is None else row.arrival):
            self.rows[row.ordinal] = row
            self._index(row)
            if row.holder is not None:
                row.issued_at = now
                self._sampling.start(row.ordinal, now)
            if row.reason is not None:
                self.dropped[row.purpose][row.reason] += 1
                if row.purpose == "train" and row.ordinal not in reported:
                    self.unreported_drops.append(row.ordinal)
        self.take_concerned()

    def new(
        self,
        example: ExampleRef,
        seed: int,
        num_completions: int,
        min_version: int,
        policy: Policy | None = None,
        origin: int | None = None,
        resamples: int = 0,
    ) -> Group:
        """A new ordinal, waiting for a holder. Eval groups are those with a policy."""
        purpose = "train" if policy is None else "eval"
        count = self.num_issued[purpose]
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

    def give(self, group: Group, holder: str, now: float) -> None:
        """Start the next attempt of a waiting group at this holder (P9)."""
        assert group.state is GroupState.ISSUED
        assert group.holder is None
        if group.attempt:
            self._count("reissued")
        self._scoring.stop(group.ordinal)
        self._sampling.start(group.ordinal, now)
        group.issued_at = now
        self._change(group, holder=holder, attempt=group.attempt + 1, outcome=Attempt.OPEN)

    def take_back(self, ordinal: int, attempt: int, holder: str, now: float) -> None:
        """A holder that was thought dead names its attempt: if nobody else has it, it goes on, and no death was."""
        group = self.known(ordinal)
        lost = group is not None and group.state is GroupState.ISSUED and group.holder is None
        if group is None or not lost or group.attempt != attempt or group.outcome is Attempt.FAILED:
            return
        if ordinal not in self._scoring:
            self._sampling.start(ordinal, now)
        group.issued_at = now
        counted = int(group.outcome is Attempt.DIED)
        self._change(
            group, holder=holder, outcome=Attempt.OPEN, deaths=group.deaths - 1, failures=group.failures - counted
        )

    def scoring(self, ordinal: int, attempt: int, now: float) -> None:
        """A reward actor names this attempt: from now on the deadline of scoring counts (P12)."""
        group = self.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED or group.attempt != attempt:
            return
        if group.outcome is not Attempt.FAILED and ordinal not in self._scoring:
            self._sampling.stop(ordinal)
            self._scoring.start(ordinal, now)

    def scorer_gone(self, ordinal: int, attempt: int, now: float) -> None:
        """A reward actor died with this attempt: its rollout sends it to another one, which gets the whole time."""
        if ordinal in self._scoring and self.rows[ordinal].attempt == attempt:
            self._scoring.stop(ordinal)
            if self.rows[ordinal].holder is not None:
                self._scoring.start(ordinal, now)

    def fail(self, ordinal: int, attempt: int, reason: str, detail: str) -> None:
        """End an attempt, once however often it is reported; the ordinal waits for the next one (P11).

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        group = self.known(ordinal)
        if group is None or group.state is not GroupState.ISSUED or group.attempt != attempt:
            return  # another copy was faster, or another attempt is under way
        if group.outcome is Attempt.FAILED:
            return  # it stands in every beat until it is released
        self._note_failure(group, f"{reason}: {detail}")
        counted = int(group.outcome is Attempt.OPEN)
        self._change(group, holder=None, outcome=Attempt.FAILED, failures=group.failures + counted)

    def holder_gone(self, holder: str) -> None:
        """Free what a dead holder held (P11): its death is a failed attempt only of an ordinal that it held alone."""
        held = sorted(self.held_by.get(holder, ()))
        for ordinal in held:
            group = self.rows[ordinal]
            self._count("deaths")
            self._sampling.stop(ordinal)
            if len(held) == 1:
                self._note_failure(group, f"{holder} died with it")
                self._change(
                    group, holder=None, deaths=group.deaths + 1, outcome=Attempt.DIED, failures=group.failures + 1
                )
            else:
                self._change(group, holder=None, deaths=group.deaths + 1)

    def fail_late(self, now: float) -> None:
        """Attempts past their deadline fail as `timeout` (P12)."""
        for ordinal in self._sampling.late(now):
            self.fail(ordinal, self.rows[ordinal].attempt, "timeout", "not sampled within rollout.group_timeout")
        for ordinal in self._scoring.late(now):
            self.fail(ordinal, self.rows[ordinal].attempt, "timeout", "not scored within reward.timeout")

    def drop_exhausted(self) -> list[Group]:
        """Drop as poison what has failed for the last time, and of which no good copy came in the same round (P11)."""
        groups = [self.rows[ordinal] for ordinal in dict.fromkeys(self._exhausted)]
        poison = [group for group in groups if group.state is GroupState.ISSUED and group.failures >= MAX_FAILURES]
        self.poison_in_a_row += len(poison)
        for group in poison:
            self.drop(group, "poison")
        self._exhausted.clear()
        return poison

    # --- the end of attempts -------------------------------------------------------------------------------------

    def settle(self, facts: GroupFacts) -> Verdict:
        """Judge a scored group; the first good copy of an ordinal settles it for good (P11, P25).

        What a group filter rejects is dropped, unless max_resample_times groups were in its place before: the next one
        is taken as it is, so that a place costs 1 + max_resample_times groups at most and each step is filled (P15).

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
        self.poison_in_a_row = 0
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
        """Never train this ordinal."""
        self.dropped[group.purpose][reason] += 1
        if group.purpose == "train":
            self.unreported_drops.append(group.ordinal)
        self._change(group, state=GroupState.DROPPED, reason=reason, holder=None)

    def move(self, ordinals: Iterable[int], state: GroupState, step: int) -> None:
        """Settled → composed → trained → durable, and back to composed when a gang starts from an older checkpoint.

        Three of five changes in a group's life, and all its attempts are over: of the indices only these two know it.
        """
        for ordinal in ordinals:
            group = self.rows[ordinal]
            self.settled.pop(ordinal, None)
            self._tally[group.purpose][group.state] -= 1
            self._tally[group.purpose][state] += 1
            group.state, group.step = state, step
            self._changes.groups[ordinal] = group

    def fold(self, ordinals: Iterable[int]) -> list[Group]:
        """Forget rows that nothing will happen to any more; they stay in the counts. Returns them."""
        gone = [self.rows.pop(ordinal) for ordinal in ordinals]
        for group in gone:
            self._changes.groups.pop(group.ordinal, None)
            self._changes.gone_groups.append(group.ordinal)
        return gone

    # --- what is known -------------------------------------------------------------------------------------------

    def known(self, ordinal: int) -> Group | None:
        """The row, or None when it has been folded away.

        Raises:
            ProtocolError: the ledger has never issued it (P5).
        """
        purpose = purpose_of(ordinal)
        issued = self.num_issued[purpose]
        if (ordinal + 1 if ordinal >= 0 else -ordinal) > issued:
            raise ProtocolError(
                f"a peer names ordinal {ordinal}, but this ledger has issued {issued} {purpose} ordinals: it has lost "
                "commits. With ledger.sync: process a power loss does that; set ledger.sync: node, and start a new run."
            )
        return self.rows.get(ordinal)

    def num_dropped(self, purpose: str) -> int:
        """Ordinals of a purpose that will never be trained."""
        return self.dropped[purpose].total()

    def counts(self, purpose: str) -> Counter[GroupState]:
        """Ordinals by state, those included that have been folded."""
        return +self._tally[purpose]

    def take_concerned(self) -> tuple[set[str], set[int]]:
        """What has changed hands since the last call: the holders, and the ordinals of which an attempt has ended."""
        taken = self._holders, self._ended
        self._holders, self._ended = set(), set()
        return taken

    def _problem_with(self, group: Group, facts: GroupFacts) -> tuple[str, str] | None:
        if facts.example_key != group.example.key:
            return "wrong_example", f"sampled example {facts.example_key}, the ticket named {group.example.key}"
        if facts.num_completions != group.num_completions:
            return "wrong_size", f"{facts.num_completions} completions, the ticket asked for {group.num_completions}"
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

    def _note_failure(self, group: Group, what: str) -> None:
        example = group.example
        self.num_failed_attempts += 1
        self.last_failure = f"{example.environment} example {example.index} ({example.key}): {what}"
        if group.failures + 1 >= MAX_FAILURES:
            self._exhausted.append(group.ordinal)

    def _count(self, counter: str) -> None:
        self.counters[counter] += 1
        self._changes.values["counters"] = dict(self.counters)

    def _change(self, group: Group, **fields: Any) -> None:
        self._unindex(group)
        for name, value in fields.items():
            setattr(group, name, value)
        self._index(group)
        self._changes.groups[group.ordinal] = group

    def _unindex(self, group: Group) -> None:
        """Take a row out of the indices; the exact reverse of `_index`."""
        ordinal = group.ordinal
        self._tally[group.purpose][group.state] -= 1
        self.open_evals.discard(ordinal)
        self.waiting.discard(ordinal)
        self.settled.pop(ordinal, None)
        if group.holder is not None:
            self._holders.add(group.holder)
            held = self.held_by[group.holder]
            held.discard(ordinal)
            if not held:
                del self.held_by[group.holder]

    def _index(self, group: Group) -> None:
        ordinal, issued = group.ordinal, group.state is GroupState.ISSUED
        self._tally[group.purpose][group.state] += 1
        if issued and ordinal < 0:
            self.open_evals.add(ordinal)
        if issued and group.holder is None:
            self.waiting.add(ordinal)
        if group.state is GroupState.SETTLED and ordinal >= 0:
            self.settled[ordinal] = group
        if group.holder is not None:
            self._holders.add(group.holder)
            self.held_by.setdefault(group.holder, set()).add(ordinal)
        if not issued or group.outcome is Attempt.FAILED:
            self._ended.add(ordinal)
            self._sampling.stop(ordinal)
            self._scoring.stop(ordinal)
