"""Numbers of processes that follow the load of a simulated run, over the real ledger."""

from dataclasses import replace

import pytest

from actors.algorithms.scaling import GROW_WINDOWS, SHRINK_WINDOWS
from actors.simulate.changes import Change, parse_change
from actors.simulate.failures import Death
from actors.simulate.plan import Plan, Size
from actors.simulate.report import describe
from actors.simulate.result import result_of
from actors.simulate.ring import Ring
from actors.simulate.scaling import Scaled
from schemas.errors import ConfigError
from tests.actors.simulate.plans import QUICK, plan, ran
from tests.actors.simulate.test_ring import conserved

WINDOW, START = 10.0, 15.0
SLOW, FAST, GONE = 150.0, 450.0, 800.0
"""Times of the trace in seconds: rewards get slow, get fast, half of the engines vanish."""
SCALE = {
    "window": WINDOW,
    "inference": {"min": 1, "max": 8},
    "reward": {"min": 1, "max": 8},
}


def trace(seed: int = 0, spread: float = 0.5) -> Plan:
    """Steps of about 1.4 s; rewards of 0.05 s, from SLOW to FAST of 3 s, two at a time in each reward actor."""
    times = QUICK.with_values(restart_seconds=START, step_seconds=1.0, completion_spread=spread, reward_spread=spread)
    run = plan(
        640, times, Size(2, 1, 1, 4), scale=SCALE, reward={"max_concurrent_groups": 2}, packer={"max_async_level": 2}
    )
    changes = (Change(SLOW, "reward_seconds", 3.0), Change(FAST, "reward_seconds", 0.05))
    deaths = (Death("inference", 0, GONE), Death("inference", 1, GONE))
    config = run.config.model_copy(update={"seed": seed})
    return replace(run, config=config, changes=changes, deaths=deaths)


def at(ring: Ring, seconds: float, role: str, at_start: int) -> int:
    """Processes of a role wanted at a time."""
    before = [one.wanted for one in ring.scaling.changes if one.role == role and one.seconds <= seconds]
    return before[-1] if before else at_start


def reversals(changes: list[Scaled]) -> list[Scaled]:
    """Changes against the direction of the last one of their role, with no change of the load since then."""
    found, last = [], dict[str, Scaled]()
    for one in changes:
        before = last.get(one.role)
        turns = before is not None and (before.wanted > before.before) != (one.wanted > one.before)
        # the start of the run is a change of load as well, and the return of the engines
        loads = (0.0, SLOW, FAST, GONE, GONE + START)
        if before is not None and turns and not any(before.seconds - 60 <= load <= one.seconds for load in loads):
            found.append(one)
        last[one.role] = one
    return found


@pytest.mark.slow
def test_a_run_follows_slow_rewards_fast_rewards_and_vanished_engines() -> None:
    """Reward actors come and go within the time that operations.md states; nothing is lost, nothing flaps."""
    ring = ran(trace())
    conserved(ring)
    assert not reversals(ring.scaling.changes)
    rewards = [one for one in ring.scaling.changes if one.role == "reward"]
    ups, downs = (
        [one for one in rewards if one.wanted > one.before],
        [one for one in rewards if one.wanted < one.before],
    )
    assert all(SLOW < one.seconds < FAST for one in ups)
    assert all(one.seconds > FAST for one in downs)
    latency = 20.0
    assert at(ring, FAST, "reward", 1) > 2
    assert ups[-1].seconds - SLOW <= len(ups) * ((GROW_WINDOWS + 1) * WINDOW + START + latency)
    assert at(ring, GONE, "reward", 1) < at(ring, FAST, "reward", 1)
    assert downs[-1].wanted == 1
    assert downs[-1].seconds - FAST <= len(downs) * ((SHRINK_WINDOWS + 1) * WINDOW + latency)
    # the engines that vanished came back, and as many are wanted as before
    assert ring.meter.num_deaths > 0
    assert at(ring, GONE + 60, "inference", 4) == at(ring, GONE - 1, "inference", 4)


def rates(ring: Ring, start: float, end: float) -> float:
    """Steps per second between two times."""
    return sum(start <= line.time < end for line in ring.meter.lines) / (end - start)


@pytest.mark.slow
def test_a_run_that_follows_is_faster_than_one_that_does_not() -> None:
    """With slow rewards it trains at nearly twice the rate in the end: twice the reward actors, and level 2."""
    one = trace()
    fixed = replace(one, config=one.config.model_copy(update={"scale": type(one.config.scale)()}))
    follows, stays = ran(one), ran(fixed)
    assert not stays.scaling.changes
    assert rates(follows, FAST - 100, FAST) > 1.7 * rates(stays, FAST - 100, FAST)
    assert result_of(follows).seconds < result_of(stays).seconds


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1, 3), pytest.param(range(3, 23), marks=pytest.mark.long)])
def test_no_simulated_run_flaps(seeds: range) -> None:
    """Other lengths of completions and rewards each time, also with a large spread."""
    for seed in seeds:
        ring = ran(trace(seed, spread=0.2 + 0.2 * (seed % 5)))
        assert not reversals(ring.scaling.changes), f"seed {seed}"
        assert any(one.role == "reward" for one in ring.scaling.changes), f"seed {seed}"
        conserved(ring)


def test_the_report_tells_each_change_and_why() -> None:
    """In words, with the time."""
    one = replace(trace(), steps=200)
    text = describe(one, result_of(ran(one)), None, None, {})
    assert " reward 1 → 2: the trainer waits " in text


def test_a_change_of_a_figure_is_read_from_its_word() -> None:
    """TIME:NAME=VALUE; other words name the form."""
    assert parse_change("10m:reward_seconds=8") == Change(600.0, "reward_seconds", 8.0)
    with pytest.raises(ConfigError, match="write TIME:NAME=VALUE"):
        parse_change("reward_seconds=8")
    with pytest.raises(ConfigError, match="no such figure"):
        parse_change("5s:speed=8")
