"""Evaluations: which versions are evaluated, and the one that is under way (P26).

An evaluation samples with exactly one policy, so the engines keep it until the last of its tickets has settled.
"""

from collections.abc import Iterable

from actors.ledger.rows import Changes, Settings
from schemas.messages import Policy


class Evaluations:
    """One evaluation at a time, in the order of versions."""

    def __init__(self, settings: Settings, has_examples: bool, changes: Changes) -> None:
        self._settings, self._changes = settings, changes
        self._enabled = has_examples
        self.done: list[int] = []
        self.policy: Policy | None = None
        self.open: set[int] = set()

    def restore(self, done: list[int], open_groups: Iterable[tuple[int, Policy]]) -> None:
        """Take over the evaluations that are done, and the groups of one under way."""
        self.done = list(done)
        for ordinal, policy in open_groups:
            self.open.add(ordinal)
            self.policy = policy

    def next_version(self) -> int | None:
        """The lowest version that is to be evaluated and has not been; None: no more."""
        if not self._enabled:
            return None
        last = max(self.done, default=-1)
        s = self._settings
        due = [0] * s.eval_at_start + [s.max_steps] * s.eval_at_end
        if s.eval_every_steps:
            due += [v for v in range(s.eval_every_steps, s.max_steps, s.eval_every_steps) if v > last][:1]
        return min((version for version in due if version > last), default=None)

    def begin(self, policy: Policy, ordinals: Iterable[int]) -> None:
        """These groups are the evaluation of this policy."""
        self.policy, self.open = policy, set(ordinals)

    def closed(self, ordinal: int) -> int | None:
        """A group of it settled or was dropped; the version, when it was the last one."""
        self.open.discard(ordinal)
        if self.open or self.policy is None:
            return None
        version, self.policy = self.policy.version, None
        self.done.append(version)
        self._changes.values["evals_done"] = list(self.done)
        return version

    def void(self) -> set[int]:
        """The policy is gone: give the evaluation up; it will begin again. Returns its open groups."""
        given_up, self.open, self.policy = self.open, set(), None
        return given_up
