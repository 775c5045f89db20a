"""Two whole runs on one machine, over tcp without keys, whose ports are exchanged by restarts (P1, P2)."""

import hashlib
import threading
import time
from collections import Counter

import pytest

import actors.reward.loop
import actors.trainer.loop
from bus.topology import Addresses
from schemas.config import RunConfig
from tests.ports import free_port, is_free
from tests.ring.harness import PATIENCE_SECONDS, check_promise, ring, ring_config, steps_recorded, wait_until

PLACES = ("packer-0", "reward-0", "trainer-0")
"""Who binds a port for data."""
STEPS = 20


class Ports:
    """Gives each of two runs fixed ports for data, and exchanges them."""

    def __init__(self, configs: list[RunConfig]) -> None:
        self._tags = [hashlib.sha256(str(config.output).encode()).hexdigest()[:10] for config in configs]
        self._ports = {(tag, place): free_port() for tag in self._tags for place in PLACES}
        self._lock = threading.Lock()

    def of(self, tag: str, actor: str) -> int:
        """The port that an actor of a run binds now."""
        with self._lock:
            return self._ports[tag, actor]

    def all_of(self, actor: str) -> list[int]:
        """The ports of both runs' actors."""
        return [self.of(tag, actor) for tag in self._tags]

    def exchange(self, actor: str) -> None:
        """Give each run's actor the port that the other run's one had."""
        first, second = ((tag, actor) for tag in self._tags)
        with self._lock:
            self._ports[first], self._ports[second] = self._ports[second], self._ports[first]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two configurations, their ports, and what a process has trained or scored that was not of its run."""
    configs = [
        ring_config(
            tmp_path / name, "tcp", trainer={"max_steps": STEPS}, eval={"num_prompts": 0},
            inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        )
        for name in ("a", "b")
    ]  # fmt: skip
    ports, taken = Ports(configs), []
    monkeypatch.setattr(
        Addresses, "to_bind", lambda self, actor, boot_id: f"tcp://127.0.0.1:{ports.of(self._tag, actor)}"
    )
    score, step = actors.reward.loop.RewardActor._score, actors.trainer.loop.TrainerActor._step

    def scored(self, held):
        taken.extend([held.group.run] * (held.group.run != self.membership._state.run))
        return score(self, held)

    def trained(self, learner, ranks, batch, waited):
        taken.extend([batch.run] * (batch.run != self._run))
        return step(self, learner, ranks, batch, waited)

    monkeypatch.setattr(actors.reward.loop.RewardActor, "_score", scored)
    monkeypatch.setattr(actors.trainer.loop.TrainerActor, "_step", trained)
    return configs, ports, taken


@pytest.mark.slow
def test_two_runs_whose_ports_are_exchanged_take_nothing_of_each_other(runs):
    """Rewards, trainers and packers of both are crashed and come back at each other's ports; both runs end well.

    The other run's process is there at once, while this run's peers still send to the address that they know.
    """
    configs, ports, taken = runs
    dropped = Counter[str]()

    def count(edges):
        for edge in edges:
            dropped[edge.edge] += edge.dropped["foreign_run"]

    with ring(configs[0]) as first, ring(configs[1]) as second:
        for run in (first, second):
            run.start()
        for number, actor in enumerate(PLACES, start=1):
            wait_until(lambda number=number: min(map(steps_recorded, configs)) >= 2 * number, f"step {2 * number}")
            for run in (first, second):
                count(run[actor].actor.edges)
                run[actor].crash()
            wait_until(lambda actor=actor: all(map(is_free, ports.all_of(actor))), "the sockets are closed")
            ports.exchange(actor)
            first.start(actor)
            time.sleep(0.8)  # in which the second run's peers send to the first one
            second.start(actor)
        for run in (first, second):
            run.wait(PATIENCE_SECONDS)
            for running in run.actors.values():
                count(running.actor.edges)
    assert taken == []
    assert dropped["groups"] + dropped["scored"] + dropped["steps"] > 0, "nothing came to a wrong address"
    for config in configs:
        assert check_promise(config).dropped == {}
