"""Which example an ordinal gets: once per epoch, by weight, from seed and counts alone."""

from collections import Counter

import pytest

from actors.algorithms.curriculum import Curriculum


def draws(curriculum: Curriculum, number: int) -> list[tuple[int, int]]:
    """The next ones."""
    return [curriculum.draw() for _ in range(number)]


def test_every_example_comes_once_per_epoch() -> None:
    """Three epochs of seven, each a permutation, and not the same one."""
    curriculum = Curriculum([7], None, seed=0)
    epochs = [[index for _, index in draws(curriculum, 7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_endless_environments_are_taken_in_order() -> None:
    """They are generated, so there is nothing to shuffle."""
    assert draws(Curriculum([None], None, seed=0), 3) == [(0, 0), (0, 1), (0, 2)]


def test_an_environment_that_is_not_shuffled_is_taken_in_order() -> None:
    """Epoch after epoch; the other environments have the same draws as without it."""
    curriculum = Curriculum([3, 5], [1.0, 1.0], seed=0, shuffled=[False, True])
    found = draws(curriculum, 40)
    in_order = [index for environment, index in found if environment == 0]
    assert in_order == [number % 3 for number in range(len(in_order))]
    shuffled = [draw for draw in draws(Curriculum([3, 5], [1.0, 1.0], seed=0), 40) if draw[0] == 1]
    assert [draw for draw in found if draw[0] == 1] == shuffled
    assert len(in_order) + len(shuffled) == 40


@pytest.mark.parametrize("stop", [0, 1, 9, 23])
def test_a_draw_depends_on_seed_and_counts_alone(stop: int) -> None:
    """A packer that starts again with the stored counts goes on as if nothing had been (P10)."""
    sizes = [5, None, 3]
    whole = draws(Curriculum(sizes, None, seed=4), 30)
    first, second = Curriculum(sizes, None, seed=4), Curriculum(sizes, None, seed=4)
    before = draws(first, stop)
    second.counts = list(first.counts)
    assert before + draws(second, 30 - stop) == whole


def test_another_seed_gives_another_order() -> None:
    """Twenty examples; equal orders by chance are out of the question."""
    assert draws(Curriculum([20], None, seed=1), 20) != draws(Curriculum([20], None, seed=2), 20)


def test_environments_are_drawn_by_their_weights() -> None:
    """1 : 3 over 4 000 draws; five standard deviations are 137."""
    counts = Counter(environment for environment, _ in draws(Curriculum([10, 10], [1.0, 3.0], seed=0), 4000))
    assert abs(counts[0] - 1000) < 137


def test_without_weights_size_decides_and_endless_ones_count_as_the_largest() -> None:
    """10, endless, 40 → 1 : 4 : 4 over 4 500 draws; five standard deviations of 500 are 106."""
    counts = Counter(environment for environment, _ in draws(Curriculum([10, None, 40], None, seed=0), 4500))
    assert abs(counts[0] - 500) < 106
    assert abs(counts[1] - 2000) < 170


def test_counts_say_how_many_were_drawn_of_each() -> None:
    """That is the whole state."""
    curriculum = Curriculum([3, 3], None, seed=0)
    drawn = Counter(environment for environment, _ in draws(curriculum, 50))
    assert curriculum.counts == [drawn[0], drawn[1]]
