"""Choice of completions for a report: the best, the worst, and some by chance, from samples.jsonl in one pass."""

import heapq
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Prompt and completion, or all messages of a conversation."""
        if "messages" in self.group:
            return list(self.group["messages"][self.number])
        prompt = self.group["prompt"]
        messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return [*messages, {"role": "completion", "content": self.group["completions"][self.number]}]


def picked(groups: Iterable[Mapping[str, Any]], number: int, seed: int = 0) -> dict[str, list[Pick]]:
    """Return completions by the words of their choice: of each group the best and the worst count, and all by chance.

    Of equal rewards the newest. Memory: 3 × `number` groups.

    Args:
        groups: lines of samples.jsonl, in order.
        number: most completions of each choice.
        seed: seed of the choice by chance.
    """
    best: list[tuple[float, int, Pick]] = []
    worst: list[tuple[float, int, Pick]] = []
    chance: list[Pick] = []
    generator = random.Random(seed)
    seen = 0
    for order, group in enumerate(groups):
        picks = [Pick(group, place) for place in range(len(group["reward"]))]
        for pick in picks:
            # a sample of a stream: each completion so far is in it with the same probability
            place = seen if seen < number else generator.randrange(seen + 1)
            if place < number:
                chance[place : place + 1] = [pick]
            seen += 1
        scored = [(pick.reward, pick) for pick in picks if pick.reward is not None]
        if scored:
            # completions of one group are often alike, so a group has one place
            reward, pick = max(scored, key=lambda one: one[0])
            _keep(best, number, (reward, order, pick))
            reward, pick = min(scored, key=lambda one: one[0])
            _keep(worst, number, (-reward, order, pick))
    return {
        "best": [pick for *_, pick in sorted(best, reverse=True)],
        "worst": [pick for *_, pick in sorted(worst, reverse=True)],
        "by chance": sorted(chance, key=lambda pick: (pick.group["step"], pick.group["ordinal"], pick.number)),
    }


def _keep(heap: list[tuple[float, int, Pick]], number: int, entry: tuple[float, int, Pick]) -> None:
    """Add an entry to the `number` largest ones."""
    (heapq.heappush if len(heap) < number else heapq.heappushpop)(heap, entry)
