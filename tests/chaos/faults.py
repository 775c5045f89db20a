"""What may happen to a run, and in which order, drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.faults import POINTS

Kind = Literal["SIGKILL", "SIGSTOP", "partition", "full disk"]
ROUND = 12
"""Faults between two SIGKILLs of `actors up`, with which its count of restarts and its pauses begin anew."""
MOST_PER_ROUND = 2
"""Deaths of one process in a round: more would measure the pauses of a crash loop instead of a recovery."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one process; at a point it passes, or (empty) whatever it does."""

    kind: Kind
    actor: str
    point: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.actor} {self.point}".rstrip()


UP = Fault("SIGKILL", "up")


def actors_at(point: str, ranks: int) -> list[str]:
    """Who passes a point: every rank those inside a step, rank 0 alone those of a checkpoint."""
    place = point.partition(".")[0]
    if place == "checkpoint":
        return ["trainer-0"]
    return [f"trainer-{rank}" for rank in range(ranks)] if place == "trainer" else [f"{place}-0"]


def draw(
    seed: int, number: int, ranks: int, points: Sequence[str], others: Sequence[Fault], others_per_round: int
) -> list[Fault]:
    """So many faults for one run: every state once before any comes again.

    Args:
        seed: of the order.
        number: of faults.
        ranks: of the trainer.
        points: that may be armed.
        others: faults besides SIGKILL and SIGSTOP of actors that this run may meet.
        others_per_round: of twelve faults.
    """
    rng = random.Random(seed)
    at = [(actor, point) for point in points for actor in actors_at(point, ranks)]
    kills = Deck([Fault("SIGKILL", actor, point) for actor, point in at], rng)
    stops = Deck([Fault("SIGSTOP", actor, point) for actor, point in at], rng)
    rare = Deck(list(others), rng) if others else stops
    drawn: list[Fault] = []
    while len(drawn) < number:
        size = min(ROUND, number - len(drawn)) - 1
        faults = [deck.take(()) for deck in [*[rare] * others_per_round, stops][:size]]
        while len(faults) < size:
            killed = [fault.actor for fault in faults if fault.kind == "SIGKILL"]
            faults.append(kills.take([actor for actor in killed if killed.count(actor) >= MOST_PER_ROUND]))
        rng.shuffle(faults)
        drawn += [*faults, UP]
    return drawn


def all_points(pattern: str = "") -> list[str]:
    """The points whose name begins with one of these, parted by commas."""
    return [point for point in POINTS if point.startswith(tuple(pattern.split(",")))]


class Deck:
    """Cards that come in a random order, each once before any comes again."""

    def __init__(self, cards: list[Fault], rng: random.Random) -> None:
        self._cards, self._rng = cards, rng
        self._left: list[Fault] = []

    def take(self, spared: Sequence[str]) -> Fault:
        """The next card that hits none of these actors, if there is one."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        at = next((i for i, fault in enumerate(self._left) if fault.actor not in spared), 0)
        return self._left.pop(at)
