"""Evaluations: the versions to evaluate, and the running evaluation (P26: engines keep its policy until it is done).

An evaluation samples with exactly one policy, so engines serve that policy until the last ticket has settled.
"""

from collections.abc import Callable, Collection

from actors.ledger.groups import Groups
from actors.ledger.rows import Changes, Settings
from schemas.messages import PolicyVersion


class Evaluations:
    """Schedule of evaluations; versions are evaluated one after another, each by all evaluations that are due.

    Args:
        settings: rules of the evaluations.
        labels: names of the evaluations that have examples.
        groups: table of groups.
        changes: changes of the round, extended in place.
    """

    def __init__(self, settings: Settings, labels: Collection[str], groups: Groups, changes: Changes) -> None:
        self._settings, self._groups, self._changes = settings, groups, changes
        self._labels = set(labels)
        self.done: list[int] = []
        """Versions with a finished or skipped evaluation, ascending."""
        self.policy: PolicyVersion | None = None
        """Policy of the running evaluation; None between evaluations."""

    def restore(self, done: list[int]) -> None:
        """Load the finished evaluations; a running evaluation is found by its groups, which are still issued."""
        self.done = list(done)
        self.policy = next((self._groups.rows[ordinal].policy for ordinal in self.open), None)

    @property
    def open(self) -> set[int]:
        """Unfinished ordinals of the running evaluation."""
        return self._groups.open_evals

    def next_version(self) -> int | None:
        """Return the lowest version still to evaluate; None if no evaluation is left."""
        s, last = self._settings, self.done[-1] if self.done else -1
        due = [s.eval_rule(label).next_after(last, s.max_steps) for label in self._labels]
        return min((version for version in due if version is not None), default=None)

    def due(self, version: int) -> set[str]:
        """Return the names of the evaluations of a version."""
        s = self._settings
        return {label for label in self._labels if s.eval_rule(label).is_due(version, s.max_steps)}

    def begin(self, policy: PolicyVersion) -> None:
        """Start the evaluation of this policy, after the groups were issued."""
        self.policy = policy

    def finish(self) -> int:
        """Finish the running evaluation, with all groups settled or dropped; return the version."""
        assert self.policy is not None
        version, self.policy = self.policy.version, None
        self.skip(version)
        return version

    def skip(self, version: int) -> None:
        """Mark a version as done without an evaluation."""
        self.done.append(version)
        self._changes.values["evals_done"] = list(self.done)

    def forget_after(self, version: int) -> None:
        """Discard evaluations of later versions: the history is dead, and these versions are due again.

        The groups are dropped, also groups of a finished but unrecorded evaluation: the next evaluation of the same
        version would count such groups as its own.
        """
        self.done = [done for done in self.done if done <= version]
        self._changes.values["evals_done"] = list(self.done)
        if self.policy is not None and self.policy.version > version:
            self.policy = None
        self._drop(lambda policy: policy.version > version)

    def void(self) -> None:
        """Discard the running evaluation, since its policy is gone; the version stays due."""
        given_up, self.policy = self.policy, None
        self._drop(lambda policy: policy == given_up)

    def drop_unknown(self) -> None:
        """Drop the open groups of evaluations that the configuration no longer has: no actor has their examples."""
        for ordinal in sorted(self.open):
            if self._groups.rows[ordinal].example.environment not in self._labels:
                self._groups.drop(self._groups.rows[ordinal], "eval_void")

    def _drop(self, is_dead: Callable[[PolicyVersion], bool]) -> None:
        for group in [row for row in self._groups.rows.values() if row.policy and is_dead(row.policy)]:
            # settled groups too: the version is evaluated again, and these groups would count twice
            if group.ordinal < 0 and group.reason is None:
                self._groups.drop(group, "eval_void")
