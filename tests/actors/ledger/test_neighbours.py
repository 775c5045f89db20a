"""What rollout actors are told of engines and reward actors: one table for all, new only when a process changes."""

import random

import numpy as np
import pytest

from actors.ledger import replies
from actors.ledger.neighbours import Neighbourhood
from schemas import limits
from schemas.messages import EngineAddress, Neighbours, RewardAddress, RolloutDirective
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, policy, settings


class Busy(Engine):
    """An engine with a load."""

    load = 0

    def _fields(self):
        return super()._fields() | {"load": self.load}


def ring_of(engines: int, rewards: int, rollouts: int) -> tuple[Ring, list[Rollout]]:
    """A ring in which everybody has been heard once."""
    ring = Ring(settings())
    for number in range(engines):
        ring.add(Busy(f"e{number}", policy=policy(0)))
    for number in range(rewards):
        ring.add(Reward(f"r{number}"))
    asking = [ring.add(Rollout(f"a{number}", slots=0)) for number in range(rollouts)]
    ring.turn()
    ring.turn()
    return ring, asking


def directive(rollout: Rollout) -> RolloutDirective:
    """The newest one."""
    assert isinstance(rollout.directive, RolloutDirective)
    return rollout.directive


@pytest.mark.parametrize(("engines", "rewards", "rollouts"), [(1, 1, 2), (4, 2, 8), (64, 32, 50)])
def test_all_rollouts_share_one_table_of_all_processes(engines: int, rewards: int, rollouts: int) -> None:
    """The same object for each, so it is encoded once; with every engine and reward actor."""
    ring, asking = ring_of(engines, rewards, rollouts)
    ring.machine.tell_everybody()
    said = replies.directives(ring.machine)
    tables = {id(said[rollout.identity.encode()].neighbours) for rollout in asking}
    assert len(tables) == 1
    shown = directive(asking[0])
    assert {peer.name for peer in shown.engines} == {f"e{number}" for number in range(engines)}
    assert {peer.name for peer in shown.rewards} == {f"r{number}" for number in range(rewards)}
    assert set(shown.live_engines) == {engine.boot_id for engine in shown.neighbours.engines}


def test_a_load_or_a_new_version_changes_no_table_and_loads_are_told_to_their_sender_alone() -> None:
    """A table is large, and loads change with each heartbeat: neither may reach every rollout for that."""
    ring, asking = ring_of(3, 2, 4)
    before = directive(asking[0]).neighbours
    engine = ring.doubles[0]
    assert isinstance(engine, Busy)
    engine.load = 7
    ring.heartbeat(engine)
    assert list(ring.decide()) == [engine.identity]
    engine.policy = policy(1)
    ring.heartbeat(engine)
    said = ring.decide()
    assert {rollout.identity for rollout in asking} <= set(said)
    shown = directive(asking[0])
    assert shown.neighbours is before
    assert {(peer.name, peer.policy, peer.load) for peer in shown.engines} == {
        ("e0", policy(1), 7), ("e1", policy(0), 0), ("e2", policy(0), 0)
    }  # fmt: skip


def test_an_engine_that_updates_stays_in_the_table_and_gets_no_requests() -> None:
    """Requests that it is answering are not taken for lost, and its return sends no table."""
    ring, asking = ring_of(2, 1, 1)
    before = directive(asking[0]).neighbours
    engine = ring.doubles[1]
    assert isinstance(engine, Busy)
    engine.engine_state = "updating"
    ring.heartbeat(engine)
    ring.decide()
    shown = directive(asking[0])
    assert [peer.name for peer in shown.engines] == ["e0"]
    assert sorted(shown.live_engines) == sorted(double.identity.partition("/")[2] for double in ring.doubles[:2])
    assert shown.neighbours is before


def test_a_process_that_comes_goes_or_moves_makes_a_new_table_and_another_packer_makes_the_same() -> None:
    """The name is a digest of the content, whoever was heard first."""
    engines = [EngineAddress(name=f"e{n}", boot_id="1", url=f"http://{n}") for n in range(2)]
    rewards = [RewardAddress(name="r", boot_id="1", address="ipc://r")]
    table = Neighbours.of("run", engines, rewards)
    assert table.equals(Neighbours.of("run", list(engines), list(rewards)))
    others = [
        Neighbours.of("run", engines[:1], rewards),
        Neighbours.of("run", engines, []),
        Neighbours.of("run", [engines[0], engines[1].model_copy(update={"url": "http://9"})], rewards),
        Neighbours.of("run", [engines[0], engines[1].model_copy(update={"boot_id": "2"})], rewards),
        Neighbours.of("other", engines, rewards),
    ]
    assert len({table.table, *(other.table for other in others)}) == 6
    first, _ = ring_of(2, 1, 1)
    names = []
    for order in (list(first.doubles), list(reversed(first.doubles))):
        packer = Ring(settings())
        packer.machine.run = first.machine.run
        for double in order:
            double.run = ""
            packer.machine.heard(packer.now, double.identity, double.heartbeat())
        said = replies.directives(packer.machine)
        names.append(said[b"a0/1"].neighbours.table)
    assert names[0] == names[1]


def test_a_load_beyond_what_travels_is_shown_as_the_most() -> None:
    """No load of a peer, however wrong, ends the packer."""
    ring, _ = ring_of(2, 1, 1)
    for engine, load in zip(ring.doubles, (1 << 40, -5), strict=False):
        assert isinstance(engine, Busy)
        engine.load = load
        ring.heartbeat(engine)
    ring.decide()
    assert replies.loads(ring.machine).tolist() == [limits.LOAD_SHOWN, 0, 0]


@pytest.mark.parametrize("rollouts", [2, 10, 100])
def test_rollouts_without_groups_have_one_directive_and_busy_ones_keep_their_part(rollouts: int) -> None:
    """A new version makes one directive for all idle rollouts; a busy one hears it with its tickets and releases."""
    ring, asking = ring_of(2, 1, rollouts)
    busy = ring.add(Rollout("busy", slots=2))
    ring.heartbeat(busy)
    ring.decide()
    assert len(directive(busy).tickets) == 2
    engine = ring.doubles[0]
    assert isinstance(engine, Busy)
    engine.policy = policy(1)
    ring.heartbeat(engine)
    said = ring.decide()
    assert len({id(said[rollout.identity]) for rollout in asking}) == 1
    assert directive(busy).tickets, "its heartbeat has not named them yet"
    for rollout in (asking[0], busy):
        assert policy(1) in [peer.policy for peer in directive(rollout).engines]


def test_every_cached_directive_equals_one_made_anew() -> None:
    """Over a random history of versions, loads, arrivals and work: what a rollout is told is what the machine says."""
    chance = random.Random(0)
    ring, asking = ring_of(3, 2, 3)
    for rollout in asking:
        rollout.slots = 2
    for _ in range(300):
        double = chance.choice(ring.doubles)
        if isinstance(double, Busy):
            double.load = chance.randrange(9)
            double.policy = policy(chance.randrange(3)) if chance.random() < 0.3 else double.policy
            double.engine_state = chance.choice(["clean", "clean", "updating"])
        ring.heartbeat(double)
        ring.decide()
        before = {rollout.identity: directive(rollout) for rollout in asking}
        ring.machine.told.clear()
        ring.machine.told_alike, ring.machine.neighbourhood = {}, Neighbourhood()
        ring.machine.tell_everybody()
        anew = replies.directives(ring.machine)
        for identity, told in before.items():
            made = anew[identity.encode()]
            assert isinstance(made, RolloutDirective)
            same = {made.loads: np.zeros(0, np.int16)}
            assert made.model_copy(update=same).equals(told.model_copy(update=same))


def test_of_more_policies_than_travel_the_newest_are_told() -> None:
    """130 engines, each with a version of its own: the three furthest behind get no new requests, and stay listed."""
    ring, asking = ring_of(130, 1, 1)
    for number, engine in enumerate(ring.doubles[:130]):
        assert isinstance(engine, Busy)
        engine.policy = policy(number)
        ring.heartbeat(engine)
    ring.heartbeat(asking[0])
    ring.decide()
    shown = directive(asking[0])
    assert sorted(peer.policy.version for peer in shown.engines) == list(range(3, 130))
    assert len(shown.live_engines) == 130
