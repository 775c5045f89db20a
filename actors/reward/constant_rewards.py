"""Detection of reward functions that return the same value for every completion.

Often the function has a mistake: with chat prompts a completion is a list of messages, and a comparison with a text
gives the same result for all, without an error.
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GROUPS_UNTIL_SAID = 20
"""Number of groups (of two or more completions) with the same value throughout, after which a function is reported."""
CHAT_HINT = (
    "; completions of chat prompts are lists of messages, [{'role': 'assistant', 'content': TEXT}], not texts: "
    "compare completion[-1]['content']"
)


class ConstantRewards:
    """Values of all reward functions so far. The first different value clears a function for good. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        """Value of each function that has not varied so far, by name."""
        self._num_groups: dict[str, int] = {}
        self._different: set[str] = set()
        """Names of functions whose values have varied."""
        self._words: dict[str, str] = {}

    @property
    def words(self) -> list[str]:
        """Reports on functions that have returned the same value for all completions of enough groups."""
        with self._lock:
            return [self._words[name] for name in sorted(self._words)]

    def note(self, names: Sequence[str], rewards_FG: NDArray[np.float64], is_chat: bool) -> list[str]:
        """Record the rewards of a group; return new reports, if any function has become suspicious with this group.

        Rows without a number are ignored: the function did not apply, or was late.

        Args:
            names: names of the functions, F of them.
            rewards_FG: values of F functions for G completions; NaN: None.
            is_chat: True if the prompt is a chat; adds a hint about lists of messages.
        """
        # a group of a single completion has no second value to differ from
        if rewards_FG.shape[1] < 2:
            return []
        new: list[str] = []
        with self._lock:
            for name, row in zip(names, rewards_FG, strict=True):
                values = np.unique(row[~np.isnan(row)])
                if name in self._different or not values.size:
                    continue
                first = self._values.setdefault(name, float(values[0]))
                if values.size > 1 or values[0] != first:
                    self._different.add(name)
                    self._words.pop(name, None)
                    continue
                self._num_groups[name] = self._num_groups.get(name, 0) + 1
                # not `>=`: each function is reported once
                if self._num_groups[name] == GROUPS_UNTIL_SAID:
                    said = f"{name} returned {first:g} for every completion of the first {GROUPS_UNTIL_SAID} groups"
                    self._words[name] = said + (CHAT_HINT if is_chat else "")
                    new.append(self._words[name])
        return new
