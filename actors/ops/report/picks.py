"""Choice of completions for a report: the best, the worst, and some by chance, from samples.jsonl in one pass."""

import heapq
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from actors.telemetry.totals import is_number


@dataclass(frozen=True)
class Pick:
    """Completion of a recorded group.

    Args:
        group: line of samples.jsonl.
        number: number of the completion in the group.
    """

    group: Mapping[str, Any]
    number: int

    @property
    def reward(self) -> float | None:
        """Reward; None if the completion could not be scored."""
        value = self.group["reward"][self.number]
        return float(value) if is_number(value) else None


def picked(groups: Iterable[Mapping[str, Any]], number: int, seed: int = 0) -> dict[str, list[Pick]]:
    """Return completions by the words of their choice; of equal rewards the newest.

    Memory: 3 × `number` groups.

    Args:
        groups: lines of samples.jsonl, in order.
        number: most completions of each choice.
        seed: seed of the choice by chance.
    """
    best: list[tuple[float, int, Pick]] = []
    worst: list[tuple[float, int, Pick]] = []
    chance: list[Pick] = []
    generator = random.Random(seed)
    order = count()
    for seen, pick in enumerate(_completions(groups)):
        # a sample of a stream: each completion so far is in it with the same probability
        place = seen if seen < number else generator.randrange(seen + 1)
        if place < number:
            chance[place : place + 1] = [pick]
        if pick.reward is None:
            continue
        entry = next(order)
        for heap, value in ((best, pick.reward), (worst, -pick.reward)):
            (heapq.heappush if len(heap) < number else heapq.heappushpop)(heap, (value, entry, pick))
    return {
        "best": [pick for *_, pick in sorted(best, reverse=True)],
        "worst": [pick for *_, pick in sorted(worst, reverse=True)],
        "by chance": sorted(chance, key=lambda pick: (pick.group["step"], pick.group["ordinal"], pick.number)),
    }


def _completions(groups: Iterable[Mapping[str, Any]]) -> Iterator[Pick]:
    for group in groups:
        for number in range(len(group["reward"])):
            yield Pick(group, number)
