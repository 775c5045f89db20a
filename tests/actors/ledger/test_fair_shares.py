"""A slow environment next to a fast one (P15, P16): tickets, steps, and nothing lost."""

from typing import Any

import pytest

from actors.ledger import GroupState
from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, policy, settings

HALVES = {"slow": 0.5, "fast": 0.5}


class World:
    """Groups of `fast` settle in the turn after their issue, groups of `slow` after `delay` turns; steps take one."""

    def __init__(self, delay: int, slots: int = 64, **changes: Any) -> None:
        values = {
            "groups_per_step": 4,
            "max_steps": 10_000,
            "order": "arrival",
            "max_off_policy_steps": 400,
            "allowance": 399 * 4,
            "shares": HALVES,
            "max_concurrent_groups": slots,
        }
        self.ring = Ring(settings(**values | changes))
        self.engine = self.ring.add(Engine("e", policy=policy(0)))
        self.rollout = self.ring.add(Rollout("a", slots=slots))
        self.trainer = self.ring.add(Trainer("t", last_step=10_000, save_every=1000))
        self.delay, self.turn = delay, 0
        self.given: dict[int, int] = {}
        self.most_slow = 0

    def run(self, turns: int) -> None:
        """Let turns pass."""
        for _ in range(turns):
            self.turn += 1
            self.ring.now += 1.0
            self.ring.turn()
            self.engine.load(self.trainer)
            for ordinal, attempt in list(self.rollout.to_sample):
                since = self.given.setdefault(ordinal, self.turn)
                is_slow = self.ring.row(ordinal).example.environment == "slow"
                if self.turn - since >= (self.delay if is_slow else 0):
                    self.ring.score(self.rollout.sample((ordinal, attempt), self.sampled_by(ordinal)))
            if self.trainer.can_train:
                self.trainer.train()
            self.most_slow = max(self.most_slow, len(self.ring.machine.groups.under_way.get("slow", ())))

    def sampled_by(self, ordinal: int) -> Any:
        """The policy at the start of the group: its oldest token."""
        return policy(self.ring.row(ordinal).sampled_from)

    def trained(self, label: str) -> int:
        """Groups of an environment in trained steps."""
        rows = self.ring.machine.groups.rows.values()
        return sum(row.example.environment == label and (row.step or 10**9) <= self.steps for row in rows)

    @property
    def steps(self) -> int:
        """Trained steps."""
        return self.ring.machine.trained_step


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_slow_environment_leaves_the_fast_one_its_rate(level: int) -> None:
    """In turns in which no slow group ends as many fast groups are trained as alone."""
    alone = World(0, max_async_level=level, shares={}, allowance=0)
    company = World(1000, max_async_level=level)
    # until the slow environment has its share under way
    for world in (alone, company):
        world.run(50)
    before = alone.trained("words"), company.trained("fast")
    for world in (alone, company):
        world.run(100)
    rates = alone.trained("words") - before[0], company.trained("fast") - before[1]
    assert rates[1] >= 0.97 * rates[0] > 100
    assert company.most_slow == 32


def test_without_shares_the_slow_environment_takes_the_whole_window() -> None:
    """What the rule is for: the fast one stops."""
    both = World(1000, allowance=0)
    both.run(100)
    assert both.trained("fast") < 20


def test_the_slow_environment_trains_as_many_groups_as_its_slots_allow() -> None:
    """32 slots for ten turns each: 3.2 groups a turn are more than its weight needs; the mix is then the weights."""
    both = World(10)
    both.run(300)
    slow, fast = both.trained("slow"), both.trained("fast")
    assert 0.4 < slow / (slow + fast) < 0.6
    few = World(40, slots=16)
    few.run(400)
    # 8 slots, forty turns: a fifth of a group each turn
    assert few.most_slow == 8
    assert few.trained("slow") >= 0.8 * 400 * 8 / 40


def test_no_group_is_stale_since_steps_wait_for_it() -> None:
    """Limit 8: the fast one runs eight steps ahead of a slow group, waits for it, and nothing is sampled in vain."""
    both = World(50, max_off_policy_steps=8, allowance=28)
    both.run(500)
    assert both.ring.machine.groups.dropped["train"] == {}
    assert both.trained("slow") > 100
    # three windows and allowances fit into fifty turns, and no step more
    assert both.steps <= 500 / 50 * 9 + 9


def test_a_rollout_that_dies_holds_up_no_step() -> None:
    """A group without a holder is sampled by a newer version later, so nothing is lost by going on."""
    both = World(1000, max_off_policy_steps=8, allowance=28)
    both.run(60)
    stopped_at = both.steps
    both.run(20)
    assert both.steps == stopped_at
    both.ring.kill(both.rollout)
    both.ring.wait(3.5)
    both.rollout = both.ring.add(Rollout("b", slots=64))
    both.run(20)
    assert both.steps > stopped_at


def test_shares_survive_a_restart_of_the_packer() -> None:
    """Groups under way and the newest settled ones are found in the rows."""
    both = World(1000)
    both.run(50)
    both.ring.commit()
    before = both.ring.machine.groups
    both.ring.restart_packer()
    after = both.ring.machine.groups
    assert after.under_way == {label: ordinals for label, ordinals in before.under_way.items() if ordinals}
    assert after.newest_settled == before.newest_settled
    trained = both.trained("fast")
    both.run(50)
    assert both.trained("fast") > trained + 100


def test_every_group_is_trained_once_at_the_end() -> None:
    """The last step takes the slow groups that are left."""
    both = World(30, max_steps=40)
    both.trainer.last_step = 40
    both.run(200)
    machine = both.ring.machine
    assert both.steps == 40
    assert machine.groups.num_issued["train"] == 160
    assert {row.state for row in machine.groups.rows.values()} <= {GroupState.TRAINED, GroupState.DURABLE}
