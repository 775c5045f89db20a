"""What a round of the packer costs does not grow with what waits: CPU seconds in all, at three sizes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from actors.algorithms.curriculum import Curriculum
from actors.ledger import GroupFacts, Verdict
from actors.ledger.peers import MAX_REMEMBERED, Peers
from benchmarks.peers import lone_packer
from schemas import limits
from schemas.messages import Directive, InferenceHeartbeat, ObserverHeartbeat
from tests.actors.ledger.driver import Double, Engine, Ring, Rollout, Trainer, settings
from tests.ring.harness import ring_config

pytestmark = pytest.mark.slow

SLOTS = 64
MAX_SECONDS = 2.0
"""Of CPU, for all that the largest fork or evaluation costs the packer."""
FACTOR = 2.0
"""A machine that is shared may take so much longer."""
MAX_GROWTH = 3.0
"""Of the cost from one size to one of twice as much; a quadratic cost has 4."""


class TimedRing(Ring):
    """Counts the CPU seconds of the machine and the store, and none of the doubles'."""

    seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A part that counts."""
        began = time.process_time()
        yield
        self.seconds += time.process_time() - began

    def heartbeat(self, *doubles: Double) -> None:
        """Heartbeats are heard."""
        heartbeats = [(double.identity, double.heartbeat()) for double in doubles]
        with self.timed():
            for identity, heartbeat in heartbeats:
                self.machine.heard(self.now, identity, heartbeat)

    def decide(self) -> dict[str, Directive | None]:
        """The machine decides, the store commits."""
        with self.timed():
            self.machine.decide(self.now)
            self.commit()
        return self.say()

    def score(self, facts: GroupFacts) -> Verdict:
        """A group settles."""
        with self.timed():
            return self.machine.scored(facts)

    def start_all(self) -> tuple[Rollout, Engine, Trainer]:
        """New actors; returns them when the engine serves what the trainer has published."""
        self.doubles = []
        rollout = self.add(Rollout("rollout-0", boot=self.store.term, slots=0))
        engine = self.add(Engine("inference-0", boot=self.store.term))
        trainer = self.add(Trainer("trainer-0", boot=self.store.term))
        while engine.policy is None:
            self.turn()
            engine.load(trainer)
        return rollout, engine, trainer


def cost_of_a_fork(num_groups: int) -> float:
    """CPU seconds to give up so many groups and to issue and settle their examples again, SLOTS a round."""
    given = {"groups_per_step": SLOTS, "max_steps": 10**6, "max_async_level": num_groups // SLOTS - 1}
    ring = TimedRing(settings(**given))
    rollout, *_ = ring.start_all()
    rollout.slots = num_groups
    for _ in range(1 + num_groups // limits.DIRECTIVE_TICKETS):
        ring.turn()
    assert len(rollout.held) == num_groups
    ring.restart_packer()
    ring.seconds = 0.0
    ring.machine.rewind()
    rollout, engine, _ = ring.start_all()
    rollout.slots = SLOTS
    assert ring.machine.groups.dropped["train"]["forked"] == num_groups
    while ring.machine.groups.num_issued["train"] < 2 * num_groups:
        ring.turn()
        ring.settle(rollout, engine.policy)
    return ring.seconds


def cost_of_an_evaluation(num_prompts: int) -> float:
    """CPU seconds to issue and settle so many prompts, SLOTS a round."""
    ring = TimedRing(settings(eval_at_start=True, max_async_level=0), num_evals=num_prompts)
    rollout, engine, _ = ring.start_all()
    rollout.slots = SLOTS
    while ring.machine.evaluations.done != [0]:
        ring.turn()
        ring.settle(rollout, engine.policy)
    return ring.seconds


@pytest.mark.parametrize(
    ("cost", "sizes"), [(cost_of_a_fork, (1_024, 2_048, 4_096)), (cost_of_an_evaluation, (4_000, 8_000, 16_000))]
)
def test_a_large_fork_and_a_large_evaluation_cost_the_packer_little(
    cost: Callable[[int], float], sizes: tuple[int, ...]
) -> None:
    """Within seconds in all, and about twice as much for twice as many."""
    seconds = [cost(size) for size in sizes]
    print(f"\n{cost.__name__}: {[round(one, 2) for one in seconds]} s of CPU for {sizes}")
    assert seconds[-1] <= FACTOR * MAX_SECONDS
    assert seconds[-1] <= MAX_GROWTH**2 * seconds[0]


def test_draws_make_no_order_of_examples_anew_however_many_environments_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One order for each environment and epoch."""
    curriculum, made = Curriculum([1_000] * 12, None, 0), list[Any]()
    monkeypatch.setattr("numpy.random.default_rng", _counted(made))
    for _ in range(600):
        curriculum.draw()
    assert len(made) == 12


def _counted(made: list[Any]) -> Callable[[Any], Any]:
    import numpy as np

    make = np.random.default_rng

    def counted(seed: Any) -> Any:
        made.append(seed)
        return make(seed)

    return counted


def test_names_that_have_come_and_gone_are_forgotten() -> None:
    """20 000 names, of which three live: a pool of servers that move makes names without end."""
    peers = Peers(3.0)
    for i in range(20_000):
        name = f"rollout-{i}"
        heartbeat = ObserverHeartbeat(run="R", term=1, name=name, boot_id="x", sequence=1, phase="running")
        peers.heard(float(i), f"{name}/x", heartbeat)
        peers.expire(float(i))
    assert len(peers.identities()) == 3
    assert peers.num_names <= MAX_REMEMBERED


def test_a_beat_that_tells_of_tokens_alone_makes_no_commit(tmp_path) -> None:
    """An engine says each second what it has generated; that is written once in a while, and at the end."""
    with lone_packer(ring_config(tmp_path)) as ring:
        packer = ring.packer
        said = {"url": "http://a", "engine_state": "clean", "policy": None, "load": 0, "holds_two_versions": False}
        packer.run_round(0.0)
        commits = partial(ring.metrics.registry.get_sample_value, "grpo_packer_commit_seconds_count")
        before = commits()
        for number in range(1, 41):
            heartbeat = InferenceHeartbeat(
                run=packer.machine.run, term=packer.machine.term, name="inference-7", boot_id="b", phase="running",
                sequence=number, generated_tokens=100 * number, update_seconds={}, **said,
            )  # fmt: skip
            packer.heard(b"inference-7/b", heartbeat)
            packer.run_round(0.0)
        assert commits() - before <= 2, "now and perhaps once more"
        packer.drain()
        packer.run_round(0.0)
        assert packer.store.value("generated") == 4_000
        assert packer.store.value("engine_tokens") == {"inference-7/b": 4_000}
