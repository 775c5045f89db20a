"""Levels that move with the model's success: when they move, and that a stored state goes on as if nothing had been."""

import json
import random

import pytest

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.moving_levels import MovingLevel
from schemas.config.environments import CurriculumConfig


def level(**keys: object) -> MovingLevel:
    """A level of three, decided by two groups."""
    given = {"levels": 3, "raise_at": 0.75, "lower_at": 0.25, "window": 2} | keys
    return MovingLevel(CurriculumConfig.model_validate(given))


def noted(one: MovingLevel, *rewards: float) -> list[int]:
    """The level after each of these groups of the present level."""
    found = []
    for reward in rewards:
        one.note(one.level, reward)
        found.append(one.level)
    return found


def test_the_mean_of_a_window_raises_and_lowers_the_level_by_one() -> None:
    """Each move begins a new window; beyond both ends nothing moves."""
    # windows: (0.5, 1), (1, 1), then (1, 1) at the top, (0, 0.5) falls, (0, 0) falls, (0, 0) at the bottom
    assert noted(level(), 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == [0, 1, 1, 2, 2, 2, 2]
    assert noted(level(start=2), 0.0, 0.5, 0.5, 0.0, 0.0, 0.0) == [2, 1, 1, 0, 0, 0]
    assert noted(level(start=1, lower_at=None), 0.0, 0.0, 0.0) == [1, 1, 1]


def test_the_window_slides() -> None:
    """Groups before the newest two count for nothing."""
    assert noted(level(), 0.3, 0.5, 0.9, 0.6) == [0, 0, 0, 1]


def test_groups_of_another_level_count_for_nothing() -> None:
    """They were drawn before the last move."""
    one = level(start=1)
    assert [one.note(0, 1.0), one.note(2, 1.0), one.note(1, 1.0), one.note(0, 1.0), one.level] == [False] * 4 + [1]
    assert one.note(1, 1.0)
    assert one.level == 2


def drawn(curriculum: Curriculum, number: int, rng: random.Random) -> list[tuple[int, int]]:
    """Draws, with a group noted after each; the last one of a draw tells nothing."""
    found = []
    for _ in range(number):
        environment, index = curriculum.draw()
        found.append((environment, index))
        curriculum.note(environment, index, rng.choice([0.1, 0.9, 0.9]))
    return found


@pytest.mark.parametrize("stop", [0, 1, 7, 20, 33])
def test_a_stored_state_goes_on_with_the_same_examples(stop: int) -> None:
    """Wherever the packer was killed; beside an environment without levels, which has the draws that it had."""

    def made(state: str | None = None, counts: list[int] | None = None) -> Curriculum:
        config = CurriculumConfig(levels=3, lower_at=0.2, window=2)
        one = MovingLevel(config, json.loads(state) if state else None)
        curriculum = Curriculum([30, 5], [3.0, 1.0], 4, levels=[one, None])
        curriculum.counts = counts or curriculum.counts
        return curriculum

    whole = drawn(made(), 60, random.Random(1))
    rng, first = random.Random(1), made()
    before = drawn(first, stop, rng)
    assert first.levels[0] is not None
    second = made(json.dumps(first.levels[0].state), list(first.counts))
    assert before + drawn(second, 60 - stop, rng) == whole
    assert {index // 10 for environment, index in whole if environment == 0} == {0, 1, 2}


def test_no_example_of_a_level_comes_twice_before_all_have_come() -> None:
    """Also when the level is left and comes again."""
    one = level(window=3, levels=2)
    curriculum = Curriculum([20], None, 0, levels=[one])
    seen: list[list[int]] = [[], []]
    rng = random.Random(5)
    while min(map(len, seen)) < 10:
        _, index = curriculum.draw()
        assert index // 10 == one.level
        seen[one.level].append(index)
        curriculum.note(0, index, rng.choice([0.0, 1.0]))
    for number, indexes in enumerate(seen):
        assert sorted(indexes[:10]) == list(range(10 * number, 10 * number + 10))


def test_a_state_is_told_once() -> None:
    """A commit that changes nothing writes nothing."""
    one = level()
    assert [one.take_changed(), one.take_changed()] == [True, False]
    one.take()
    assert [one.take_changed(), one.take_changed()] == [True, False]
    one.note(0, 0.5)
    assert one.take_changed()
    assert not MovingLevel(CurriculumConfig(levels=2), one.state).take_changed()


@pytest.mark.parametrize(("levels", "expected"), [(2, 1), (4, 2)])
def test_a_fork_with_other_levels_keeps_the_level_as_far_as_it_is_there(levels: int, expected: int) -> None:
    """And has a count for each."""
    stored = {"level": 2, "counts": [1, 2, 3], "rewards": [0.5]}
    one = MovingLevel(CurriculumConfig(levels=levels), stored)
    assert (one.level, one.counts) == (expected, [1, 2, 3, 0][:levels])


@pytest.mark.parametrize(
    ("keys", "words"), [({"start": 3}, "start: 3 is no level"), ({"lower_at": 0.8}, "lower_at: 0.8 must be below")]
)
def test_levels_that_can_not_move_are_refused(keys: dict[str, float], words: str) -> None:
    """With the key."""
    with pytest.raises(ValueError, match=words):
        CurriculumConfig.model_validate({"levels": 3} | keys)
