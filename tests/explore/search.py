"""The systematic search.

The fair schedule costs nothing; any other action, and any fate of a message, is a deviation and costs one. The search
visits all worlds that one deviation leads to, and from each of them follows the fair schedule to a world that it knows;
then it does so with two deviations, and so on until its limit. Equal worlds are visited once. So what it finds has the
fewest deviations there are, and every world that it has visited ends well when the trouble ends (liveness): its fair
schedule leads to `done`, or to a world of which that is known.
"""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from tests.explore.rules import Violation
from tests.explore.schedule import deviations, fair
from tests.explore.world import Action, Scenario, World

MAX_FAIR_SECONDS = 40
"""Of a world's time, in which a run without trouble has to end; the deadlines of attempts are far, and can't help."""
LIVENESS = "liveness"
SHOWN_OF_A_RUN = 20
KEPT_PER_LEVEL = 3_000
"""Worlds of a level from which the next deviations start; there are more, but no time to follow them."""


class Link(NamedTuple):
    """How a world was reached: its last action, and how the world before that was reached."""

    before: "Link | None"
    action: Action
    deviates: bool
    length: int


class Reached(NamedTuple):
    """A world, and how."""

    world: World
    link: Link | None


Step = tuple[Action, bool]
"""An action, and whether it deviates from the fair schedule."""


def steps_to(link: Link | None) -> list[Step]:
    """From the first one on."""
    found = list[Step]()
    while link is not None:
        found.append((link.action, link.deviates))
        link = link.before
    return found[::-1]


class FoundError(Exception):
    """A rule that can be broken, and how."""

    def __init__(self, scenario: Scenario, violation: Violation, steps: list[Step]) -> None:
        self.scenario, self.violation, self.steps = scenario, violation, steps
        number = len(self.deviating)
        head = f"{violation}\n{scenario.name}: {len(steps)} actions; {number} of them (!) are not the fair schedule's"
        super().__init__("\n".join([head, *self._lines()]))

    def _lines(self) -> list[str]:
        """The trace; a run that does not end is shown for a while."""
        lines = [f"  {'!' if deviates else ' '} {action}" for action, deviates in self.steps]
        last = max((number for number, (_, deviates) in enumerate(self.steps) if deviates), default=0)
        end = len(lines) if self.violation.rule != LIVENESS else min(len(lines), last + SHOWN_OF_A_RUN)
        return lines[:end] + [f"    … and {len(lines) - end} more"] * (end < len(lines))

    @property
    def deviating(self) -> list[Action]:
        """What it takes."""
        return [action for action, deviates in self.steps if deviates]


@dataclass
class Figures:
    """What has been seen. `complete`: all that this many deviations lead to."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    complete: int = 0
    ends: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.transitions / self.seconds if self.seconds else 0.0
        return (
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, {len(self.ends)} end states, "
            f"all of {self.complete} deviations, {self.seconds:.1f} s of CPU, {rate:.0f} transitions/s"
        )


def search(scenario: Scenario, limit: int, seed: int = 0) -> Figures:
    """Search until so many states have been visited.

    Args:
        seed: chooses which worlds are followed, once there are more than can be.

    Raises:
        FoundError: a rule can be broken.
    """
    return _Search(scenario, limit, seed).run()


class _Search:
    def __init__(self, scenario: Scenario, limit: int, seed: int) -> None:
        self._scenario, self._limit, self._rng = scenario, limit, random.Random(seed)
        self._known: set[int] = set()
        self._figures = Figures()
        self._left_out = False
        """Whether some world was not followed."""

    def run(self) -> Figures:
        started = time.process_time()
        level = self._follow(Reached(World(self._scenario), None))
        while level and not self._is_over:
            level = self._next_level(level)
            self._figures.complete += not self._is_over and not self._left_out
            self._left_out |= len(level) > KEPT_PER_LEVEL
            level = level[:KEPT_PER_LEVEL]
        self._figures.seconds = time.process_time() - started
        return self._figures

    @property
    def _is_over(self) -> bool:
        return self._figures.states >= self._limit

    def _next_level(self, level: list[Reached]) -> list[Reached]:
        """The new worlds that one more deviation leads to: all of them, or one more than are followed."""
        self._rng.shuffle(level)
        found, num_new = list[Reached](), 0
        for reached in level:
            for action in self._deviations_of(reached):
                if self._is_over:
                    return found
                new = self._follow(self._after(reached, action, True))
                self._keep(found, new, num_new)
                num_new += len(new)
        self._rng.shuffle(found)
        return found

    def _deviations_of(self, reached: Reached) -> Iterable[Action]:
        default = fair(reached.world)
        if default is None:
            return deviations(reached.world, None, [])
        after = self._after(reached, default, False).world
        return deviations(reached.world, default, [parcel.label for parcel in after.said])

    def _keep(self, found: list[Reached], new: list[Reached], num_before: int) -> None:
        """A fair sample of all, where there are too many."""
        for number, reached in enumerate(new, start=num_before):
            if len(found) <= KEPT_PER_LEVEL:
                found.append(reached)
            elif (place := self._rng.randrange(number + 1)) <= KEPT_PER_LEVEL:
                found[place] = reached

    def _follow(self, reached: Reached) -> list[Reached]:
        """The fair schedule from here to the first known world; returns the new ones."""
        new, mine, until = list[Reached](), set[int](), reached.world.now + MAX_FAIR_SECONDS
        while reached.world.key not in self._known:
            mine.add(reached.world.key)
            self._known.add(reached.world.key)
            new.append(reached)
            action = fair(reached.world)
            if action is None:
                self._figures.ends.add(reached.world.key)
                break
            if reached.world.now > until:
                self._raise(Violation(LIVENESS, "without any trouble the run does not end"), reached.link)
            reached = self._after(reached, action, False)
        else:
            if reached.world.key in mine:
                self._raise(Violation(LIVENESS, "without any trouble the run goes round in a circle"), reached.link)
        self._figures.states += len(new)
        return new

    def _after(self, reached: Reached, action: Action, deviates: bool) -> Reached:
        link = Link(reached.link, action, deviates, 1 + (reached.link.length if reached.link else 0))
        self._figures.transitions += 1
        self._figures.depth = max(self._figures.depth, link.length)
        try:
            return Reached(reached.world.after(action), link)
        except Violation as violation:
            self._raise(violation, link)

    def _raise(self, violation: Violation, link: Link | None) -> NoReturn:
        raise FoundError(self._scenario, violation, steps_to(link)) from violation
