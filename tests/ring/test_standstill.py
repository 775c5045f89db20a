"""A trainer that stands still while every queue is as small as it can be."""

import contextlib
import threading
import time

import pytest
from structlog.testing import capture_logs

from actors.learner.fake import FakeLearner
from actors.ledger import Store
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    TRANSPORTS,
    Ring,
    check_promise,
    ring,
    ring_config,
    wait_until,
)

STILL_SECONDS = 60.0


class StandingLearner(FakeLearner):
    """Stands still inside step 2 until it is let go."""

    def __init__(self) -> None:
        super().__init__(before_step=lambda batch: self._stand(batch.step))
        self.standing, self.go_on = threading.Event(), threading.Event()

    def _stand(self, step: int) -> None:
        if step == 2:
            self.standing.set()
            assert self.go_on.wait(3 * STILL_SECONDS)


def start(ring: Ring) -> StandingLearner:
    """The whole ring with a learner that will stand still."""
    learner = StandingLearner()
    ring.start("packer-0", "inference-0", "reward-0", "rollout-0")
    ring.start("trainer-0", learner=lambda: learner)
    return learner


@pytest.mark.long
def test_nobody_blocks_while_the_trainer_stands_still_for_a_minute(tmp_path):
    """HWM 1 and tiny buffers, all transports at once: loops go round, no lease is lost, then the runs complete."""
    configs = [
        ring_config(
            tmp_path / transport,
            transport,
            packer={"groups_per_step": 6, "max_async_level": 4},
            rollout={"group_size": 8},
            bus={"high_water_mark": 1, "socket_buffer_bytes": 2048},
            eval={"num_prompts": 0},
        )
        for transport in TRANSPORTS
    ]
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(ring(config)) for config in configs]
        learners = [start(one) for one in rings]
        for learner in learners:
            wait_until(learner.standing.is_set, "step 2")
        packers = [one["packer-0"] for one in rings]
        before = [(r.name, r, r.turns) for one in rings for r in one.actors.values() if r.name != "trainer-0"]
        fewest_peers = 4.0
        still_until = time.monotonic() + STILL_SECONDS
        while time.monotonic() < still_until:
            time.sleep(1.0)
            peers = [
                sum(p.value("grpo_packer_peers", role=a) for a in ("rollout", "reward", "trainer", "inference"))
                for p in packers
            ]
            fewest_peers = min(fewest_peers, *peers)
        turned = {name: running.turns - turns for name, running, turns in before}
        issued = [p.value("grpo_packer_issued_total", purpose="train") for p in packers]
        for learner in learners:
            learner.go_on.set()
        for one in rings:
            one.wait()
        deaths = [p.value("grpo_packer_holder_deaths_total") for p in packers]
    assert fewest_peers == 4, "heartbeats of all four peers went on"
    assert min(turned.values()) > STILL_SECONDS, f"main loops went round at least once a second: {turned}"
    assert issued == [36.0] * 3, "admission stops 5 levels of 6 groups ahead of the version served, which is 1"
    assert deaths == [0.0] * 3
    for config in configs:
        assert check_promise(config).dropped == {}


@pytest.mark.slow
def test_a_death_is_noticed_though_every_commit_is_slow(tmp_path, monkeypatch):
    """Rounds take longer than half a lease throughout, and heartbeats are read all the same."""
    config = ring_config(tmp_path, trainer={"max_steps": 1000}, eval={"num_prompts": 0}, bus=SHORT_LEASE)
    commit = Store.commit_patiently

    def slowly(store, *arguments):
        time.sleep(0.6 * config.bus.lease)
        return commit(store, *arguments)

    monkeypatch.setattr(Store, "commit_patiently", slowly)
    with ring(config) as run:
        run.start().start("rollout-1")
        rollouts = lambda: run["packer-0"].value("grpo_packer_peers", role="rollout")  # noqa: E731
        wait_until(lambda: rollouts() == 2, "both rollouts have sent a heartbeat")
        run["rollout-1"].crash()
        wait_until(lambda: rollouts() == 1, "the death of one is noticed")
        assert "rollout-0" in run.actors


@pytest.mark.slow
def test_a_packer_that_hangs_in_a_commit_is_silent_for_all_and_the_run_goes_on_afterwards(tmp_path, monkeypatch):
    """Nobody acts on older directives, so no group is sent again: after `bus.resend_after` it would be."""
    config = ring_config(tmp_path, trainer={"max_steps": 6}, eval={"num_prompts": 0}, bus=SHORT_LEASE)
    hangs, go_on, commit = threading.Event(), threading.Event(), Store.commit_patiently

    def hung(store, changes, payloads, *more):
        if payloads and not go_on.is_set():  # the first scored groups
            hangs.set()
            assert go_on.wait(PATIENCE_SECONDS)
        return commit(store, changes, payloads, *more)

    monkeypatch.setattr(Store, "commit_patiently", hung)
    with capture_logs() as logs, ring(config) as run:
        run.start()
        wait_until(hangs.is_set, "the packer commits the first groups")
        long = config.bus.lease + config.bus.resend_after + 1.0
        for name in ("rollout-0", "reward-0"):
            membership = run[name].actor.membership
            wait_until(lambda m=membership: m.silent_seconds > long, f"{name} hears nothing while the commit hangs")
        go_on.set()
        run.wait()
    assert not [line for line in logs if "group not arrived" in line["event"]]
    assert check_promise(config).dropped == {}
