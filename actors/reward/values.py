"""Checks of the values that user functions return. A wrong value fails the group; nothing is guessed in its place."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from actors.algorithms.advantages import StepRewards
from actors.reward.errors import RewardError


def check_values(name: str, values: Any, size: int) -> list[float]:
    """Return the values of a reward function as floats, None as NaN.

    Raises:
        RewardError: the number of values is wrong, or a value is neither None nor a finite number.
    """
    numbers: list[float] = []
    for i, item in enumerate(_one_each(name, values, size)):
        if item is None:
            numbers.append(float("nan"))
            continue
        try:
            # float() would accept the text "1"
            number = None if isinstance(item, str | bytes) else float(item)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise RewardError(
                "reward_invalid", f"{name} returned {item!r:.60} for completion {i}, expected a number or None"
            )
        # NaN is how None is stored, so a NaN of the function would pass for "not applicable"
        if not np.isfinite(number):
            raise RewardError(
                "reward_invalid", f"{name} returned {number} for completion {i}; use None for 'not applicable'"
            )
        numbers.append(number)
    return numbers


def check_steps(name: str, values: Any, lengths: Sequence[int]) -> list[StepRewards]:
    """Return the steps from a function of `reward.steps`: (end, reward) pairs per completion; no pairs for None.

    Args:
        name: name of the function, for errors.
        values: values as returned.
        lengths: tokens of each completion; `end` is a number of tokens up to this.

    Raises:
        RewardError: the number of values is wrong, or a pair has an end outside of the completion or no finite reward.
    """
    items = _one_each(name, values, len(lengths))
    steps: list[StepRewards] = []
    for i, (item, length) in enumerate(zip(items, lengths, strict=True)):
        try:
            # index: int() would cut an end of 1.5 to 1
            pairs = [(operator.index(end), float(reward)) for end, reward in (() if item is None else item)]
        except (TypeError, ValueError):
            raise RewardError(
                "reward_invalid", f"{name} returned {item!r:.60} for completion {i}, expected (end, reward) pairs"
            ) from None
        for end, reward in pairs:
            if not 1 <= end <= length or not np.isfinite(reward):
                raise RewardError(
                    "reward_invalid",
                    f"{name} returned the step ({end}, {reward}) for completion {i}; an end is from 1 to {length}, its "
                    "number of tokens, and a reward is finite",
                )
        steps.append(pairs)
    return steps


def _one_each(name: str, values: Any, size: int) -> list[Any]:
    # texts, maps and sets are iterable too, but are never a value per completion
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        raise RewardError("reward_invalid", f"{name} returned {type(values).__name__}, expected a list of {size}")
    items = list(values)
    if len(items) != size:
        raise RewardError("reward_invalid", f"{name} returned {len(items)} values for {size} completions")
    return items
