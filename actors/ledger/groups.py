"""Every group's attempts, from issue to settlement or drop (P9–P13).

This is where a group is settled: `Groups.settle`. The first good copy wins, whichever attempt it is of.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from actors.ledger.rows import MAX_FAILURES, Changes, ExampleRef, Group, GroupFacts, GroupState, Settings, purpose_of
from schemas.errors import ProtocolError
from schemas.messages import Policy

COUNTERS = ("copies_dropped", "reissued", "deaths", "settlements")


class Verdict(StrEnum):
    """What became of a scored group."""

    SETTLED = "settled"
    COPY = "copy"
    FAILED = "failed"


class Groups:
    """The table of groups. Each method that changes a row notes it in `changes`."""

    def __init__(self, settings: Settings, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self.rows: dict[int, Group] = {}
        self.num_issued = {"train": 0, "eval": 0}
        self.dropped: dict[str, Counter[str]] = {"train": Counter(), "eval": Counter()}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.unreported_drops: list[int] = []
        self.held_by: dict[str, set[int]] = {}
        self._indexed_holder: dict[int, str] = {}
        self.waiting: set[int] = set()
        self.last_failure = ""
        self.poison_in_a_row = 0

    def restore(
        self, rows: Iterable[Group], num_issued: dict[str, int], counters: dict[str, int], reported: set[int]
    ) -> None:
        """Take over what the store has; `reported` are drops that a step has already carried."""
        self.num_issued.update(num_issued)
        self.counters.update(counters)
        for row in rows:
            self.rows[row.ordinal] = row
            self._index(row)
            if row.state is GroupState.DROPPED:
                self.dropped[row.purpose][row.reason or "poison"] += 1
                if row.purpose == "train" and row.ordinal not in reported:
                    self.unreported_drops.append(row.ordinal)

    def new(
        self,
        example: ExampleRef,
        seed: int,
        num_completions: int,
        min_version: int,
        policy: Policy | None = None,
        origin: int | None = None,
    ) -> Group:
        """A new ordinal, waiting for a holder. Eval groups are those with a policy."""
        purpose = "train" if policy is None else "eval"
        count = self.num_issued[purpose]
        ordinal = count if purpose == "train" else -1 - count
        self.num_issued[purpose] = count + 1
        self._changes.values["num_issued"] = dict(self.num_issued)
        group = Group(ordinal, example, seed, num_completions, min_version, policy, origin=origin)
        self.rows[ordinal] = group
        self._touch(group)
        return group

    def give(self, group: Group, holder: str, now: float) -> None:
        """Start the next attempt of a waiting group at this holder (P9)."""
        assert group.state is GroupState.ISSUED
        assert group.holder is None
        group.attempt += 1
        if group.attempt > 1:
            self._count("reissued")
        group.holder, group.issued_at, group.scoring_since = holder, now, None
        self._touch(group)

    def take_back(self, group: Group, holder: str, now: float) -> None:
        """A holder that was thought dead still has the current attempt: it goes on instead of a new one."""
        group.holder, group.issued_at = holder, now
        self._touch(group)

    def fail(self, ordinal: int, attempt: int, reason: str, detail: str) -> None:
        """End an attempt; the ordinal waits for the next one, or is dropped as poison (P11)."""
        group = self.rows.get(ordinal)
        if group is None or group.state is not GroupState.ISSUED or group.attempt != attempt:
            return  # another copy was faster, or this failure has been counted
        self.last_failure = f"{group.example.environment} example {group.example.index}: {reason}: {detail}"
        group.failures += 1
        self._free(group)

    def holder_gone(self, holder: str) -> None:
        """Free what a dead holder held (P11): its death is a failed attempt only of an ordinal that it held alone."""
        held = sorted(self.held_by.get(holder, ()))
        for ordinal in held:
            group = self.rows[ordinal]
            group.deaths += 1
            self._count("deaths")
            if len(held) == 1:
                group.failures += 1
                self.last_failure = f"{group.example.environment} example {group.example.index}: {holder} died with it"
            self._free(group)

    def settle(self, facts: GroupFacts) -> Verdict:
        """Judge a scored group; the first good copy of an ordinal settles it for good (P11, P25).

        Raises:
            ProtocolError: the ordinal was never issued (P5).
        """
        group = self.known(facts.ordinal)
        if group is None or group.state is not GroupState.ISSUED:
            self._count("copies_dropped")
            return Verdict.COPY
        problem = self._problem_with(group, facts)
        if problem:
            self.fail(facts.ordinal, group.attempt, *problem)
            return Verdict.FAILED
        group.state, group.holder = GroupState.SETTLED, None
        group.oldest_version, group.arrival = facts.oldest_version, self.counters["settlements"]
        self._count("settlements")
        self.poison_in_a_row = 0
        self._touch(group)
        return Verdict.SETTLED

    def drop(self, group: Group, reason: str) -> None:
        """Never train this ordinal."""
        group.state, group.reason, group.holder = GroupState.DROPPED, reason, None
        self.dropped[group.purpose][reason] += 1
        if group.purpose == "train":
            self.unreported_drops.append(group.ordinal)
        self._touch(group)

    def move(self, group: Group, state: GroupState, step: int | None = None) -> None:
        """Settled → composed → trained → durable, and back to composed when a gang starts from an older checkpoint."""
        group.state = state
        if step is not None:
            group.step = step
        self._touch(group)

    def known(self, ordinal: int) -> Group | None:
        """The row, or None when it has been folded away.

        Raises:
            ProtocolError: the ledger has never issued it (P5).
        """
        count = ordinal + 1 if ordinal >= 0 else -ordinal
        if count > self.num_issued[purpose_of(ordinal)]:
            purpose = purpose_of(ordinal)
            raise ProtocolError(
                f"a peer names ordinal {ordinal}, but this ledger has issued {self.num_issued[purpose]} {purpose} ordinals: "
                "it has lost commits. With ledger.sync: process a power loss does that; set ledger.sync: node, and resume "
                "from a checkpoint or start a new run."
            )
        return self.rows.get(ordinal)

    def num_dropped(self, purpose: str) -> int:
        """Ordinals of a purpose that will never be trained."""
        return self.dropped[purpose].total()

    def counts(self, purpose: str) -> Counter[GroupState]:
        """Rows by state, counted from the rows themselves."""
        return Counter(row.state for row in self.rows.values() if row.purpose == purpose)

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

    def _free(self, group: Group) -> None:
        group.holder = None
        if group.failures >= MAX_FAILURES:
            self.poison_in_a_row += 1
            self.drop(group, "poison")
        else:
            self._touch(group)

    def _count(self, counter: str) -> None:
        self.counters[counter] += 1
        self._changes.values["counters"] = dict(self.counters)

    def _touch(self, group: Group) -> None:
        self._changes.groups[group.ordinal] = group
        self._index(group)

    def _index(self, group: Group) -> None:
        """Keep `held_by` and `waiting` true to the row."""
        ordinal = group.ordinal
        before = self._indexed_holder.pop(ordinal, None)
        if before is not None:
            self.held_by[before].discard(ordinal)
            if not self.held_by[before]:
                del self.held_by[before]
        self.waiting.discard(ordinal)
        if group.state is not GroupState.ISSUED:
            return
        if group.holder is None:
            self.waiting.add(ordinal)
        else:
            self._indexed_holder[ordinal] = group.holder
            self.held_by.setdefault(group.holder, set()).add(ordinal)
