"""Two whole runs on one machine, over tcp without keys, whose ports are exchanged by restarts (P1, P2)."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.learner.fake import FakeLearner
from bus.topology import Addresses
from schemas.config import RunConfig
from schemas.config.data import JsonlConfig
from tests.ports import free_port, is_free
from tests.ring.harness import (
    PATIENCE_SECONDS,
    check_promise,
    own_reward,
    ring,
    ring_config,
    steps_recorded,
    wait_until,
)

PLACES = ("packer-0", "reward-0", "trainer-0")
"""Who binds a port for data."""
STEPS = 30


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


def config_of(folder: Path, name: str) -> RunConfig:
    """A run whose examples bear its name; its reward function leaves a file when it is given any other example."""
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": "a", "label": name}) + "\n" for i in range(99)))
    return ring_config(
        folder / name, "tcp", trainer={"max_steps": STEPS}, eval={"num_prompts": 0},
        inference={"engine": {"type": "fake", "token_seconds": 0.03}},
        reward=own_reward("of_one_run", expected=name, foreign=str(folder / "foreign")),
    ).model_copy(update={"environments": [JsonlConfig(type="jsonl", path=str(rows))]})  # fmt: skip


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two configurations, and their ports."""
    configs = [config_of(tmp_path, name) for name in ("a", "b")]
    ports = Ports(configs)
    monkeypatch.setattr(
        Addresses, "to_bind", lambda self, actor, boot_id: f"tcp://127.0.0.1:{ports.of(self._tag, actor)}"
    )
    return configs, ports


def learner_of(trained: set[str]) -> Callable[[], FakeLearner]:
    """Makes learners that note the run of each batch."""
    return lambda: FakeLearner(before_step=lambda batch: trained.add(batch.run))


@pytest.mark.slow
def test_two_runs_whose_ports_are_exchanged_take_nothing_of_each_other(runs, tmp_path):
    """Rewards, trainers and packers of both are crashed and come back at each other's ports; both runs end well.

    The other run's process is there at once, while this run's peers still send to the address that they know.
    """
    configs, ports = runs
    trained = (set[str](), set[str]())

    def samples(rollout):
        return any(held.group is None for held in list(rollout.held.values()))

    def foreign(actor):
        return sum(edge.dropped["foreign_run"] for edge in actor.edges)

    with ring(configs[0]) as first, ring(configs[1]) as second:
        learners = [learner_of(batches) for batches in trained]
        for run, learner in zip((first, second), learners, strict=True):
            run.start(learner=learner)
        for number, name in enumerate(PLACES, start=1):
            wait_until(lambda number=number: min(map(steps_recorded, configs)) >= 2 * number, f"step {2 * number}")
            for run in (first, second):
                run[name].crash(lambda rollout=run["rollout-0"].actor: samples(rollout))
            wait_until(lambda name=name: all(map(is_free, ports.all_of(name))), "the sockets are closed")
            ports.exchange(name)
            first.start(name, learner=learners[0])
            time.sleep(0.8)  # in which the second run's peers send to the first one
            if name == "packer-0":
                # what is sampled now is scored and sent here, since without a packer nobody tells another address
                receiver = first.packer
                wait_until(lambda receiver=receiver: foreign(receiver), "the first packer drops a group of the second")
            second.start(name, learner=learners[1])
        for run in (first, second):
            run.wait(PATIENCE_SECONDS)
    assert not (tmp_path / "foreign").exists(), "a group of the other run has been scored"
    assert trained == ({first.packer.machine.run}, {second.packer.machine.run})
    for config in configs:
        assert check_promise(config).dropped == {}
