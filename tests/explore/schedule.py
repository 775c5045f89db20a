"""What happens next: the fair schedule, in which everybody does all that can be done, and all that deviates from it."""

from collections.abc import Iterator

from tests.explore.packer import PACKER
from tests.explore.peers import STRAY, Sampler, Scorer
from tests.explore.world import FATES, Action, World


def fair(world: World) -> Action | None:
    """What happens when nothing goes wrong: work, heartbeats, the packer's round, then time; None at the end."""
    if world.packer.over and not world.packer.stirred:
        return None
    for action in (*world.work(), *world.news()):
        return action
    if world.packer.stirred:
        return Action("round")
    return Action("deliver", detail=0) if world.wire else Action("second")


def deviations(world: World, default: Action | None, said: list[str]) -> Iterator[Action]:
    """What else may happen. `said` are the labels of the messages that the default action sends."""
    yield from (action for action in _possible(world) if action != default)
    if default == Action("round"):
        yield from (Action("round", detail=at) for at in _deaths(len(said)))
    else:
        yield Action("crash", PACKER)
    yield from _troubles(world)
    if default is not None:
        yield from (default.with_fates((label, fate)) for label in dict.fromkeys(said) for fate in FATES)


def _possible(world: World) -> Iterator[Action]:
    """All that is no trouble: in another order than the fair one."""
    yield from world.work()
    yield from world.news()
    yield from (Action("deliver", detail=i) for i in range(len(world.wire)))
    if world.packer.stirred:
        yield Action("round")
    yield Action("second")


def _deaths(num_messages: int) -> list[tuple[str, int]]:
    """Where in a round the packer may die: before its commit, between that and its first word, after each word."""
    return [("decide", 0), ("commit", 0), *(("send", sent) for sent in range(num_messages + 1))]


def _troubles(world: World) -> Iterator[Action]:
    """What goes wrong with a process, or with all of them."""
    yield Action("pause")
    if world.num_forks < world.scenario.forks:
        yield Action("fork")
        yield from (Action("fork", detail=step) for step in world.disk.checkpoints)
    yield from (Action("stray", name) for name in world.scenario.strays if not world.peers[name + STRAY].started)
    for name in world.peers:
        yield Action("crash", name)
        yield Action("silence", name)
    for sampler in world.all(Sampler):
        yield from (Action("fail", sampler.label, hold) for hold in sampler.to_sample)
    for scorer in world.all(Scorer):
        yield from (Action("fail", scorer.label, hold) for hold in scorer.held if hold not in scorer.failed)
        if scorer.phase == "running" and scorer.run:
            yield Action("drain", scorer.label)
