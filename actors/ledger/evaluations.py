"""Evaluations: the versions to evaluate, and the running evaluation (P26: engines keep its policy until it is done).

An evaluation samples with exactly one policy, so engines serve that policy until the last ticket has settled.
"""

from collections.abc import Callable

from actors.ledger.groups import Groups
from actors.ledger.rows import Changes, Settings
from schemas.messages import PolicyVersion


class Evaluations:
    """Schedule of evaluations; evaluations run one after another, in the order of versions."""

    def __init__(self, settings: Settings, has_examples: bool, groups: Groups, changes: Changes) -> None:
        self._settings, self._groups, self._changes = settings, groups, changes
        self._enabled = has_examples
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
        if not self._enabled:
            return None
        s, last = self._settings, self.done[-1] if self.done else -1
        due = [0] * s.eval_at_start + [s.max_steps] * s.eval_at_end  # a bool times a list: the list or []
        if s.eval_every_steps:
            # the next multiple after the last evaluation; max_steps itself is a matter of eval_at_end
            periodic = (max(last, 0) // s.eval_every_steps + 1) * s.eval_every_steps
            due += [periodic] * (periodic < s.max_steps)
        return min((version for version in due if version > last), default=None)

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

    def _drop(self, is_dead: Callable[[PolicyVersion], bool]) -> None:
        for group in [row for row in self._groups.rows.values() if row.policy and is_dead(row.policy)]:
            # settled groups too: the version is evaluated again, and these groups would count twice
            if group.ordinal < 0 and group.reason is None:
                self._groups.drop(group, "eval_void")
