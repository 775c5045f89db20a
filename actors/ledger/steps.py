"""Which groups make up the next step (P16–P18)."""

from collections.abc import Mapping
from itertools import islice

from actors.algorithms.lag import is_stale
from actors.ledger.folded import Folded
from actors.ledger.groups import Groups
from actors.ledger.rows import Changes, Group, GroupState, Settings, Step
from actors.ledger.witness import START, next_chain
from schemas.messages import DroppedOrdinal


class Steps:
    """Composed steps. A step is composed once; whatever happens later, its groups are the same (P18)."""

    def __init__(self, settings: Settings, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self.composed: dict[int, Step] = {}
        self.chains: dict[int, str] = {0: START}
        self.last = 0
        """The newest composed step, 0 before the first."""
        self._next_ordinal = 0

    def restore(self, steps: list[Step], folded: Folded) -> None:
        """Take over what the store has."""
        self.chains, self.last = {folded.step: folded.chain}, folded.step
        self._next_ordinal = folded.finished.first_missing
        for step in steps:
            self._note(step)

    def fold(self, last: int) -> list[Step]:
        """Forget the steps up to this one, whose chain stays as the root of all later ones; returns them."""
        gone = [self.composed.pop(number) for number in sorted(self.composed) if number <= last]
        self.chains = {number: chain for number, chain in self.chains.items() if number >= last}
        self._changes.gone_steps += [step.step for step in gone]
        return gone

    def cut(self, last: int) -> list[Step]:
        """Forget the steps after this one, which will be composed anew; returns them."""
        cut = [self.composed.pop(number) for number in sorted(self.composed) if number > last]
        self.chains = {number: chain for number, chain in self.chains.items() if number <= last}
        self.last = last
        self._changes.gone_steps += [step.step for step in cut]
        return cut

    def compose_next(self, groups: Groups, digests: Mapping[int, str]) -> tuple[Step | None, list[Group]]:
        """The next step if its groups are there.

        Returns:
            the step, or None; and groups that were too old for it and have been dropped as `stale` (P17).
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
        if stale or len(chosen) < self._settings.groups_per_step:
            return None, stale
        return self._compose(number, chosen, groups, digests), []

    def _candidates(self, groups: Groups) -> list[Group]:
        """Up to groups_per_step settled groups, in the order that the configuration names (P16)."""
        if self._settings.order == "arrival":
            return list(islice(groups.settled.values(), self._settings.groups_per_step))
        if len(groups.settled) < self._settings.groups_per_step:
            return []
        chosen: list[Group] = []
        ordinal = self._next_ordinal = _skip_finished(groups, self._next_ordinal)
        while len(chosen) < self._settings.groups_per_step:
            group = groups.rows.get(ordinal)
            if ordinal >= groups.num_issued["train"] or (group and group.state is GroupState.ISSUED):
                return []
            if group and group.state is GroupState.SETTLED:  # one without a row has been folded: dropped long ago
                chosen.append(group)
            ordinal += 1
        return chosen

    def _compose(self, number: int, chosen: list[Group], groups: Groups, digests: Mapping[int, str]) -> Step:
        dropped = tuple(
            DroppedOrdinal(ordinal=ordinal, reason=groups.rows[ordinal].reason or "poison")
            for ordinal in sorted(groups.unreported_drops)
        )
        groups.unreported_drops.clear()
        ordinals = tuple(group.ordinal for group in chosen)
        step_digests = tuple(digests[ordinal] for ordinal in ordinals)
        chain = next_chain(self.chains[number - 1], number, ordinals, dropped, step_digests)
        step = Step(number, ordinals, dropped, step_digests, chain)
        groups.move(ordinals, GroupState.COMPOSED, number)
        self._note(step)
        self._changes.steps.append(step)
        return step

    def _note(self, step: Step) -> None:
        self.composed[step.step], self.chains[step.step], self.last = step, step.chain, step.step


def _skip_finished(groups: Groups, ordinal: int) -> int:
    """The first ordinal from here on that may still enter a step."""
    while ordinal < groups.num_issued["train"]:
        group = groups.rows.get(ordinal)
        if group is not None and group.state in (GroupState.ISSUED, GroupState.SETTLED):
            break
        ordinal += 1
    return ordinal
