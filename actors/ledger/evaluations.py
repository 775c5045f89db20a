"""Evaluations: which versions are evaluated, and the one that is under way (P26).

An evaluation samples with exactly one policy, so the engines keep it until the last of its tickets has settled.
"""

from actors.ledger.groups import Groups
from actors.ledger.rows import Changes, Settings
from schemas.messages import Policy


class Evaluations:
    """One evaluation at a time, in the order of versions. `done` are those finished or skipped, ascending."""

    def __init__(self, settings: Settings, has_examples: bool, groups: Groups, changes: Changes) -> None:
        self._settings, self._groups, self._changes = settings, groups, changes
        self._enabled = has_examples
        self.done: list[int] = []
        self.policy: Policy | None = None

    def restore(self, done: list[int]) -> None:
        """Take over the evaluations that are done, and the one under way: it has groups that are still issued."""
        self.done = list(done)
        self.policy = next((self._groups.rows[ordinal].policy for ordinal in self.open), None)

    @property
    def open(self) -> set[int]:
        """The ordinals that the evaluation under way waits for."""
        return self._groups.open_evals

    def next_version(self) -> int | None:
        """The lowest version that is to be evaluated and has not been; None: no more."""
        if not self._enabled:
            return None
        s, last = self._settings, self.done[-1] if self.done else -1
        due = [0] * s.eval_at_start + [s.max_steps] * s.eval_at_end
        if s.eval_every_steps:
            periodic = (max(last, 0) // s.eval_every_steps + 1) * s.eval_every_steps
            due += [periodic] * (periodic < s.max_steps)
        return min((version for version in due if version > last), default=None)

    def begin(self, policy: Policy) -> None:
        """The groups just issued are the evaluation of this policy."""
        self.policy = policy

    def finish(self) -> int:
        """The last group of the one under way has settled or was dropped; returns its version."""
        assert self.policy is not None
        version, self.policy = self.policy.version, None
        self.skip(version)
        return version

    def skip(self, version: int) -> None:
        """This version will not be evaluated (any more)."""
        self.done.append(version)
        self._changes.values["evals_done"] = list(self.done)

    def forget_after(self, version: int) -> None:
        """Evaluations of later versions were of a dead history; they are due again."""
        self.done = [done for done in self.done if done <= version]
        self._changes.values["evals_done"] = list(self.done)

    def void(self) -> None:
        """The policy is gone: give the evaluation up; it will begin again."""
        policy, self.policy = self.policy, None
        for group in [row for row in self._groups.rows.values() if row.policy == policy]:
            if group.ordinal < 0 and group.reason is None:
                self._groups.drop(group, "eval_void")
