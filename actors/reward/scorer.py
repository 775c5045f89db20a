"""Values of user functions for a group, with retries of late functions.

P11 (a failed completion fails the whole attempt): a group is scored as a whole or not at all, since scoring only the
survivors of a failure would bias the advantages. Every failure has a countable reason and names the function.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actors.reward.errors import RewardError
from actors.reward.functions import NamedReward
from actors.reward.lookup import ARGUMENTS
from actors.reward.runner import MAX_STUCK_CALLS, FunctionRunner
from schemas.errors import ConfigError
from schemas.messages import RolloutGroup


class Scorer:
    """Caller of user functions, with a time limit per group and try.

    Late functions are called again `retries` times. A function still late then counts as `on_timeout` says. A group of
    an evaluation fails instead, since an evaluation must not contain values that were never measured.

    Args:
        timeout: seconds for all functions of a group, for each try.
        num_calls: largest number of calls at the same time.
        retries: further calls of a late function.
        on_timeout: value of a function late in the last try: "none", "zero", or "fail" for the whole group.
        note_late: called with the group, a text on the late functions, and the outcome: `retried` or `on_timeout`.
    """

    def __init__(
        self,
        timeout: float,
        num_calls: int,
        retries: int = 0,
        on_timeout: Literal["none", "zero", "fail"] = "fail",
        note_late: Callable[[RolloutGroup, str, str], None] = lambda group, words, outcome: None,
    ) -> None:
        self._retries, self._on_timeout, self._note_late = retries, on_timeout, note_late
        # a late call may still run while its repetition runs
        self.runner = FunctionRunner(timeout, num_calls, MAX_STUCK_CALLS + retries * num_calls)
        """Runner of the calls."""

    def score(self, rewards: Sequence[NamedReward], group: RolloutGroup) -> NDArray[np.float64]:
        """Return the rewards of a group, shape (F, G); NaN: a function returned None, or was late and counts as None.

        Raises:
            RewardError: a function raised, was late, or returned anything but a finite number or None per completion.
            ConfigError: a column of the data has the name of an argument.
        """
        if taken := sorted(group.columns.keys() & set(ARGUMENTS)):
            raise ConfigError(
                f"environments[].path: {group.environment} has a column {taken[0]!r}, but under that name reward "
                "functions receive what was sampled; rename the column"
            )
        stand_in = [0.0 if self._on_timeout == "zero" else np.nan] * group.num_completions
        rows = self.call(rewards, group, required=group.purpose == "eval")
        found = [stand_in if row is None else row for row in rows]
        # without functions an empty list would lose the axis G
        return np.array(found, np.float64).reshape(len(rows), group.num_completions)

    def call(self, functions: Sequence[NamedReward], group: RolloutGroup, *, required: bool) -> list[Any]:
        """Call functions on a group and return the checked values of each; None for a late one if `on_timeout` allows.

        Args:
            functions: functions to call, all at the same time.
            group: the sampled group.
            required: True: a late function fails the group, whatever `on_timeout` says.

        Raises:
            RewardError: as `score`.
        """
        found: dict[int, Any] = {}
        for retries_left in range(self._retries, -1, -1):
            # functions that have returned are not called again: a judge costs money
            tried = self.runner.run({i: one for i, one in enumerate(functions) if i not in found}, group)
            found |= tried.values
            if not tried.late:
                break
            words = f"{', '.join(tried.late)} took more than {self.runner.timeout:g} s (reward.timeout)"
            if tried.blocker:
                words += f"; {tried.blocker} blocks the event loop of all async reward functions, make it a plain def"
            if tried.stalled:
                # a blocked event loop would make the call late again
                outcome = "fail"
            else:
                outcome = "retried" if retries_left else "fail" if required else self._on_timeout
            self._note_late(group, words, outcome)
            if outcome == "fail":
                repeated = self._retries and not tried.stalled
                times = f" {1 + self._retries} times (reward.timeout_retries)" if repeated else ""
                raise RewardError("reward_timeout", words + times)
        return [found.get(i) for i in range(len(functions))]
