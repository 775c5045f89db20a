"""Which reward actor gets a group, and when a group is sent again."""

import time
from contextlib import closing

import numpy as np
import pytest
import structlog

from actors.engines.http.client import SampledCompletion
from actors.rollout import delivery as delivery_module
from actors.rollout.delivery import Delivery
from actors.rollout.held import HeldTicket, Hold
from actors.rollout.reward_choice import RewardChoice
from actors.telemetry.metrics import Metrics
from bus.data import Inbox
from bus.topology import Addresses
from schemas import limits
from schemas.config import RunConfig
from schemas.config.services import BusConfig
from schemas.messages import RewardPeer
from tests.actors.rollout.doubles import Client, directive, group, ticket
from tests.ports import free_port
from tests.ring.harness import ring_config, wait_until


class Holder:
    """Tickets, and the delivery of their groups."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.held: dict[Hold, HeldTicket] = {}
        self.delivery = Delivery(config, "rollout-0", Metrics("rollout"), self.held)


@pytest.fixture
def make_holder(tmp_path):
    """Makes holders with a lease of 0.2 s."""
    bus = {"beat_interval": 0.1, "lease": 0.2, "resend_after": 5.0}
    return lambda **sections: Holder(ring_config(tmp_path, bus=bus, **sections))


@pytest.fixture
def actor(make_holder):
    """One of them."""
    return make_holder()


class Sends(list):
    """What is sent: (ordinal, address), and nothing goes anywhere. `room`: whether reward actors take anything."""

    room = True


@pytest.fixture
def sends(monkeypatch):
    """In place of all outboxes."""
    sent = Sends()

    class Box:
        def __init__(self, edge, address, bus, name):
            self.address = address

        def try_send(self, group):
            if sent.room:
                sent.append((group.ordinal, self.address))
            return sent.room

        def close(self):
            pass

    monkeypatch.setattr(delivery_module, "Outbox", Box)
    return sent


def test_resend_time_doubles_with_each_sending_and_not_with_each_try(actor, sends, clock):
    """No reward actor has room for a while: tries cost nothing; sent twice, the next time is after 10 s."""
    held = actor.held[0, 1] = HeldTicket(ticket(), group=group())
    sends.room = False
    rewards_of(actor, 1, {"w": "1"})
    for _ in range(2000):
        actor.delivery.send()
    assert held.resend_after == 0.0
    sends.room = True
    actor.delivery.send()
    assert held.resend_after == 5.0
    actor.delivery.send()
    assert held.resend_after == 5.0, "not late yet"
    clock.directives(6.0, actor, {"w": "1"})
    assert held.resend_after == 10.0


def rewards_of(
    actor: Holder,
    term: int,
    running: dict[str, str],
    live: list[str] | None = None,
    scoring: tuple[tuple[int, int], ...] = (),
) -> None:
    """A directive that names these reward actors: boot ids by name; `live`: those alive, if others."""
    rewards = [RewardPeer(name=n, boot_id=b, address=f"inproc://{b}", load=0) for n, b in running.items()]
    actor.delivery.note(time.monotonic(), directive(term, rewards=rewards, live=live, scoring=scoring))
    actor.delivery.send()


class ShiftedClock:
    """The monotonic clock, which a test moves forward."""

    def __init__(self, now: float) -> None:
        self.now = now

    def directives(self, seconds: float, actor: Holder, running: dict[str, str], term: int = 1, **fields) -> None:
        """Let these seconds pass with a directive every tenth of a second."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now += 0.1
            rewards_of(actor, term, running, **fields)

    def silence(self, seconds: float, actor: Holder) -> None:
        """Let these seconds pass without any directive; the actor looks every half second, as it does."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            actor.delivery.send()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until the test moves it."""
    shifted = ShiftedClock(time.monotonic())
    monkeypatch.setattr(time, "monotonic", lambda: shifted.now)
    return shifted


def failures_of(actor: Holder) -> list[str]:
    """Return the words of all attempts that have failed."""
    return [held.failure.detail for held in actor.held.values() if held.failure]


def hold_groups(actor: Holder, number: int) -> None:
    """So many sampled groups that nobody has been sent."""
    for ordinal in range(number):
        now = time.monotonic()
        actor.held[ordinal, 1] = HeldTicket(ticket(ordinal), group=group(ordinal), accepted_at=now)


def test_no_group_is_sent_again_when_a_new_packer_has_not_heard_all_reward_actors_yet(actor, sends):
    """64 groups at 8 reward actors; directives of the next term name one, then none, then all: nothing is sent."""
    everybody = {f"reward-{i}": f"b{i}" for i in range(8)}
    hold_groups(actor, 64)
    rewards_of(actor, 1, everybody)
    assert len(sends) == 64
    for named in ({"reward-5": "b5"}, {}, everybody):
        rewards_of(actor, 2, named)
    assert len(sends) == 64


def test_a_draining_reward_actor_keeps_what_it_was_sent_and_gets_nothing_new(actor, sends):
    """It sends heartbeats and is not named; only the group that is sampled after that goes to the other one."""
    hold_groups(actor, 2)
    rewards_of(actor, 1, {"reward-0": "b0"})
    rewards_of(actor, 1, {"reward-1": "b1"}, live=["b0", "b1"])
    assert sends == [(0, "inproc://b0"), (1, "inproc://b0")]
    actor.held[2, 1] = HeldTicket(ticket(2), group=actor.held[0, 1].group)
    rewards_of(actor, 1, {"reward-1": "b1"}, live=["b0", "b1"])
    assert sends[2:] == [(0, "inproc://b1")]


def test_groups_of_a_reward_actor_that_is_gone_are_sent_again(actor, sends, monkeypatch):
    """At once when its name has a new process; after a lease of directives without it (0.2 s) otherwise."""
    hold_groups(actor, 1)
    rewards_of(actor, 1, {"reward-0": "b0"})
    rewards_of(actor, 1, {"reward-0": "b0 again"}, live=["b0", "b0 again"])
    assert [address for _, address in sends] == ["inproc://b0", "inproc://b0 again"]
    now = time.monotonic()
    for seconds in (0.0, 0.1, 0.17, 0.3):
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        rewards_of(actor, 1, {"reward-1": "b1"})
        assert len(sends) == (3 if seconds == 0.3 else 2)
    assert sends[-1] == (0, "inproc://b1")


def test_after_a_move_groups_that_have_not_arrived_are_sent_again_at_once(actor, sends):
    """Their connections are dead; what a reward actor has named is there."""
    hold_groups(actor, 3)
    rewards_of(actor, 1, {"reward-0": "b0"})
    rewards_of(actor, 1, {"reward-0": "b0"}, scoring=((1, 1),))
    actor.delivery.connect_again()
    assert actor.delivery.outboxes == {}
    rewards_of(actor, 1, {"reward-0": "b0"}, scoring=((1, 1),))
    assert [ordinal for ordinal, _ in sends] == [0, 1, 2, 0, 2]


def test_a_group_that_a_reward_actor_names_is_not_sent_again_however_long_it_takes(actor, sends, clock):
    """A judge that takes minutes: the directive names the hold among those that are being scored."""
    hold_groups(actor, 1)
    rewards_of(actor, 1, {"reward-0": "b0", "reward-1": "b1"})
    clock.directives(400.0, actor, {"reward-0": "b0", "reward-1": "b1"}, scoring=((0, 1),))
    assert len(sends) == 1


@pytest.mark.slow
def test_while_the_packer_is_away_no_group_is_sent_again_and_none_fails(actor, sends, clock):
    """64 groups at 8 reward actors for 600 s without a directive: they are held and can't be named to anybody (P13).

    Directives of before the packer was stopped, and those of a new packer that has not heard all, change nothing
    either.
    """
    everybody = {f"reward-{i}": f"b{i}" for i in range(8)}
    hold_groups(actor, 64)
    rewards_of(actor, 1, everybody)
    assert len(sends) == 64
    clock.silence(600.0, actor)
    rewards_of(actor, 1, everybody)
    clock.silence(600.0, actor)
    rewards_of(actor, 2, {"reward-5": "b5"}, scoring=((5, 1),))
    clock.directives(4.0, actor, everybody, term=2, scoring=((5, 1),))
    clock.directives(10.0, actor, everybody, term=2, scoring=tuple(actor.held))
    assert len(sends) == 64
    assert failures_of(actor) == []
    assert not actor.delivery.reward_choice.avoided, "no reward actor is avoided"


def test_a_group_that_got_lost_before_the_packer_was_away_is_sent_again_when_states_have_come_for_long(
    make_holder, sends, clock
):
    """After `bus.resend_after` (5 s) of one packer's directives; the attempt fails after `rollout.group_timeout`."""
    both = {"reward-0": "b0", "reward-1": "b1"}
    actor = make_holder(rollout={"group_timeout": 60.0})
    hold_groups(actor, 1)
    rewards_of(actor, 1, both)
    clock.silence(100.0, actor)
    clock.directives(4.8, actor, both)
    clock.directives(4.8, actor, both, term=2)
    assert sends == [(0, "inproc://b0")]
    clock.directives(0.5, actor, both, term=2)
    assert sends == [(0, "inproc://b0"), (0, "inproc://b1")]
    clock.directives(54.0, actor, both, term=2)
    assert failures_of(actor) == []
    clock.directives(1.0, actor, both, term=2)
    assert "which has not confirmed it, within 60 s" in failures_of(actor)[0]


def test_a_late_group_goes_to_another_reward_actor_and_the_silent_one_is_avoided_and_named(actor, sends, clock):
    """Nothing sent there is named: later groups go elsewhere, though it has no load; a name makes it good again."""
    both = {"reward-0": "b0", "reward-1": "b1"}
    hold_groups(actor, 1)
    rewards_of(actor, 1, both)
    assert sends == [(0, "inproc://b0")]
    with structlog.testing.capture_logs() as logs:
        clock.directives(6.0, actor, both)
    assert sends[1:] == [(0, "inproc://b1")]
    assert [(line["peer"], line["ordinal"]) for line in logs if line["event"].startswith("group not arrived")] == [
        ("reward-0", 0)
    ]
    for ordinal in (1, 2, 3):
        actor.held[ordinal, 1] = HeldTicket(ticket(ordinal), group=actor.held[0, 1].group)
    rewards_of(actor, 1, both, scoring=((0, 1),))
    assert {address for _, address in sends[1:]} == {"inproc://b1"}
    actor.delivery.reward_choice.arrived("reward-0/b0")
    actor.held[4, 1] = HeldTicket(ticket(4), group=actor.held[0, 1].group)
    rewards_of(actor, 1, both, scoring=((0, 1),))
    assert sends[-1][1] == "inproc://b0"


def test_groups_that_are_lost_together_cost_a_reward_actor_one_pause():
    """Eight groups in one short outage: 60 s, and not 30 · 2⁸ s; the first one after that pause counts again."""
    choice = RewardChoice(30.0)
    assert [choice.lost("reward-0/b0", 100.0) for _ in range(8)] == [60.0] * 8
    assert choice.lost("reward-0/b0", 161.0) == 120.0
    choice.arrived("reward-0/b0")
    assert choice.lost("reward-0/b0", 170.0) == 60.0


def test_a_sampled_group_that_no_reward_actor_has_named_fails_in_words_that_say_so(make_holder, sends, clock):
    """Not "not sampled": to whom it was sent, or that nobody took it; one that was ever named has the packer's time."""
    actor = make_holder(rollout={"group_timeout": 60.0})
    hold_groups(actor, 3)
    rewards_of(actor, 1, {"reward-1": "b1"}, scoring=((2, 1),))
    clock.directives(59.9, actor, {"reward-1": "b1"})
    assert failures_of(actor) == []
    actor.held[1, 1].sent_to = None
    clock.now += 0.15
    rewards_of(actor, 1, {"reward-1": "b1"})
    assert actor.held[0, 1].failure.reason == "timeout"
    assert actor.held[0, 1].failure.detail == (
        "sampled, and sent to reward-1, which has not confirmed it, within 60 s (rollout.group_timeout)"
    )
    assert "not taken by any reward actor (reward-1 at inproc://b1)" in actor.held[1, 1].failure.detail
    assert actor.held[2, 1].failure is None
    sent = len(sends)
    rewards_of(actor, 1, {"reward-1": "b1"})
    assert len(sends) == sent, "a failed attempt sends nothing"


def test_a_reward_actor_that_can_not_be_reached_takes_no_group(actor, tmp_path):
    """It is alive and has no load, but nothing listens at its address for this rollout: all go to the other one."""
    inbox = Inbox("groups", Addresses(ring_config(tmp_path, "tcp")), BusConfig(), "reward-0", "b0")
    peers = [
        RewardPeer(name="reward-0", boot_id="b0", address=inbox.address, load=8),
        RewardPeer(name="reward-1", boot_id="b1", address=f"tcp://127.0.0.1:{free_port()}", load=0),
    ]
    actor.delivery.note(time.monotonic(), directive(rewards=peers))
    hold_groups(actor, 20)
    received = 0

    def received_all() -> bool:
        nonlocal received
        actor.delivery.send()
        received += inbox.receive(0.02) is not None
        return received == 20

    wait_until(received_all, "all groups at the other one")
    assert {held.sent_to for held in actor.held.values()} == {"reward-0/b0"}
    for box in [inbox, *actor.delivery.outboxes.values()]:
        box.close()


def test_group_goes_to_the_least_loaded_reward_actor(actor):
    """Loads 1 and 0, and one group already on its way to the second: the third goes to either, by name."""
    peers = [RewardPeer(name=n, boot_id="1", address=f"inproc://{n}", load=load) for n, load in (("v", 1), ("w", 0))]
    actor.delivery.note(time.monotonic(), directive(rewards=peers))
    one = group()
    for ordinal in range(3):
        actor.held[ordinal, 1] = HeldTicket(ticket(ordinal), group=one)
    actor.delivery.send()
    assert [held.sent_to for held in actor.held.values()] == ["w/1", "v/1", "w/1"]
    assert np.array_equal(one.lengths_G, [1, 1])
    for outbox in actor.delivery.outboxes.values():
        outbox.close()


async def test_group_that_no_reward_actor_would_take_fails_its_attempt_at_once_and_in_words(actor, monkeypatch):
    """Its texts are more than travel: no time-out is waited for, the reason has a word, others are sent."""
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 2000)
    long = [SampledCompletion([5], [-1.0], [(0, 1, 3)], "stop", "x" * 1001)] * 2
    for ordinal, completions in ((0, long), (1, Client.ANSWER)):
        actor.held[ordinal, 1] = HeldTicket(ticket(ordinal), group=group(ordinal, completions))
    peers = [RewardPeer(name="a", boot_id="a", address="inproc://a", load=0)]
    actor.delivery.note(time.monotonic(), directive(rewards=peers))
    actor.delivery.send()
    failure = actor.held[0, 1].failure
    assert failure.reason == "too_large"
    assert "2006 bytes in one array, and 2000 are the most that travel (texts)" in failure.detail
    assert "rollout.group_size" in failure.detail
    assert actor.held[0, 1].group is None
    assert actor.held[1, 1].sent_to == "a/a"
    for outbox in actor.delivery.outboxes.values():
        outbox.close()


@pytest.mark.parametrize("bad", ["nonsense", "tcp://127.0.0.1", "tcp://192.0.2.1:5000", "tcp://127.0.0.1:5000#abcdef"])
def test_reward_actor_with_an_address_that_can_not_be_used_is_left_out(actor, bad, monkeypatch):
    """It is that peer's fault: it is said now and then, and the group goes to another one."""
    monkeypatch.setattr(delivery_module, "ADDRESS_LOG_SECONDS", 600.0)
    config = actor.config
    with closing(Inbox("groups", Addresses(config), config.bus, "good", "boot")) as inbox:
        addresses = {"bad": bad, "good": inbox.address}  # the bad one has less to do
        rewards = [
            RewardPeer(name=name, boot_id=name[0], address=address, load=load)
            for load, (name, address) in enumerate(addresses.items())
        ]
        with structlog.testing.capture_logs() as logs:
            for ordinal in range(3):
                held = actor.held[ordinal, 1] = HeldTicket(ticket(ordinal))
                held.group = group(ordinal, Client.ANSWER)
                actor.delivery.note(time.monotonic(), directive(rewards=rewards))
                wait_until(lambda held=held: actor.delivery.send() or held.sent_to == "good/g", "the good one has it")
        assert inbox.receive(60.0).ordinal == 0
        actor.delivery.outboxes["good/g"].close()
    assert [line["peer"] for line in logs if line["event"] == "reward actor left out"] == ["bad/b"]
