"""Tickets, attempts, deadlines, hand-over (P9–P13)."""

import dataclasses

import pytest

from actors.ledger import GroupState, Verdict
from bus import codec
from schemas import limits
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, facts_of, policy, settings


def ring_of(*slots: int, rewards: int = 1, **changes: object) -> tuple[Ring, list[Rollout], list[Reward]]:
    """Rollouts a, b, … with these slots, reward actors r0, …, an engine at version 0; all have their tickets."""
    ring = Ring(settings(**changes))
    ring.add(Engine("e", policy=policy(0)))
    rollouts = [ring.add(Rollout(name, slots=n)) for name, n in zip("abc", slots, strict=False)]
    actors = [ring.add(Reward(f"r{i}")) for i in range(rewards)]
    ring.turn()
    ring.turn()
    return ring, rollouts, actors


def tickets(rollout: Rollout) -> list[tuple[int, int]]:
    """What the newest directive lists."""
    return [(ticket.ordinal, ticket.attempt) for ticket in rollout.directive.tickets]


# --- P9: asked for, listed until named ------------------------------------------------------------------------------


def test_a_ticket_is_listed_until_its_holder_names_it() -> None:
    """A directive may be lost, so the next one says it again; once the heartbeat names it, no more (P9)."""
    ring = Ring(settings())
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=1))
    ring.lose = lambda what, who: what == "directive" and who == "a/1"
    for _ in range(2):
        assert [t.ordinal for t in ring.turn()["a/1"].tickets] == [0]
    ring.lose = lambda what, who: False
    ring.turn()
    assert rollout.to_sample == [(0, 1)]
    ring.turn()
    assert tickets(rollout) == []
    assert ring.machine.groups.num_issued["train"] == 1


def test_tickets_granted_are_the_free_slots_less_the_tickets_not_yet_named() -> None:
    """A heartbeat that says 3 free slots and does not name 2 tickets has room for 1 (P9)."""
    ring = Ring(settings())
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=2))
    ring.lose = lambda what, who: what == "directive"
    ring.turn()
    rollout.slots = 3
    ring.turn()
    assert ring.machine.groups.held_by["a/1"] == {0, 1, 2}
    ring.turn()
    assert ring.machine.groups.num_issued["train"] == 3, "the same heartbeat again asks for nothing more"


def test_a_new_attempt_counts_against_the_slots_though_the_old_one_is_named() -> None:
    """The heartbeat names (0, 1), which failed; (0, 2) is a ticket that it has not seen (P9)."""
    ring, (rollout,), _ = ring_of(1)
    rollout.fail((0, 1))
    ring.lose = lambda what, who: what == "directive"
    ring.turn()
    ring.turn()
    assert ring.machine.groups.held_by == {"a/1": {0}}
    assert ring.row(0).attempt == 2


def test_the_emptiest_rollout_is_given_tickets_first() -> None:
    """4 tickets for rollouts with 3 and 1 free slots, then evenly: 3 and 1."""
    _, (a, b), _ = ring_of(1, 3)
    assert (len(a.held), len(b.held)) == (1, 3)


def test_only_running_rollouts_are_given_tickets() -> None:
    """One that starts, drains or is done says how many slots it has all the same."""
    ring = Ring(settings())
    ring.add(Engine("e", policy=policy(0)))
    for phase in ("starting", "draining", "done"):
        ring.add(Rollout(phase, phase=phase))
    ring.turn()
    assert ring.machine.groups.num_issued["train"] == 0


def test_a_row_is_committed_before_its_ticket_leaves() -> None:
    """The store has holder and attempt of everything that any directive lists (P9)."""
    ring, (rollout,), _ = ring_of(2)
    rows = {row.ordinal: (row.holder, row.attempt) for row in ring.store.groups()}
    assert rows == {0: ("a/1", 1), 1: ("a/1", 1)}
    assert sorted(rollout.held) == [(0, 1), (1, 1)]


# --- P10: what a ticket asks for -------------------------------------------------------------------------------------


def test_tickets_ask_for_the_version_that_keeps_lag_within_the_level() -> None:
    """Two groups a step, level 1: steps 1 and 2 take version 0, step 3 needs version 1 (P10)."""
    ring, (rollout,), _ = ring_of(6)
    ring.doubles[0].policy = policy(1)
    ring.turn()
    assert [rollout.held[o, 1].min_version for o in range(6)] == [0, 0, 0, 0, 1, 1]


def test_a_reissued_ticket_asks_for_the_same_example_and_seed() -> None:
    """They are drawn once (P10)."""
    ring, (rollout,), _ = ring_of(1)
    first = rollout.held[0, 1]
    rollout.fail((0, 1))
    ring.turn()
    second = rollout.held[0, 2]
    assert (first.example_key, first.seed, first.index) == (second.example_key, second.seed, second.index)


def test_a_reissued_ticket_waits_for_an_engine_of_its_version() -> None:
    """An engine that serves an older version may not sample it; other tickets do not wait behind it (P10)."""
    ring, (rollout,), _ = ring_of(6)
    ring.doubles[0].policy = policy(1)
    ring.turn()
    ring.doubles[0].policy = policy(0)
    for ordinal in (0, 4):
        rollout.fail((ordinal, 1))
    ring.turn()
    assert [ring.row(o).holder for o in (0, 4)] == ["a/1", None]
    ring.doubles[0].policy = policy(1)
    ring.turn()
    assert ring.row(4).attempt == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("example_key", "another"),
        ("num_completions", 1),
        ("longest_sample", 65),
        ("oldest_version", -1),
    ],
)
def test_a_group_that_is_not_what_its_ticket_asked_for_is_a_failed_attempt(field: str, value: object) -> None:
    """Wrong example, wrong size, too long to pack, too old (P10, P11)."""
    ring, (rollout,), _ = ring_of(1)
    facts = dataclasses.replace(rollout.sample((0, 1), policy(0)), **{field: value})
    assert ring.score(facts) is Verdict.FAILED
    assert (ring.row(0).failures, ring.row(0).state) == (1, GroupState.ISSUED)


# --- P11: attempts ---------------------------------------------------------------------------------------------------


def test_three_failed_attempts_drop_an_ordinal_as_poison() -> None:
    """Each gets a new attempt but the third (P11)."""
    ring, (rollout,), _ = ring_of(1, groups_per_step=1, max_steps=1)
    for attempt in (1, 2, 3):
        assert rollout.to_sample == [(0, attempt)]
        rollout.fail((0, attempt))
        ring.turn()
    assert (ring.row(0).state, ring.row(0).reason) == (GroupState.DROPPED, "poison")
    assert rollout.to_sample == [(1, 1)], "another ordinal takes its place in the budget"


def test_a_failure_is_counted_once_however_often_it_is_reported() -> None:
    """It stands in every heartbeat until the release arrives, here never; one attempt, one failure (P6, P11)."""
    ring, (rollout,), _ = ring_of(1)
    rollout.slots = 0  # no room, so no new attempt begins
    ring.lose = lambda what, who: what == "directive"
    rollout.fail((0, 1))
    for _ in range(5):
        ring.turn()
    assert (ring.row(0).failures, ring.row(0).attempt, ring.row(0).holder) == (1, 1, None)
    ring.heartbeat(rollout)
    assert not ring.machine.take_changes(), "nothing to write"


def test_a_failed_attempt_is_over_for_its_holder_even_while_nobody_has_room_for_the_next() -> None:
    """The reward actor could not score it; the rollout, full, names it still: it is released, not taken back (P12)."""
    ring, (rollout,), (reward,) = ring_of(1)
    reward.get(rollout.sample((0, 1), policy(0)))
    rollout.slots = 0
    reward.fail((0, 1))
    ring.turn()
    assert ring.row(0).holder is None
    assert rollout.held == {}
    assert reward.held == {}
    ring.turn()
    assert (ring.row(0).failures, ring.row(0).holder) == (1, None)


def test_a_failure_of_an_older_attempt_does_not_count() -> None:
    """Attempt 2 is under way when a reward actor reports that it could not score attempt 1; it is released (P11)."""
    ring, (rollout,), (reward,) = ring_of(1)
    old = rollout.sample((0, 1), policy(0))
    rollout.restart()
    ring.turn()
    ring.turn()
    assert rollout.to_sample == [(0, 2)]
    reward.get(old)
    reward.fail((0, 1))
    before = ring.row(0).failures
    ring.turn()
    assert (ring.row(0).attempt, ring.row(0).failures, ring.row(0).holder) == (2, before, "a/2")
    assert reward.held == {}


def test_a_bad_copy_of_an_older_attempt_does_not_fail_the_newest() -> None:
    """It fails its own attempt, which is over already (P11)."""
    ring, (rollout,), _ = ring_of(1)
    old = dataclasses.replace(facts_of(rollout.held[0, 1], policy(0)), num_completions=1)
    rollout.restart()
    ring.turn()
    assert ring.score(old) is Verdict.FAILED
    assert (ring.row(0).attempt, ring.row(0).holder) == (2, "a/2")


def test_the_first_good_copy_wins_and_later_ones_are_counted() -> None:
    """Whichever attempt it is of, and whatever became of its holder (P11)."""
    ring, (rollout,), _ = ring_of(1)
    old = facts_of(rollout.held[0, 1], policy(0))
    rollout.restart()
    ring.turn()
    ring.turn()
    assert ring.score(old) is Verdict.SETTLED
    assert ring.score(rollout.sample((0, 2), policy(0))) is Verdict.COPY
    assert ring.score(old) is Verdict.COPY
    assert ring.machine.groups.counters["copies_dropped"] == 2
    ring.turn()
    assert (0, 2) not in rollout.held


def test_a_good_copy_beats_failures_until_their_drop_is_decided() -> None:
    """The third failure and a good copy of an older attempt come in the same round: nothing is lost (P11)."""
    ring, (rollout,), _ = ring_of(1)
    good = facts_of(rollout.held[0, 1], policy(0))
    for attempt in (1, 2):
        rollout.fail((0, attempt))
        ring.turn()
    rollout.fail((0, 3))
    ring.heartbeat(rollout)
    assert ring.score(good) is Verdict.SETTLED
    ring.decide()
    assert ring.row(0).state is GroupState.SETTLED


def test_a_death_is_a_failure_only_of_an_ordinal_that_was_held_alone() -> None:
    """Of two, either may be the culprit or neither; of one, it is suspect (P11)."""
    ring, (both,), _ = ring_of(2)
    both.restart()
    ring.turn()
    assert [(ring.row(o).deaths, ring.row(o).failures) for o in (0, 1)] == [(1, 0), (1, 0)]
    ring, (alone,), _ = ring_of(1)
    alone.restart()
    ring.turn()
    assert (ring.row(0).deaths, ring.row(0).failures) == (1, 1)
    assert ring.machine.groups.counters["deaths"] == 1


def test_after_two_deaths_an_ordinal_is_issued_alone() -> None:
    """The rollout has 4 slots; it gets ordinal 0 and, until that has settled, nothing else (P11)."""
    ring, (rollout,), _ = ring_of(4)
    for _ in range(2):
        rollout.restart()
        ring.turn()
        ring.turn()
    assert sorted(rollout.held) == [(0, 3)]
    ring.settle(rollout, policy(0))
    ring.turn()
    ring.turn()
    assert sorted(rollout.held) == [(1, 3)], "the next of the suspects, alone again"


def test_nothing_joins_an_ordinal_that_is_to_be_alone() -> None:
    """Three slots are free and the budget allows three new ordinals; they come when it has settled (P11)."""
    ring, (rollout,), _ = ring_of(1)
    ring.row(0).deaths = 1
    rollout.restart()
    rollout.slots = 4
    for _ in range(3):
        ring.turn()
        assert sorted(rollout.held) == [(0, 2)]
    ring.settle(rollout, policy(0))
    ring.turn()
    ring.turn()
    assert sorted(rollout.held) == [(1, 1), (2, 1), (3, 1)]


def test_an_ordinal_to_be_alone_goes_to_a_rollout_that_holds_nothing_though_another_has_more_room() -> None:
    """One holds a group and has 9 slots free; b is empty and has 1: it goes to b (P11)."""
    ring, (dying,), _ = ring_of(1, groups_per_step=1)
    ring.add(Rollout("roomy", slots=10))
    ring.turn()
    assert [ring.row(o).holder for o in (0, 1)] == ["a/1", "roomy/1"]
    ring.row(0).deaths = 1
    ring.kill(dying)
    ring.add(Rollout("b", slots=1))
    ring.wait(4)
    assert ring.row(0).alone
    assert ring.row(0).holder == "b/1"


def test_a_holder_that_was_only_slow_goes_on_and_no_death_counts() -> None:
    """Its lease ended and nobody had room: it names the attempt again, so the attempt has not failed (P11)."""
    ring, (rollout,), _ = ring_of(1)
    for _ in range(4):
        ring.wait(4, rollout)
        assert ring.row(0).holder is None
        ring.turn()
        assert (ring.row(0).holder, ring.row(0).attempt) == ("a/1", 1)
    assert (ring.row(0).deaths, ring.row(0).failures, ring.row(0).state) == (0, 0, GroupState.ISSUED)


def test_a_slow_holder_that_comes_back_too_late_lets_its_attempt_go() -> None:
    """Another rollout has the next attempt (P11)."""
    ring, (slow, other), _ = ring_of(1, 1, groups_per_step=1, max_steps=2)
    ring.settle(other, policy(0))
    ring.wait(4, slow)
    ordinal = next(iter(slow.held))[0]
    assert ring.row(ordinal).holder == "b/1"
    ring.turn()
    assert slow.held == {}


def test_a_failure_reported_after_the_holder_was_thought_dead_counts_once() -> None:
    """Its death counted already, since it held nothing else; the report ends the attempt, it adds nothing (P11)."""
    ring, (rollout,), _ = ring_of(1)
    ring.wait(4, rollout)
    assert ring.row(0).failures == 1
    rollout.slots = -1
    rollout.fail((0, 1))
    ring.turn()
    assert (ring.row(0).failures, ring.row(0).holder) == (1, None)


# --- P12: deadlines --------------------------------------------------------------------------------------------------


def test_an_attempt_not_sampled_in_time_fails_and_is_cancelled() -> None:
    """group_timeout 10 s and one lease of 3 s after its issue (P12)."""
    ring, (rollout,), _ = ring_of(1, group_timeout=10.0)
    ring.wait(12.9)
    assert (0, 1) in rollout.held
    rollout.slots = 0
    ring.wait(0.2)
    assert (0, 1) not in rollout.held
    assert ring.row(0).failures == 1
    assert "rollout.group_timeout" in ring.machine.groups.last_failure


def test_the_deadline_of_scoring_begins_when_a_reward_actor_names_the_group() -> None:
    """Sampled for 9 of 10 s, then scored for 4 of 5: no timeout; 5 s and a lease later there is one (P12)."""
    ring, (rollout,), (reward,) = ring_of(1, group_timeout=10.0, reward_timeout=5.0)
    ring.wait(9)
    reward.get(rollout.sample((0, 1), policy(0)))
    rollout.slots = 0
    ring.wait(8.5)
    assert ring.row(0).failures == 0
    ring.wait(1)
    assert ring.row(0).failures == 1
    assert "reward.timeout" in ring.machine.groups.last_failure
    assert reward.held == {}
    assert rollout.held == {}


def test_a_group_stuck_in_a_reward_actor_after_its_rollout_died_fails_in_time() -> None:
    """Nobody holds its ticket any more; its deadline counts all the same, so ordinal order can't wait for ever."""
    ring, (rollout,), (reward,) = ring_of(1, reward_timeout=5.0)
    reward.get(rollout.sample((0, 1), policy(0)))
    ring.turn()
    ring.kill(rollout)
    ring.wait(7)
    assert ring.row(0).holder is None
    assert reward.held
    ring.wait(2)
    assert ring.row(0).failures == 1, "its death, held alone, and the timeout are one attempt"
    assert reward.held == {}


def test_an_attempt_lost_with_its_holder_has_no_deadline() -> None:
    """With no rollout for an hour the ordinal just waits; a timeout would add a failure to a death (P12)."""
    ring, (rollout,), _ = ring_of(2, group_timeout=10.0)
    ring.kill(rollout)
    ring.wait(60)
    assert [(ring.row(o).failures, ring.row(o).deaths) for o in (0, 1)] == [(0, 1), (0, 1)]


# --- P13: hand-over --------------------------------------------------------------------------------------------------


def test_a_group_in_a_live_reward_actor_is_not_issued_again_when_its_rollout_dies() -> None:
    """It is about to settle; the other ordinal of the dead rollout is issued at once (P13)."""
    ring, (_, other), (reward,) = ring_of(2, 4, groups_per_step=2, max_steps=1, max_async_level=0)
    holders = {ring.row(o).holder for o in (0, 1)}
    assert holders == {"b/1"}, "the emptier one"
    reward.get(other.sample((0, 1), policy(0)))
    ring.turn()
    ring.kill(other)
    ring.wait(4)
    assert (ring.row(0).holder, ring.row(0).attempt) == (None, 1)
    assert (ring.row(1).holder, ring.row(1).attempt) == ("a/1", 2)
    assert ring.score(reward.held[0, 1]) is Verdict.SETTLED
    ring.turn()
    assert reward.held == {}


def test_a_group_is_issued_again_when_rollout_and_reward_actor_are_both_gone() -> None:
    """Then nobody has it (P13)."""
    ring, (rollout, other), (reward,) = ring_of(1, 1, max_steps=1)
    reward.get(rollout.sample((0, 1), policy(0)))
    ring.settle(other, policy(0))
    ring.turn()
    other.slots = 0
    ring.kill(rollout)
    ring.wait(4)
    assert ring.row(0).holder is None
    ring.kill(reward)
    other.slots = 1
    ring.wait(4)
    assert (ring.row(0).holder, ring.row(0).attempt) == ("b/1", 2)


def test_a_rollout_is_told_when_a_reward_actor_dies_and_keeps_the_group_to_send_again() -> None:
    """The directive names the living reward actors; the group stays its own until it has settled (P13)."""
    ring, (rollout,), (first, second) = ring_of(1, rewards=2)
    facts = rollout.sample((0, 1), policy(0))
    rollout.sent_to[0, 1] = first.identity
    first.get(facts)
    ring.turn()
    assert rollout.to_send == []
    first.restart()
    for _ in range(2):  # the second heartbeat names the term, and it takes the place (P3)
        ring.heartbeat(first)
        ring.decide()
    assert rollout.to_send == [(0, 1)]
    second.get(facts)
    ring.score(facts)
    ring.turn()
    assert (0, 1) not in rollout.held
    assert second.held == {}


def test_scoring_gets_its_whole_time_again_after_a_reward_actor_died() -> None:
    """4 of 5 s in a reward actor that died, then 6 in another: 5 s and a lease count from the death (P12)."""
    ring, (rollout,), (first, second) = ring_of(1, rewards=2, reward_timeout=5.0)
    facts = rollout.sample((0, 1), policy(0))
    first.get(facts)
    ring.wait(4)
    first.restart()
    ring.turn()
    second.get(facts)
    ring.wait(6)
    assert ring.row(0).failures == 0
    ring.wait(3)
    assert ring.row(0).failures == 1


def test_a_group_that_nobody_gets_after_its_reward_actor_died_fails_in_time() -> None:
    """Its rollout thinks that it has been sent: the deadline of scoring counts from the death (P12)."""
    ring, (rollout,), (reward,) = ring_of(1, reward_timeout=5.0)
    reward.get(rollout.sample((0, 1), policy(0)))
    ring.wait(4)
    reward.restart()
    ring.wait(8)
    assert ring.row(0).failures == 0
    ring.wait(1.5)
    assert ring.row(0).failures == 1


def test_a_failed_attempt_is_issued_again_though_a_reward_actor_names_it_still() -> None:
    """Its release got lost; nothing good can come of that attempt (P11, P13)."""
    ring, (rollout,), (reward,) = ring_of(1, reward_timeout=5.0, groups_per_step=1, max_steps=1)
    reward.get(rollout.sample((0, 1), policy(0)))
    ring.lose = lambda what, who: what == "directive" and who == "r0/1"
    ring.wait(10)
    assert (0, 1) in reward.held
    assert (ring.row(0).holder, ring.row(0).attempt) == ("a/1", 2)


def test_a_ticket_withdrawn_before_it_was_named_is_taken_off_its_holders_state_at_once() -> None:
    """A copy of attempt 1 settles the ordinal while the directive with attempt 2 is on its way (P6, P9)."""
    ring, (rollout,), _ = ring_of(1)
    old = facts_of(rollout.held[0, 1], policy(0))
    rollout.restart()
    rollout.run, rollout.term = ring.machine.run, ring.machine.term  # it has heard a directive, and hears no other one
    ring.lose = lambda what, who: what == "directive"
    assert [t.attempt for t in ring.turn()["a/2"].tickets] == [2]
    ring.score(old)
    assert ring.decide()["a/2"].tickets == []


def test_a_reward_actor_keeps_an_older_attempt_until_the_ordinal_settles() -> None:
    """It may well be the first good copy (P11, P13)."""
    ring, (rollout,), (reward,) = ring_of(1)
    old = rollout.sample((0, 1), policy(0))
    rollout.restart()
    ring.turn()
    reward.get(old)
    ring.turn()
    assert (0, 1) in reward.held
    ring.settle(rollout, policy(0))
    ring.turn()
    assert reward.held == {}


# --- P8: after a start of the packer ---------------------------------------------------------------------------------


def test_nothing_is_issued_again_within_a_lease_of_the_packers_start() -> None:
    """Whoever holds it may just not have sent a heartbeat yet; new ordinals are issued at once (P8)."""
    ring, (rollout, other), _ = ring_of(1, 1)
    ring.kill(rollout)
    ring.restart_packer()
    other.slots = 2
    ring.turn()
    assert (ring.row(0).holder, ring.row(2).holder) == ("a/1", "b/1")
    other.slots = 9
    ring.wait(2.9)
    assert ring.row(0).holder == "a/1"
    ring.wait(0.2)
    assert (ring.row(0).holder, ring.row(0).attempt) == ("b/1", 2)


def test_a_group_in_a_reward_actor_that_has_not_beaten_yet_is_not_issued_again_after_a_restart() -> None:
    """Its rollout died before; who has it shows within a lease (P8, P13)."""
    ring, (rollout, other), (reward,) = ring_of(1, 1, max_steps=1)
    reward.get(rollout.sample((0, 1), policy(0)))
    ring.settle(other, policy(0))
    other.slots = 0
    ring.turn()
    ring.kill(rollout)
    ring.wait(4)
    other.slots = 1
    ring.restart_packer()
    ring.turn(reward)
    assert ring.row(0).holder is None
    ring.wait(9)
    assert ring.row(0).holder is None
    ring.kill(reward)
    ring.wait(4)
    assert ring.row(0).holder == "b/1"


def test_holders_that_beat_after_the_packers_restart_keep_their_tickets() -> None:
    """Nothing is sampled twice because the packer was away (P8)."""
    ring, (rollout,), _ = ring_of(2)
    ring.restart_packer()
    ring.wait(10)
    assert sorted(rollout.held) == [(0, 1), (1, 1)]
    assert ring.machine.groups.counters["reissued"] == 0


@pytest.mark.slow
def test_more_tickets_than_a_state_holds_come_in_pages() -> None:
    """A rollout with 4 500 free slots is named a thousand tickets at a time; each directive is one that travels."""
    ring = Ring(settings(groups_per_step=4500))
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("wide", slots=4500))
    pages = []
    while len(rollout.held) < 4500:
        before = len(rollout.held)
        state = ring.turn().get("wide/1")
        if state is not None:
            codec.encode(state)
        pages.append(len(rollout.held) - before)
        assert len(pages) < 20
    assert max(pages) == limits.DIRECTIVE_TICKETS
    assert sorted(ordinal for ordinal, _ in rollout.held) == list(range(4500))
