"""What a simulation tells: the limit, more processes, costs, splits, sweeps."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from actors.simulate.costs import cost_per_step, gpus_of, splits
from actors.simulate.limit import WORTH_SAYING, advice, experiments
from actors.simulate.picture import picture
from actors.simulate.plan import Plan, Size
from actors.simulate.report import describe, rate, seconds, share
from actors.simulate.result import simulate
from actors.simulate.sweep import Axis, parse_axis, points, rows_of
from schemas.errors import ConfigError
from tests.actors.simulate.plans import QUICK, plan

LIMITED = {
    "reward": (QUICK.with_values(reward_seconds=20.0), {}),
    "sampling": (QUICK.with_values(decode_seconds=0.5), {}),
    "training": (QUICK.with_values(step_seconds=20.0), {}),
    "weights": (QUICK.with_values(wire_seconds=30.0, decode_seconds=0.001), {"packer": {"max_async_level": 0}}),
    "slots": (
        QUICK.with_values(hop_seconds=0.5),
        {"rollout": {"max_concurrent_groups": 1}, "packer": {"max_async_level": 4}},
    ),
    "environment": (QUICK.with_values(turns=3, environment_seconds=20.0), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", sorted(LIMITED))
def test_what_takes_long_is_named_as_the_limit(limit: str) -> None:
    """Each in a run in which it takes nearly all of the time."""
    times, sections = LIMITED[limit]
    found = experiments(plan(12, times, **sections))
    assert found[0].name == limit
    assert found[0].gain > 0.3


@pytest.mark.slow
def test_a_slow_reward_is_named_in_the_report_with_the_actors_that_lift_it() -> None:
    """In words first; the table follows."""
    one = plan(12, QUICK.with_values(reward_seconds=20.0), reward={"max_concurrent_groups": 1, **_FUNCTIONS})
    found = experiments(one)
    more = advice(one, found[0].name)
    assert more is not None
    assert more.role == "rewards"
    text = describe(one, simulate(one), found, more, {})
    assert "The limit is the reward functions: twice as fast would bring" in text
    assert f"{more.more} more reward actors would bring" in text
    assert text.index("The limit is") < text.index("steps per second  ")


_FUNCTIONS = {"functions": [{"path": "characters_in_place"}]}


@pytest.mark.slow
def test_advice_is_the_smallest_number_that_suffices() -> None:
    """One engine less leaves the trainer waiting for more than 5 % of the time."""
    times = QUICK.with_values(decode_seconds=0.02, decode_sequence_seconds=0.02, step_seconds=3.0, wire_seconds=0.0)
    one = plan(30, times, Size(4, 1, 1, 1), packer={"max_async_level": 4, "groups_per_step": 16})
    more = advice(one, "sampling")
    assert more is not None
    assert more.more > 1
    assert more.result.trainer_idle <= 0.05
    fewer = simulate(replace(one, size=replace(one.size, engines=one.size.engines + more.more - 1)))
    assert fewer.trainer_idle > 0.05


def test_a_run_without_a_limit_says_so() -> None:
    """No change brings anything where a constant part takes all the time."""
    one = plan(12, QUICK.with_values(step_seconds=0.0, train_token_seconds=0.0, checkpoint_seconds=50.0), **_SAVING)
    found = experiments(one)
    assert found[0].gain < WORTH_SAYING
    assert "Nothing alone limits the run" in describe(one, simulate(one), found, None, {})


_SAVING = {"trainer": {"max_steps": 1000, "checkpoint": {"interval": 1}}}


def test_the_cheapest_split_is_the_best_of_all() -> None:
    """Each split is simulated by itself; the first is the cheapest at these prices."""
    times = QUICK.with_values(decode_sequence_seconds=0.01, train_token_seconds=0.02)
    one = plan(15, times, Size(4, 1, 1, 1), packer={"groups_per_step": 8, "max_async_level": 2})
    prices = {"trainer": 3.0, "inference": 1.0}
    found = splits(one, 6, prices)
    assert sorted(split.size.trainers for split in found) == [1, 2, 3, 4, 5]
    costs = []
    for split in found:
        result = simulate(replace(one, size=split.size))
        costs.append(cost_per_step(prices, gpus_of(one.config, split.size), result.steps_per_second))
        assert split.cost == pytest.approx(costs[-1])
    assert costs == sorted(costs)
    text = describe(one, simulate(one), None, None, prices, found)
    best = found[0]
    assert f"is {best.gpus['trainer']} for training and {best.gpus['inference']} for sampling" in text


@pytest.mark.slow
def test_of_many_gpus_few_splits_are_tried_and_the_best_is_found() -> None:
    """64 GPUs: a fraction of the splits, and none of the others is cheaper by more than a little."""
    times = QUICK.with_values(decode_sequence_seconds=0.01, train_token_seconds=0.05)
    one = plan(5, times, Size(8, 1, 1, 1), packer={"groups_per_step": 16, "max_async_level": 2})
    found = splits(one, 64, {})
    assert len(found) < 40
    best = min(found, key=lambda split: split.cost)
    for trainers in (4, 16, 40):
        size = replace(one.size, trainers=trainers, engines=64 - trainers)
        assert best.cost <= 1.1 * 64 / simulate(replace(one, size=size)).steps_per_second


def test_too_few_gpus_are_refused() -> None:
    """The least is a rank and an engine."""
    with pytest.raises(ConfigError, match="--gpus 1: a trainer rank and an engine take 2"):
        splits(plan(2), 1, {})


def _load(one: Plan) -> object:
    def load(overrides: list[str]) -> object:
        (level,) = [int(text.partition("=")[2]) for text in overrides]
        packer = one.config.packer.model_copy(update={"max_async_level": level})
        return one.config.model_copy(update={"packer": packer})

    return load


def test_a_sweep_is_the_simulations_of_its_points() -> None:
    """Over a role and a key of run.yaml, in the order of the values."""
    one = plan(8)
    axes = [parse_axis("engines=1,3"), parse_axis("packer.max_async_level=0,2")]
    found = points(one, axes, _load(one))  # type: ignore[arg-type]
    assert [point.values for point in found] == [("1", "0"), ("1", "2"), ("3", "0"), ("3", "2")]
    three = replace(one, size=replace(one.size, engines=3), config=_load(one)(["packer.max_async_level=2"]))  # type: ignore[operator]
    assert found[3].result == simulate(three)
    rows = rows_of(axes, found)
    assert rows[0][:3] == ("engines", "packer.max_async_level", "steps/s")
    assert rows[4][:3] == ("3", "2", f"{found[3].result.steps_per_second:.4g}")
    figures = [row[2] for row in rows[1:]]
    assert float(figures[0]) < float(figures[1])


def test_a_figure_can_be_swept() -> None:
    """A reward that takes longer makes a slower run."""
    found = points(plan(8), [parse_axis("reward_seconds=0.1,40")], lambda overrides: pytest.fail("not needed"))
    assert found[0].result.steps_per_second > 2 * found[1].result.steps_per_second


@pytest.mark.parametrize("text", ["engines", "engines=", "engines=0,1", "engines=x", "speed=1,2"])
def test_a_wrong_axis_is_refused(text: str) -> None:
    """The words name the option."""
    with pytest.raises(ConfigError, match=f"--sweep {text}"):
        parse_axis(text)


def test_the_picture_has_a_line_for_each_series() -> None:
    """Well-formed, with a point for each simulation in the panel of rates, and the words escaped."""
    one = plan(4)
    axes = [Axis("engines", ("1", "2", "3")), Axis("rollouts", ("1", "2"))]
    found = points(one, axes, lambda overrides: one.config)
    root = ElementTree.fromstring(picture(axes, found))
    circles = [shape for shape in root.iter() if shape.tag.endswith("circle")]
    # two lines of rates, and two of each kind of waiting, with three points each
    assert len(circles) == (2 + 4) * 3
    assert "rollouts 2" in {shape.text for shape in root.iter()}


def test_numbers_in_words() -> None:
    """Units that fit."""
    assert [share(value) for value in (0.0, 0.031, 0.43, 1.0)] == ["0 %", "3.1 %", "43 %", "100 %"]
    assert [seconds(value) for value in (2.0, 600.0, 9000.0)] == ["2.0 s", "10 min", "2.5 h"]
    assert (rate(2.5), rate(0.05)) == ("2.50 steps per second", "20.0 s per step")
