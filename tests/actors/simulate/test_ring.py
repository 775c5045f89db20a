"""Runs in virtual time keep the promises of real ones."""

from dataclasses import astuple

import pytest

from actors.ledger import GroupState
from actors.simulate.failures import Death
from actors.simulate.plan import Plan, Size
from actors.simulate.result import result_of
from actors.simulate.ring import Ring
from schemas.errors import ConfigError
from tests.actors.simulate.plans import QUICK, plan, ran

SIZES = [Size(1, 1, 1, 1), Size(3, 2, 2, 3), Size(20, 4, 4, 12)]
DEATHS = {"packer": 11, "rollout": 9, "reward": 12, "trainer": 15, "inference": 10}
"""Seconds after which a process of a role dies."""


def conserved(ring: Ring) -> None:
    """Every admitted group is trained, dropped or open; steps have each ordinal once, in whole steps."""
    result = result_of(ring)
    assert result.issued == result.trained + sum(result.dropped.values()) + result.open
    assert result.trained % ring.settings.groups_per_step == 0
    machine = ring.machine
    kept = [ordinal for step in machine.steps.composed.values() for ordinal in step.ordinals]
    assert len(kept) == len(set(kept))
    steps_compacted = machine.compacted.step
    assert machine.steps.last == steps_compacted + len(machine.steps.composed)


def test_equal_plans_give_equal_runs() -> None:
    """To the last digit, also with random deaths; another seed gives other deaths."""
    one = plan(30, size=Size(3, 2, 1, 3))
    rates = {"mean_seconds_between_deaths": (("inference", 20.0), ("rollout", 30.0))}
    first, again, other = ran(one, seed=1, **rates), ran(one, seed=1, **rates), ran(one, seed=2, **rates)
    assert first.meter.num_deaths > 1
    assert [astuple(line) for line in first.meter.lines] == [astuple(line) for line in again.meter.lines]
    assert [astuple(line) for line in first.meter.lines] != [astuple(line) for line in other.meter.lines]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("level", [0, 1, 4])
def test_no_group_is_older_than_the_level(size: Size, level: int) -> None:
    """With order ordinal the lag is bounded by admission; runs with samples to spare use the level up."""
    quick = QUICK.with_values(decode_seconds=0.002, decode_sequence_seconds=0.0)
    ring = ran(plan(25, quick, size, packer={"max_async_level": level}))
    lags = [line.lag_max for line in ring.meter.lines]
    assert max(lags) == level
    conserved(ring)


def test_ranks_that_are_not_there_make_no_step_faster() -> None:
    """Two ranks for each row, and one or three: one is as fast as without, and the third of three does nothing."""

    def seconds(trainers: int, together: int) -> float:
        slow = QUICK.with_values(train_token_seconds=0.05)
        ranks = {"max_steps": 1000, "num_ranks": 2, "context_parallel": together}
        return ran(plan(8, slow, Size(2, 1, trainers, 2), trainer=ranks)).events.now

    assert seconds(1, 2) == seconds(1, 1)
    # the packer still hears the third one
    assert seconds(3, 2) == pytest.approx(seconds(2, 2), rel=1e-4)
    assert seconds(2, 2) < 0.8 * seconds(1, 2)


def test_with_order_arrival_the_limit_of_lag_holds() -> None:
    """Long groups train later, up to max_off_policy_steps; older ones are dropped as stale and sampled again."""
    packer = {"order": "arrival", "max_async_level": 1, "max_off_policy_steps": 2, "oversampling_factor": 1.5}
    ring = ran(plan(40, QUICK.with_values(completion_spread=2.0), Size(2, 1, 1, 2), packer=packer))
    assert 1 < max(line.lag_max for line in ring.meter.lines) <= 2
    conserved(ring)


def test_at_level_0_training_and_sampling_alternate() -> None:
    """The trainer waits for the whole of each step's samples, and each token is of the newest weights."""
    ring = ran(plan(15, packer={"max_async_level": 0}))
    later = ring.meter.lines[1:]
    assert {line.lag_max for line in later} == {0}
    # 20 tokens at 0.05 s are the least of a mean group
    assert min(line.seconds_wait_batch for line in later) > QUICK.wire_seconds + QUICK.update_pause_seconds
    spans = [b.time - a.time for a, b in zip(ring.meter.lines, later, strict=False)]
    parts = [line.seconds_wait_batch + line.seconds_compute + QUICK.publish_seconds for line in later]
    assert spans == pytest.approx(parts)


@pytest.mark.parametrize("size", SIZES)
def test_groups_are_conserved(size: Size) -> None:
    """At three sizes; at the end no more is open than the level allows."""
    ring = ran(plan(30, size=size, packer={"groups_per_step": 4 * size.engines}))
    conserved(ring)
    assert result_of(ring).open <= 3 * ring.settings.groups_per_step
    assert result_of(ring).dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize("later", [0.0, 0.7, 1.9])
@pytest.mark.parametrize("role", sorted(DEATHS))
def test_a_killed_process_loses_nothing(role: str, later: float) -> None:
    """One of each role dies: no group is dropped or trained twice, and the run goes on to its end."""
    # scoring takes a second, so that each process has work in hand when it dies
    one = plan(40, QUICK.with_values(reward_seconds=1.0), Size(2, 2, 1, 2))
    ring = ran(one, deaths=(Death(role, 0, DEATHS[role] + later),))
    result = result_of(ring)
    assert result.deaths == 1
    assert result.dropped == {}
    conserved(ring)
    assert [line.step for line in ring.meter.lines] == list(range(1, 41))
    # a death may fall into a pause, and then costs nothing
    assert result.seconds > 0.95 * result_of(ran(one)).seconds


def test_without_the_packer_the_trainer_ends_its_steps_and_waits() -> None:
    """It dies while the trainer computes: that step ends, those at hand follow, and the next one waits."""
    one = plan(40, size=Size(2, 2, 1, 2))
    before = ran(one)
    death = before.meter.lines[9].time - 0.01
    ring = ran(one, deaths=(Death("packer", 0, death),))
    meanwhile = [line.time for line in ring.meter.lines if death < line.time < death + QUICK.packer_restart_seconds]
    assert 1 <= len(meanwhile) <= 1 + ring.settings.max_async_level
    assert result_of(ring).seconds > result_of(before).seconds + 0.5 * QUICK.packer_restart_seconds
    conserved(ring)


def test_a_packer_that_dies_again_and_again_loses_nothing() -> None:
    """At three mean times between two deaths, the shortest below the time of a restart."""
    for mean in (4.0, 12.0, 30.0):
        ring = ran(plan(60, size=Size(4, 2, 2, 4)), mean_seconds_between_deaths=(("packer", mean),))
        assert ring.meter.num_deaths > 0
        assert result_of(ring).dropped == {}
        conserved(ring)


def test_the_tokens_of_a_killed_engine_are_counted_as_lost() -> None:
    """Its completions are sampled again from the start on another engine."""
    deaths = tuple(Death("inference", 1, second) for second in (3.0, 9.3, 15.6, 22.0))
    ring = ran(plan(20, size=Size(1, 1, 1, 2)), deaths=deaths)
    assert 0 < result_of(ring).wasted_tokens["lost"] < 0.5 * result_of(ring).sampled_tokens
    counts = ring.machine.groups.counts("train")
    assert counts[GroupState.DROPPED] == 0


def test_the_successor_of_a_trainer_starts_from_the_newest_checkpoint() -> None:
    """Steps after it are trained again, from the same groups."""
    ring = ran(plan(40, size=Size(2, 2, 1, 2)), deaths=(Death("trainer", 0, 15.0),))
    assert ring.machine.gang.incarnation == 2
    assert ring.machine.gang.checkpoint % 5 == 0 < ring.machine.gang.checkpoint


def test_rejected_groups_are_replaced_and_counted() -> None:
    """About the share that was asked for, up to max_resample_times in a place."""
    times = QUICK.with_values(filtered_share=0.5)
    ring = ran(plan(40, times, Size(2, 1, 1, 2), packer={"dynamic_sampling": True, "max_resample_times": 20}))
    result = result_of(ring)
    filtered = result.dropped["zero_variance"]
    assert 0.4 < filtered / (filtered + result.trained) < 0.6
    assert result.wasted_tokens["filtered"] > 0
    conserved(ring)


def test_filtered_share_counts_only_with_a_filter() -> None:
    """Without dynamic_sampling nothing is dropped."""
    assert result_of(ran(plan(10, QUICK.with_values(filtered_share=0.5)))).dropped == {}


def test_evaluations_hold_their_version() -> None:
    """Groups of evaluations are sampled, and training goes on behind them."""
    rules = {"num_prompts": 6, "every_steps": 5, "at_start": True}
    ring = ran(plan(20, eval=rules, trainer={"max_steps": 40}))
    assert ring.machine.evaluations.done[:3] == [0, 5, 10]
    assert ring.machine.groups.num_issued["eval"] >= 18


def test_turns_wait_for_the_environment() -> None:
    """Three turns have two answers in between, each of 1 s."""
    one = plan(6, packer={"max_async_level": 0}, size=Size(1, 1, 1, 1))
    alone = ran(one, times=QUICK.with_values(completion_spread=0.0))
    times = QUICK.with_values(completion_spread=0.0, turns=3, environment_seconds=1.0, environment_spread=0.0)
    played = ran(one, times=times)
    more = result_of(played).seconds / 5 - result_of(alone).seconds / 5
    assert more == pytest.approx(2.0, abs=0.4)


@pytest.mark.parametrize("channel", ["filesystem", "rendezvous"])
def test_engines_take_new_versions_over_both_channels(channel: str) -> None:
    """Also in mode drain, in which running completions end first."""
    for mode in ("drain", "interrupt", "inflight"):
        ring = ran(plan(10, size=Size(1, 1, 1, 3), weights={"channel": channel, "update_mode": mode}))
        assert max(engine.policy.version for engine in ring.engines if engine.policy) >= 8
        conserved(ring)


def test_a_run_that_can_not_go_on_ends_with_the_reason() -> None:
    """Completions that take longer than a group may: three attempts each, until nothing is left to hope for."""
    slow = QUICK.with_values(decode_seconds=10.0)
    with pytest.raises(ConfigError, match=r"rollout\.group_timeout|poison"):
        ran(plan(5, slow, rollout={"group_timeout": 20.0}))


def test_a_death_of_a_process_that_is_not_there_is_refused() -> None:
    """The words name the option."""
    with pytest.raises(ConfigError, match="--kill inference-3: there are 1"):
        ran(plan(2), deaths=(Death("inference", 3, 1.0),))


def by_hand() -> Plan:
    """A run whose times can be added up on paper: a step of one group of two completions, of 10 tokens each."""
    times = QUICK.with_values(
        decode_seconds=0.1,
        decode_sequence_seconds=0.0,
        prefill_token_seconds=0.0,
        completion_tokens=10,
        completion_spread=0.0,
        reward_seconds=0.5,
        reward_spread=0.0,
        step_seconds=2.0,
        train_token_seconds=0.0,
        publish_seconds=1.0,
        wire_seconds=0.5,
        update_pause_seconds=0.25,
        hop_seconds=0.0,
        round_seconds=0.0,
        round_peer_seconds=0.0,
    )
    return plan(11, times, packer={"groups_per_step": 1, "max_async_level": 0})


def test_figures_are_those_that_one_computes_by_hand() -> None:
    """A cycle: train 2, publish 1, wire 0.5, pause 0.25, 10 tokens 1.0, reward 0.5: 5.25 s, of which 2.25 s wait."""
    result = result_of(ran(by_hand()))
    assert result.seconds == pytest.approx(10 * 5.25)
    assert result.steps_per_second == pytest.approx(1 / 5.25)
    assert result.trainer_idle == pytest.approx(2.25 / 5.25)
    assert result.compute_seconds == pytest.approx(2.0)
    assert result.engine_idle == pytest.approx(1 - 1.0 / 5.25, abs=0.02)
    assert result.engine_paused == pytest.approx(0.25 / 5.25, abs=0.02)
    assert result.reward_idle == pytest.approx(1 - 0.5 / 5.25 / 8, abs=0.01)
    assert result.tokens_per_second == pytest.approx(20 / 5.25)
    assert result.engine_seconds_per_token == pytest.approx(1.0 / 20)
    assert (result.trained, result.dropped, result.lag_mean) == (result.issued - result.open, {}, 0.0)
    assert result.sampled_tokens == 11 * 20


def test_the_start_of_a_prompt_is_paid_once_for_its_group() -> None:
    """Two completions of one prompt: 0.4 s for the start, 0.1 s for 10 tokens of the prompt, in each cycle."""
    one = by_hand()
    ring = ran(one, times=one.times.with_values(prefill_seconds=0.4, prefill_token_seconds=0.01))
    assert result_of(ring).seconds == pytest.approx(10 * (5.25 + 0.4 + 0.1))
