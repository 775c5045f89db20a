"""Random walks: anything happens for a while, then only the fair schedule, to the end of the run.

They go where a systematic search does not come: many troubles, one upon the other. What one finds is shrunk before it
is shown.
"""

import random
import time

from tests.explore.rules import Violation
from tests.explore.schedule import deviations, fair
from tests.explore.search import LIVENESS, MAX_FAIR_SECONDS, Figures, FoundError, Step
from tests.explore.world import FATES, Action, ImpossibleError, Scenario, World

FAIR_SHARE, LOSSY_SHARE = 0.4, 0.4
WEIGHTS = {"heartbeat": 8, "round": 8, "deliver": 8, "second": 6, "crash": 5, "fork": 4}
"""Of what is not fair, by verb: what goes wrong seldom has 1, work has WORK_WEIGHT."""
RARE = ("pause", "silence", "fail", "drain", "stray")
WORK_WEIGHT = 12


def walk(scenario: Scenario, seed: int, num_actions: int) -> Figures:
    """One walk.

    Raises:
        FoundError: a rule was broken; by the fewest of its actions that still break it.
    """
    started, rng, world = time.process_time(), random.Random(seed), World(scenario)
    actions, calm = list[Action](), list[Step]()
    try:
        for _ in range(num_actions):
            actions.append(anything(world, rng))
            world = world.after(actions[-1])
        world = _to_the_end(world, calm)
    except Violation as violation:
        raise _shrunk(scenario, actions, violation) from violation
    length = num_actions + len(calm)
    return Figures(length, length, length, 0, {world.key}, time.process_time() - started)


def anything(world: World, rng: random.Random) -> Action:
    """The fair action, perhaps with what it says lost, or any other."""
    default = fair(world)
    if default is not None and rng.random() < FAIR_SHARE:
        return _lossy(world, default, rng) if rng.random() < LOSSY_SHARE else default
    by_verb: dict[str, list[Action]] = {}
    for action in deviations(world, default, []):
        by_verb.setdefault(action.verb, []).append(action)
    weights = [1 if verb in RARE else WEIGHTS.get(verb, WORK_WEIGHT) for verb in by_verb]
    verb = rng.choices(list(by_verb), weights)[0]
    return rng.choice(by_verb[verb])


def _lossy(world: World, action: Action, rng: random.Random) -> Action:
    labels = dict.fromkeys(parcel.label for parcel in world.after(action).said)
    return action.with_fates(*((label, rng.choice(FATES)) for label in labels if rng.random() < LOSSY_SHARE))


def _to_the_end(world: World, done: list[Step]) -> World:
    """The fair schedule until the run is done; `done` gets what happens.

    Raises:
        Violation: it does not end, or breaks a rule.
    """
    until = world.now + MAX_FAIR_SECONDS
    while (action := fair(world)) is not None:
        if world.now > until:
            raise Violation(LIVENESS, "without any trouble the run does not end")
        done.append((action, False))
        world = world.after(action)
    return world


def _shrunk(scenario: Scenario, actions: list[Action], violation: Violation) -> FoundError:
    """Few of these actions that break the same rule: ever smaller parts are left out, as long as it stays broken."""
    size = len(actions)
    while size:
        smaller = _without_parts(scenario, actions, size, violation.rule)
        size = size // 2 if len(smaller) == len(actions) else min(size, len(smaller))
        actions = smaller
    actions = _without_fates(scenario, actions, violation.rule)
    found, steps = replay(World(scenario), actions)
    return FoundError(scenario, found or violation, steps)


def _without_parts(scenario: Scenario, actions: list[Action], size: int, rule: str) -> list[Action]:
    """Leave out what is not needed, `size` actions at a time, from the last ones on."""
    before = _worlds(scenario, actions)
    for start in range(len(actions) - size, -1, -size):
        rest = actions[start + size :]
        if _breaks(before[start], rest, rule):
            actions = actions[:start] + rest
    return actions


def _without_fates(scenario: Scenario, actions: list[Action], rule: str) -> list[Action]:
    """Let messages arrive that may as well."""
    before = _worlds(scenario, actions)
    for place in range(len(actions) - 1, -1, -1):
        for fate in actions[place].fates:
            kept = (other for other in actions[place].fates if other != fate)
            rest = [actions[place].with_fates(*kept), *actions[place + 1 :]]
            if _breaks(before[place], rest, rule):
                actions = actions[:place] + rest
    return actions


def _worlds(scenario: Scenario, actions: list[Action]) -> list[World]:
    """The world before each action."""
    worlds = [World(scenario)]
    for action in actions[:-1]:
        try:
            worlds.append(worlds[-1].after(action))
        except ImpossibleError:
            worlds.append(worlds[-1])
    return worlds


def _breaks(world: World, actions: list[Action], rule: str) -> bool:
    found, _ = replay(world, actions)
    return found is not None and found.rule == rule


def replay(world: World, actions: list[Action]) -> tuple[Violation | None, list[Step]]:
    """Do these actions, but those that can't be done, and then what is fair; returns what breaks, and all that was."""
    done = list[Step]()
    try:
        for action in actions:
            try:
                done.append((action, action != fair(world)))
                world = world.after(action)
            except ImpossibleError:
                done.pop()
        _to_the_end(world, done)
    except Violation as violation:
        return violation, done
    return None, done
