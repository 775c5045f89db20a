"""What may happen to a run, and in which order, drawn from a seed."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.process.fault_points import POINTS
from tests.chaos.threads import THREADS, kind_of, thread_at

Kind = Literal["SIGKILL", "SIGSTOP", "partition", "full disk", "exception", "foreign run", "environment worker"]
ROUND = 12
"""Faults between two SIGKILLs of `actors up`, with which its count of restarts and its pauses begin anew."""
MOST_PER_ROUND = 2
"""Deaths of one process in a round, if there is another choice: more would measure the pauses of a crash loop."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one process; at a point it passes, or (empty) whatever it does."""

    kind: Kind
    actor: str
    point: str = ""
    by: "Fault | None" = None
    """What else is done so that the process comes by the point at all."""

    def __str__(self) -> str:
        return f"{self.kind} {self.actor} {self.point}".rstrip()

    @property
    def kills(self) -> bool:
        """Whether the process ends."""
        return self.kind == "SIGKILL" or (self.kind == "exception" and thread_at(self.actor, self.point).ends)


UP = Fault("SIGKILL", "up")


def exceptions(actors: Sequence[str], places: Sequence[str]) -> tuple[Fault, ...]:
    """An exception at each of these places of threads in each of these actors that has one."""
    return tuple(
        Fault("exception", actor, place, _by(actor, place))
        for place in places
        for actor in actors
        if any(thread.place == place and kind_of(actor) in thread.kinds for thread in THREADS)
    )


def _by(actor: str, place: str) -> Fault | None:
    """Ranks and members of a broadcast meet anew when one is lost; and a log has no thread before its first line."""
    if place == "trainer.meeting":
        return Fault("SIGKILL", actor)
    if place == "weights.left" or (actor, place) == ("trainer-0", "weights.meeting"):
        return Fault("SIGKILL", "inference-1")
    said = {"rollout-0": Fault("SIGKILL", "inference-0"), "reward-0": Fault("exception", "reward-0", "reward.scored")}
    return said.get(actor) if place == "log" else None


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
        faults: list[Fault] = []
        for deck in [*[rare] * others_per_round, stops, *[kills] * size][:size]:
            faults.append(deck.take(Counter(fault.actor for fault in faults if fault.kills)))
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

    def take(self, deaths: Mapping[str, int]) -> Fault:
        """The next card of an actor that may still end in this round; where there is none, of who has ended least."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        beyond = [max(0, deaths.get(fault.actor, 0) - MOST_PER_ROUND + 1) for fault in self._left]
        return self._left.pop(beyond.index(min(beyond)))
