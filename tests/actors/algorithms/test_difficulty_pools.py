"""Difficulty pools: who is set aside, who comes back, and that nothing of it is forgotten or drawn."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.difficulty_pools import DifficultyPools, difficulty_pool_key
from schemas.config.difficulty_pools import DifficultyPoolsConfig


def pools(size: int = 10, stored: dict[str, str] | None = None, **given: Any) -> DifficultyPools:
    """Of one environment whose keys are 100, 101, …; mean 1 is easy, mean 0 hard."""
    config = DifficultyPoolsConfig(**{"easy_threshold": 1.0, "hard_threshold": 0.0} | given)
    return DifficultyPools(config, [np.arange(100, 100 + size, dtype=np.uint64)], stored or {})


def aside(of: DifficultyPools, size: int = 10) -> list[int]:
    """The examples that are not drawn."""
    return [index for index in range(size) if of.is_aside(0, index)]


@pytest.mark.parametrize(
    ("mean", "pool"), [(1.0, "easy"), (0.99, "normal"), (0.0, "hard"), (-1.0, "hard"), (0.01, "normal")]
)
def test_the_mean_reward_of_a_group_puts_its_example_in_a_pool(mean: float, pool: str) -> None:
    """≥ easy_threshold, ≤ hard_threshold; a change is told once."""
    mine = pools()
    mine.note(0, 3, mean)
    assert mine.take_changes() == ({} if pool == "normal" else {f"{103:016x}": pool})
    assert mine.take_changes() == {}
    assert aside(mine) == ([] if pool == "normal" else [3])


def test_the_newest_group_decides() -> None:
    """Easy, hard, normal; nothing scorable says nothing, and what stays where it is is no change."""
    mine = pools()
    for mean, expected in ((1.0, "easy"), (0.0, "hard"), (0.5, "normal")):
        mine.note(0, 3, mean)
        mine.note(0, 3, mean)
        mine.note(0, 3, float("nan"))
        assert mine.take_changes() == {f"{103:016x}": expected}
        assert +mine.sizes == Counter([expected] * (expected != "normal"))
    assert aside(mine) == []


def test_what_was_stored_is_set_aside_again() -> None:
    """Of another list of hash_keys nothing is known: those keys count for nothing."""
    mine = pools(stored={f"{102:016x}": "easy", f"{999:016x}": "hard"})
    assert aside(mine) == [2]
    assert mine.sizes == {"easy": 1}


def test_the_same_example_twice_is_one_example() -> None:
    """Two rows, or two environments, with one key."""
    keys = [np.array([7, 8, 7], np.uint64), np.array([7], np.uint64), None]
    mine = DifficultyPools(DifficultyPoolsConfig(easy_threshold=1.0), keys, {})
    mine.note(0, 0, 1.0)
    mine.note(2, 0, 1.0)
    assert [mine.is_aside(0, i) for i in range(3)] == [True, False, True]
    assert (mine.is_aside(1, 0), mine.is_aside(2, 0)) == (True, False)
    assert (mine.is_exhausted(0), mine.is_exhausted(1), mine.is_exhausted(2)) == (False, True, False)


@pytest.mark.parametrize(
    ("easy", "fraction", "back"),
    [(10, 0.0, 0), (10, 0.25, 2), (10, 0.26, 3), (10, 0.01, 1), (0, 0.5, 0), (10, 1.0, 10)],
)
def test_a_fraction_of_a_pool_comes_back_when_the_run_is_started_again(easy: int, fraction: float, back: int) -> None:
    """Rounded, at least one, never more than there are; which ones follows from the seed alone."""
    stored = {f"{100 + i:016x}": "easy" for i in range(easy)}
    first, second = (pools(stored=stored, easy_fraction=fraction) for _ in range(2))
    assert first.begin_again("0 2") == back == second.begin_again("0 2")
    assert aside(first) == aside(second)
    assert len(aside(first)) == easy - back
    assert set(first.take_changes().values()) == {"normal"} if back else not first.take_changes()


def test_each_pool_has_its_own_fraction() -> None:
    """Four easy, half of them back; four hard, none."""
    stored = {f"{100 + i:016x}": "easy" if i < 4 else "hard" for i in range(8)}
    mine = pools(stored=stored, easy_fraction=0.5)
    assert mine.begin_again("seed") == 2
    assert +mine.sizes == {"easy": 2, "hard": 4}


def test_a_key_is_made_of_what_the_configuration_names() -> None:
    """Task and prompt by default; a column besides; a missing one is named."""
    assert difficulty_pool_key("a", "p", {}, ["task", "prompt"]) != difficulty_pool_key(
        "b", "p", {}, ["task", "prompt"]
    )
    assert difficulty_pool_key("a", "p", {"id": 1}, ["id"]) == difficulty_pool_key("b", "q", {"id": 1}, ["id"])
    with pytest.raises(KeyError, match="id"):
        difficulty_pool_key("a", "p", {}, ["id"])


@pytest.mark.parametrize("given", [{}, {"easy_threshold": 0.0, "hard_threshold": 0.0}])
def test_thresholds_that_set_nothing_or_everything_aside_are_refused(given: dict[str, float]) -> None:
    """Neither, or hard not below easy."""
    with pytest.raises(ValueError, match="hard_threshold"):
        DifficultyPoolsConfig(**given)


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_only_normal_examples_are_drawn() -> None:
    """Two epochs of ten with three aside are fourteen draws; back again, the next epoch has all ten."""
    mine = pools()
    for index in (2, 5, 7):
        mine.note(0, index, 1.0)
    curriculum = Curriculum([10], None, 0, mine)
    drawn = Counter(index for _, index in (curriculum.draw() for _ in range(14)))
    assert drawn == dict.fromkeys({0, 1, 3, 4, 6, 8, 9}, 2)
    for index in (2, 5, 7):
        mine.note(0, index, 0.5)
    curriculum.counts = [20]
    assert sorted(curriculum.draw()[1] for _ in range(10)) == list(range(10))


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_a_draw_depends_on_seed_and_committed_state_alone(stop: int) -> None:
    """A packer that starts again with counts and pools as stored draws what the first one would have (P10)."""
    whole, first = (Curriculum([10, None], None, 3, _two()) for _ in range(2))
    drawn, table = [], dict[str, str]()
    for number in range(30):
        drawn.append(_draw_and_score(whole))
        if number < stop:
            assert _draw_and_score(first) == drawn[-1]
            table |= first.pools.take_changes()  # type: ignore[union-attr]
    second = Curriculum([10, None], None, 3, _two({key: pool for key, pool in table.items() if pool != "normal"}))
    second.counts = list(first.counts)
    assert [_draw_and_score(second) for _ in range(stop, 30)] == drawn[stop:]


def _two(stored: dict[str, str] | None = None) -> DifficultyPools:
    keys = [np.arange(10, dtype=np.uint64), None]
    return DifficultyPools(DifficultyPoolsConfig(easy_threshold=0.9, hard_threshold=0.1), keys, stored or {})


def _draw_and_score(curriculum: Curriculum) -> tuple[int, int]:
    environment, index = curriculum.draw()
    assert curriculum.pools is not None
    curriculum.pools.note(environment, index, (0.0, 0.5, 1.0)[index % 3])
    return environment, index


def test_an_environment_of_which_all_is_aside_gets_all_back() -> None:
    """Ten draws that are all easy, and the eleventh: the run goes on, and it is told once."""
    mine = pools()
    curriculum = Curriculum([10], None, 0, mine)
    for _ in range(10):
        mine.note(*curriculum.draw(), 1.0)
    assert mine.is_exhausted(0)
    assert curriculum.take_given_back() == []
    curriculum.draw()
    assert aside(mine) == []
    assert (curriculum.take_given_back(), curriculum.take_given_back()) == ([(0, 10)], [])
    assert set(mine.take_changes().values()) == {"normal"}


def test_what_a_commit_writes_does_not_grow_with_the_data() -> None:
    """100 000 examples, half of them aside: one group is one change."""
    stored = {f"{100 + i:016x}": "easy" for i in range(50_000)}
    mine = pools(100_000, stored)
    mine.note(0, 70_000, 1.0)
    assert mine.take_changes() == {f"{70_100:016x}": "easy"}
