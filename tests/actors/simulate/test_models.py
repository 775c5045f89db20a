"""The models of times are what their formulas say."""

import random
import statistics

import pytest

from actors.simulate.calibration import spread_of
from actors.simulate.costs import cost_per_step, parse_price
from actors.simulate.events import Events
from actors.simulate.failures import Death, parse_death, parse_rate
from actors.simulate.models import (
    Times,
    completion_lengths,
    decode_step,
    largest_of,
    lognormal,
    parse_setting,
    round_seconds,
    slowdown,
    train_step,
)
from schemas.errors import ConfigError


def test_actions_happen_in_the_order_of_their_times() -> None:
    """Those of one time in the order in which they were asked for; none before now."""
    events, seen = Events(), list[str]()
    events.at(2.0, seen.append, "late")
    events.at(1.0, lambda: (seen.append("first"), events.at(0.0, seen.append, "now"))[0])
    events.at(1.0, seen.append, "second")
    events.run(lambda: False)
    assert (seen, events.now) == (["first", "second", "now", "late"], 2.0)


def test_formulas() -> None:
    """With numbers of the docstrings."""
    times = Times(decode_seconds=0.02, decode_sequence_seconds=0.001, round_seconds=0.005, round_peer_seconds=0.001)
    assert decode_step(times, 30) == pytest.approx(0.05)
    assert round_seconds(times, 10) == pytest.approx(0.015)
    two = Times(cores=2, core_threads=1, other_cores=0)
    assert (slowdown(two, 2), slowdown(two, 3), slowdown(Times(), 99)) == (1.0, 1.5, 1.0)
    step = Times(step_seconds=1.0, micro_batch_seconds=0.5, train_token_seconds=0.01)
    # the second rank has more tokens, and all wait for it
    assert train_step(step, [[100.0, 50.0], [100.0, 200.0]]) == pytest.approx(1.0 + 2 * 0.5 + 3.0)


@pytest.mark.parametrize(("mean", "spread"), [(0.2, 0.0), (100.0, 0.5), (5.0, 2.0)])
def test_lognormal_values_have_their_mean_and_spread(mean: float, spread: float) -> None:
    """Over 40 000 draws."""
    rng = random.Random(1)
    drawn = [lognormal(rng, mean, spread) for _ in range(40_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(drawn) == pytest.approx(spread * mean, rel=0.2, abs=1e-12)


@pytest.mark.parametrize("spread", [0.1, 0.6, 1.5])
def test_the_spread_follows_from_the_largest_value(spread: float) -> None:
    """`spread_of` is the inverse of `largest_of`."""
    assert spread_of(50.0, largest_of(50.0, spread, 128), 128) == pytest.approx(spread, rel=1e-6)


def test_a_group_has_the_same_lengths_in_every_simulation() -> None:
    """They follow from its seed, and stay within the limit."""
    times = Times(completion_tokens=100, completion_spread=1.0)
    lengths = completion_lengths(times, 7, 16, 150)
    assert lengths == completion_lengths(times, 7, 16, 150) != completion_lengths(times, 8, 16, 150)
    assert all(1 <= length <= 150 for length in lengths)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=1", "no such figure"),
        ("decode_seconds=fast", "no number"),
    ],
)
def test_a_wrong_figure_is_refused(text: str, words: str) -> None:
    """The words name the option."""
    with pytest.raises(ConfigError, match=rf"--set {text}: .*{words}"):
        parse_setting(text)


@pytest.mark.parametrize("values", [{"decode_seconds": 0.0}, {"reward_seconds": -1.0}, {"filtered_share": 1.0}])
def test_figures_have_limits(values: dict[str, float]) -> None:
    """A run with such figures would never end."""
    with pytest.raises(ConfigError, match=f"--set {next(iter(values))}"):
        Times(**values)


def test_words_on_failures() -> None:
    """Seconds, minutes and hours; other forms are refused with an example."""
    assert parse_death("inference-12@1.5m") == Death("inference", 12, 90.0)
    assert parse_death("packer-0@20m") == Death("packer", 0, 1200.0)
    assert parse_death("trainer-0@20").seconds == 20.0
    assert parse_rate("rollout=6h") == ("rollout", 21_600.0)
    for text, parse in (("engine-0@3", parse_death), ("inference@3", parse_death), ("reward=0h", parse_rate)):
        with pytest.raises(ConfigError, match="as in inference"):
            parse(text)


def test_costs() -> None:
    """The example of the docstring; a price is a number of 0 or more for a role that has GPUs."""
    assert cost_per_step({"trainer": 2.0, "inference": 2.0}, {"trainer": 2, "inference": 6}, 0.1) == pytest.approx(
        8 * 2 / 3600 * 10
    )
    assert parse_price("trainer=2.5") == ("trainer", 2.5)
    for text in ("reward=1", "trainer=-1", "trainer", "trainer=nan"):
        with pytest.raises(ConfigError, match="--price"):
            parse_price(text)
