"""Searches of worlds.

Systematic: the fair schedule, in which everybody does all that can be done and nothing goes wrong, costs nothing; any
other action, and any fate of a message, is a deviation and costs one. `Search` visits all worlds that one deviation
leads to, from each of them follows the fair schedule until a world that it knows, then goes on with two deviations, and
so on until its limit. Equal worlds are visited once. So what it finds has the fewest deviations there are, and each
visited world is known to end well: its fair schedule leads to `done` (liveness), or into a world of which that is known.

Random: `walk` lets anything happen for a while, then only the fair schedule.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.explore.packer import PACKER
from tests.explore.peers import Sampler, Scorer
from tests.explore.rules import Violation
from tests.explore.world import FATES, Action, ImpossibleError, Scenario, World

MAX_FAIR_SECONDS = 40
"""Of world time, in which a run without trouble has to end: far below the deadlines of attempts, which must not help."""
MAX_FAIR_ACTIONS = 1_000
KEPT_PER_LEVEL = 3_000
"""Worlds of a level from which the next deviations start; more than can be followed, and no more memory than that."""


def fair(world: World) -> Action | None:
    """What happens next when nothing goes wrong: work, then beats, then the packer's round, then time; None at the end."""
    if world.packer.over and not world.packer.stirred:
        return None
    for action in world.work():
        return action
    for action in world.news():
        return action
    if world.packer.stirred:
        return Action("round")
    return Action("deliver", detail=0) if world.wire else Action("second")


def deviations(world: World, default: Action | None, said: list[str]) -> Iterator[Action]:
    """What else may happen. `said` are the labels of the messages that the default action sends."""
    for action in (*world.work(), *world.news(), *(Action("deliver", detail=i) for i in range(len(world.wire)))):
        if action != default:
            yield action
    if default != Action("round"):
        if world.packer.stirred:
            yield Action("round")
        if default is not None and default.verb != "second":
            yield Action("second")
        yield Action("crash", PACKER)
    else:
        yield from (Action("round", detail=at) for at in deaths(len(said)))
    yield from troubles(world)
    if default is not None:
        yield from (default._replace(fates=((label, fate),)) for label in dict.fromkeys(said) for fate in FATES)


def deaths(num_messages: int) -> list[tuple[str, int]]:
    """Where in a round the packer may die: before its commit, between that and its first word, after each word."""
    return [("decide", 0), ("commit", 0), *(("send", sent) for sent in range(num_messages + 1))]


def troubles(world: World) -> Iterator[Action]:
    """What goes wrong with a process, or with all of them."""
    yield Action("pause")
    for name in world.peers:
        yield Action("crash", name)
        yield Action("silence", name)
    for sampler in world.all(Sampler):
        yield from (Action("fail", sampler.name, hold) for hold in sampler.to_sample)
    for scorer in world.all(Scorer):
        yield from (Action("fail", scorer.name, hold) for hold in scorer.held if hold not in scorer.failed)


Path = tuple["Path", Action, bool] | None
"""How a world was reached, from its last action back: (before, action, whether it is a deviation)."""


def actions_of(path: Path) -> list[tuple[Action, bool]]:
    """From the first one on."""
    found = []
    while path is not None:
        path, action, deviates = path
        found.append((action, deviates))
    return found[::-1]


class FoundError(Exception):
    """A rule that can be broken, and how."""

    def __init__(self, scenario: Scenario, violation: Violation, actions: list[tuple[Action, bool]]) -> None:
        deviating = sum(deviates for _, deviates in actions)
        lines = [f"  {'!' if deviates else ' '} {action}" for action, deviates in actions]
        head = f"{violation}\n{scenario.name}: {len(actions)} actions, {deviating} of them (!) not of the fair schedule:"
        super().__init__("\n".join([head, *lines]))
        self.violation, self.actions = violation, actions


@dataclass
class Figures:
    """What a search has seen. `complete` is the number of deviations up to which it has seen everything."""

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
            f"all of {self.complete} deviations, {self.seconds:.1f} s, {rate:.0f} transitions/s"
        )


class Search:
    """The systematic one.

    Args:
        limit: transitions after which it ends.
        seed: chooses which worlds go on, once there are more than can be followed.
    """

    def __init__(self, scenario: Scenario, limit: int, seed: int = 0) -> None:
        self.scenario, self._limit, self._rng = scenario, limit, random.Random(seed)
        self._known: set[int] = set()
        self.figures = Figures()

    def run(self) -> Figures:
        """Go on until the limit.

        Raises:
            FoundError: a rule can be broken.
        """
        started = time.monotonic()
        level = self._follow(World(self.scenario), None)
        while self.figures.transitions < self._limit and level:
            level = self._next(level)
        self.figures.seconds = time.monotonic() - started
        return self.figures

    def _next(self, level: list[tuple[World, Path]]) -> list[tuple[World, Path]]:
        """The new worlds that one more deviation leads to."""
        self._rng.shuffle(level)
        found: list[tuple[World, Path]] = []
        for world, path in level:
            default = fair(world)
            said = [parcel.label for parcel in self._after(world, path, default, False).said] if default else []
            for action in deviations(world, default, said):
                if self.figures.transitions >= self._limit:
                    return []
                after = self._after(world, path, action, True)
                self._keep(found, self._follow(after, (path, action, True)))
        self.figures.complete += 1
        return found

    def _keep(self, found: list[tuple[World, Path]], new: list[tuple[World, Path]]) -> None:
        """A fair sample, where there are too many."""
        for one in new:
            if len(found) < KEPT_PER_LEVEL:
                found.append(one)
            else:
                place = self._rng.randrange(self.figures.states)
                if place < KEPT_PER_LEVEL:
                    found[place] = one

    def _follow(self, world: World, path: Path) -> list[tuple[World, Path]]:
        """The fair schedule from here to the first known world; returns the new ones."""
        new, mine, until = list[tuple[World, Path]](), set[int](), world.now + MAX_FAIR_SECONDS
        while world.key not in self._known:
            self._known.add(world.key)
            mine.add(world.key)
            new.append((world, path))
            self.figures.states += 1
            action = fair(world)
            if action is None:
                self.figures.ends.add(world.key)
                return new
            if world.now > until or len(new) > MAX_FAIR_ACTIONS:
                self._raise(Violation("liveness", "without any trouble the run does not end"), path)
            world, path = self._after(world, path, action, False), (path, action, False)
        if world.key in mine:
            self._raise(Violation("liveness", "without any trouble the run goes round in a circle"), path)
        return new

    def _after(self, world: World, path: Path, action: Action, deviates: bool) -> World:
        self.figures.transitions += 1
        try:
            return world.after(action)
        except Violation as violation:
            self._raise(violation, (path, action, deviates))
            raise

    def _raise(self, violation: Violation, path: Path) -> None:
        raise FoundError(self.scenario, violation, actions_of(path)) from violation


# --- random walks ----------------------------------------------------------------------------------------------------

WEIGHTS = {"beat": 8, "round": 8, "deliver": 8, "second": 6, "pause": 1, "crash": 5, "silence": 1, "fail": 1}
"""Of the verbs that are not work, which has 12 each; fair actions are chosen besides."""
FAIR_SHARE, LOSSY_SHARE = 0.4, 0.4


def walk(scenario: Scenario, seed: int, num_actions: int) -> Figures:
    """Anything for a while, then the fair schedule to the end.

    Raises:
        FoundError: a rule was broken; by the fewest of its actions that still break it.
    """
    started, rng, world = time.monotonic(), random.Random(seed), World(scenario)
    actions, calm = list[Action](), list[tuple[Action, bool]]()
    try:
        for _ in range(num_actions):
            actions.append(anything(world, rng))
            world = world.after(actions[-1])
        world = to_the_end(world, calm)
    except Violation as violation:
        raise shrunk(scenario, actions, violation) from violation
    length = num_actions + len(calm)
    return Figures(length, length, length, 0, {world.key}, time.monotonic() - started)


def anything(world: World, rng: random.Random) -> Action:
    """The fair action, perhaps with what it says lost, or any other."""
    default = fair(world)
    if default is not None and rng.random() < FAIR_SHARE:
        if rng.random() < LOSSY_SHARE:
            labels = [parcel.label for parcel in world.after(default).said]
            fates = tuple((label, rng.choice(FATES)) for label in labels if rng.random() < LOSSY_SHARE)
            return default._replace(fates=fates)
        return default
    by_verb: dict[str, list[Action]] = {}
    for action in deviations(world, default, []):
        by_verb.setdefault(action.verb, []).append(action)
    verb = rng.choices(list(by_verb), [WEIGHTS.get(verb, 12) for verb in by_verb])[0]
    return rng.choice(by_verb[verb])


def to_the_end(world: World, done: list[tuple[Action, bool]]) -> World:
    """The fair schedule until the run is done; `done` gets its actions.

    Raises:
        Violation: it does not end, or breaks a rule.
    """
    until = world.now + MAX_FAIR_SECONDS
    for _ in range(MAX_FAIR_ACTIONS):
        action = fair(world)
        if action is None:
            return world
        if world.now > until:
            break
        done.append((action, False))
        world = world.after(action)
    raise Violation("liveness", "without any trouble the run does not end")


def shrunk(scenario: Scenario, actions: list[Action], violation: Violation) -> FoundError:
    """The fewest of these actions that break the same rule, found by leaving out ever smaller parts."""
    size = len(actions) // 2
    while size:
        start = 0
        while start < len(actions):
            fewer = actions[:start] + actions[start + size :]
            found = replay(scenario, fewer)[0]
            if found is not None and found.rule == violation.rule:
                actions, violation = fewer, found
            else:
                start += size
        size //= 2
    return FoundError(scenario, violation, replay(scenario, actions)[1])


def replay(scenario: Scenario, actions: list[Action]) -> tuple[Violation | None, list[tuple[Action, bool]]]:
    """What these actions break, those left out that can't happen; and what has happened, to the end of the run."""
    world, done = World(scenario), list[tuple[Action, bool]]()
    try:
        for action in actions:
            try:
                default = fair(world)
                done.append((action, action != default))
                world = world.after(action)
            except ImpossibleError:
                done.pop()
        to_the_end(world, done)
    except Violation as violation:
        return violation, done
    return None, done
