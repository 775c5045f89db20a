"""Composition of steps from settled groups: order (P16), staleness (P17), commit before sending (P18)."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from actors.algorithms.fair_shares import last_step_of, must_wait
from actors.algorithms.lag import is_stale
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.groups import Groups
from actors.ledger.rows import Changes, Group, GroupState, Settings, Step
from actors.ledger.witness import START, next_chain
from schemas.messages import DroppedOrdinal


class ComposedSteps:
    """Composed steps. A step is composed once; nothing changes its groups afterwards (P18)."""

    def __init__(self, settings: Settings, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self.composed: dict[int, Step] = {}
        """Composed steps by number, without compacted ones."""
        self.chains: dict[int, str] = {0: START}
        """Chain of witnesses (P20) after each step, from the newest compacted step on."""
        self.last = 0
        """Newest composed step; 0: none."""
        self._next_ordinal = 0
        """Ordinal below which no group can enter a step any more."""
        self._awaited: int | None = None
        """Issued ordinal for which the next step waited last, in order `ordinal`."""

    def restore(self, steps: list[Step], compacted: CompactedHistory) -> None:
        """Load the stored steps, in order."""
        self.chains, self.last = {compacted.step: compacted.chain}, compacted.step
        self._next_ordinal = compacted.finished.first_missing
        for step in steps:
            self._note(step)

    def compact(self, last: int) -> list[Step]:
        """Remove and return the steps up to this one; its chain stays as the root of all later chains."""
        gone = [self.composed.pop(number) for number in sorted(self.composed) if number <= last]
        self.chains = {number: chain for number, chain in self.chains.items() if number >= last}
        self._changes.gone_steps += [step.step for step in gone]
        return gone

    def cut(self, last: int) -> list[Step]:
        """Remove and return the steps after this one, to be composed again."""
        cut = [self.composed.pop(number) for number in sorted(self.composed) if number > last]
        self.chains = {number: chain for number, chain in self.chains.items() if number <= last}
        self.last, self._awaited = last, None
        self._changes.gone_steps += [step.step for step in cut]
        return cut

    def compose_next(self, groups: Groups, digests: Mapping[int, str]) -> tuple[Step | None, list[Group]]:
        """Compose the next step if enough groups are settled.

        Args:
            groups: table of groups; chosen groups move to composed, stale groups are dropped.
            digests: payload digests of settled groups, by ordinal.

        Returns:
            The step, or None; and the groups dropped as `stale`, too old for the step (P17).
        """
        number = self.last + 1
        if number > self._settings.max_steps:
            return None, []
        stale = []
        chosen = self._candidates(groups)
        for group in chosen:
            assert group.oldest_version is not None
            if is_stale(number, group.oldest_version, self._settings.max_off_policy_steps):
                groups.drop(group, "stale")
                stale.append(group)
        # no step in a round with stale groups: their replacements come first
        if stale or len(chosen) < self._settings.groups_per_step or self._must_wait(number, chosen, groups):
            return None, stale
        dropped = tuple(
            DroppedOrdinal(ordinal=ordinal, reason=groups.rows[ordinal].reason or "poison")
            for ordinal in sorted(groups.unreported_drops)
        )
        # each drop is reported by exactly one step, so that the witnesses of a run have no gap and no repeat (P20)
        groups.unreported_drops.clear()
        ordinals = tuple(group.ordinal for group in chosen)
        step_digests = tuple(digests[ordinal] for ordinal in ordinals)
        chain = next_chain(self.chains[self.last], number, ordinals, dropped, step_digests)
        step = Step(number, ordinals, dropped, step_digests, chain)
        groups.move(ordinals, GroupState.COMPOSED, number)
        self._note(step)
        self._changes.steps.append(step)
        return step, []

    def _candidates(self, groups: Groups) -> list[Group]:
        """Return up to groups_per_step settled groups, in the configured order (P16)."""
        if len(groups.settled) < self._settings.groups_per_step:
            return []
        if self._settings.allowance:
            # the oldest first, of equal age in the order of arrival: a group that was overtaken is due earlier
            settled = enumerate(groups.settled.values())
            oldest = heapq.nsmallest(
                self._settings.groups_per_step, settled, lambda item: (item[1].oldest_version, item[0])
            )
            return [group for _, group in oldest]
        if self._settings.order == "arrival":
            return list(islice(groups.settled.values(), self._settings.groups_per_step))
        # most rounds: the step still waits for the same group, so nothing has to be counted
        awaited = None if self._awaited is None else groups.rows.get(self._awaited)
        if awaited is not None and awaited.state is GroupState.ISSUED:
            return []
        # past ordinals that can enter no step any more, once for all later rounds
        while self._next_ordinal < groups.num_issued["train"]:
            group = groups.rows.get(self._next_ordinal)
            if group is not None and group.state in (GroupState.ISSUED, GroupState.SETTLED):
                break
            self._next_ordinal += 1
        chosen: list[Group] = []
        ordinal = self._next_ordinal
        while len(chosen) < self._settings.groups_per_step:
            group = groups.rows.get(ordinal)
            # order `ordinal` waits for the group whose turn it is, however many later ones are settled
            if ordinal >= groups.num_issued["train"]:
                return []
            if group and group.state is GroupState.ISSUED:
                self._awaited = ordinal
                return []
            if group and group.state is GroupState.SETTLED:  # a missing row is compacted: it was dropped long ago
                chosen.append(group)
            ordinal += 1
        return chosen

    def _must_wait(self, number: int, chosen: Sequence[Group], groups: Groups) -> bool:
        """Return whether a step must wait for groups that would be stale without it (P16)."""
        if not self._settings.allowance:
            return False

        def last_steps(versions: Iterable[int | None]) -> list[int]:
            limit = self._settings.max_off_policy_steps
            return [last_step_of(version, limit) for version in versions if version is not None]

        taken = {group.ordinal for group in chosen}
        rows = (groups.rows[ordinal] for ordinals in groups.under_way.values() for ordinal in ordinals)
        return must_wait(
            number,
            self._settings.groups_per_step,
            last_steps(group.oldest_version for group in chosen),
            last_steps(group.oldest_version for group in groups.settled.values() if group.ordinal not in taken),
            # a group without a holder will be sampled by a newer version
            last_steps(group.sampled_from for group in rows if group.holder is not None),
        )

    def _note(self, step: Step) -> None:
        self.composed[step.step], self.chains[step.step], self.last = step, step.chain, step.step
