"""Packing: every sample once, no micro-batch too long, equally many per rank, as few as the bound allows."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.packing import LINEAR_COST, QUADRATIC_COST, _balance, cost, lower_bound, pack

CAPACITY = 100
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)
RANKS = st.integers(1, 9)


def lognormal(seed: int, median: int, n: int, capacity: int = 16384) -> list[int]:
    """Draw lengths as the benchmark does, from another stream."""
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(math.log(median), 1.0)), 1), capacity) for _ in range(n)]


def fewest(lengths: list[int], capacity: int) -> int:
    """Count the micro-batches of an optimal packing, by trying all."""

    def place(rest: list[int], rooms: tuple[int, ...]) -> int:
        if not rest:
            return len(rooms)
        options = [place(rest[1:], (*rooms, capacity - rest[0]))]
        for b, room in enumerate(rooms):
            if room >= rest[0]:
                options.append(place(rest[1:], (*rooms[:b], room - rest[0], *rooms[b + 1 :])))
        return min(options)

    return place(lengths, ())


def filled(ranks: list[list[list[int]]]) -> list[list[int]]:
    """List the micro-batches of all ranks that are no dummies."""
    return [micro_batch for rank in ranks for micro_batch in rank if micro_batch]


def test_samples_that_fill_two_micro_batches_exactly_get_two() -> None:
    """60 + 40 and 70 + 30 leave no room at all."""
    assert sorted(pack([60, 70, 30, 40], 100)[0]) == [[0, 3], [1, 2]]


def test_search_finds_the_exact_fit_that_best_fit_decreasing_misses() -> None:
    """Decreasing pairs 30 + 30 and needs three micro-batches of 70; 30 + 20 + 20 twice needs two."""
    (micro_batches,) = pack([30, 30, 20, 20, 20, 20], 70)
    assert [len(micro_batch) for micro_batch in micro_batches] == [3, 3]


def test_indices_ascend_within_a_micro_batch() -> None:
    """The members of a group stay neighbours whatever their lengths."""
    assert pack([10, 30, 20, 40], 100) == [[[0, 1, 2, 3]]]


def test_two_ranks_share_what_would_fit_into_one_micro_batch() -> None:
    """40 + 10 beside 30 + 20: no rank gets a dummy while there are samples to split."""
    assert sorted(filled(pack([40, 30, 20, 10], 100, 2))) == [[0, 3], [1, 2]]


def test_dummies_appear_only_where_samples_run_out() -> None:
    """Two samples on four ranks: two ranks work, two get one empty micro-batch each."""
    assert sorted(pack([50, 50], 100, 4)) == [[[]], [[]], [[0]], [[1]]]


def test_no_samples_give_no_micro_batches() -> None:
    """An empty step has nothing to do on any rank."""
    assert pack([], 100, 3) == [[], [], []]
    assert lower_bound([], 100) == 0


def test_a_rank_with_the_longest_sample_of_one_row_gets_the_cheapest_of_the_next() -> None:
    """Four micro-batches of 100, 90, 80, 70 tokens on two ranks: 100 + 70 beside 90 + 80."""
    ranks = pack([100, 90, 80, 70], 100, 2)
    assert sorted(sorted(rank) for rank in ranks) == [[[0], [3]], [[1], [2]]]


def test_costs_of_eight_ranks_are_level() -> None:
    """The costliest is within 2 % of the mean in the median of 30 cases; few micro-batches leave little choice."""
    cases = [(median, n, seed) for median, n in ((1000, 128), (4000, 128), (4000, 512)) for seed in range(10)]
    ratios = []
    for median, n, seed in cases:
        lengths = lognormal(seed, median, n)
        totals = [sum(cost(micro_batch, lengths) for micro_batch in rank) for rank in pack(lengths, 16384, 8)]
        ratios.append(max(totals) * 8 / sum(totals))
    assert sorted(ratios)[len(ratios) // 2] <= 1.02
    assert sum(ratio > 1.1 for ratio in ratios) <= 1


def test_samples_are_exchanged_where_whole_micro_batches_can_not_level_two_ranks() -> None:
    """90 + 10 and 50 of 100: shares of 100 and 50 become 90 and 60."""
    lengths = [90, 50, 10]
    ranks = _balance([[[0, 2]], [[1]]], lengths, 100)
    assert sorted(sum(lengths[i] for batch in rank for i in batch) for rank in ranks) == [60, 90]
    assert _balance([[[0]], [[1]]], [90, 50], 100) == [[[0]], [[1]]], "a sample that is alone stays"


def test_cost_adds_tokens_and_squared_tokens_per_sample() -> None:
    """Samples of 3 and 4 tokens: 7 tokens, 25 squared tokens; attention never crosses samples."""
    assert cost([0, 2], [3, 9, 4]) == pytest.approx(7 * LINEAR_COST + 25 * QUADRATIC_COST)


def test_a_sample_longer_than_a_micro_batch_is_refused_by_name() -> None:
    """The message has the index, the length and the key to raise."""
    with pytest.raises(ValueError, match=r"sample 1 has 101 tokens.*packer\.sequence_len"):
        pack([5, 101], 100)


@pytest.mark.parametrize("length", [0, -3])
def test_a_sample_without_tokens_is_refused(length: int) -> None:
    """Nothing can be trained on it, and a negative length would break the capacity."""
    with pytest.raises(ValueError, match="sample 0 has"):
        pack([length], 100)


def test_fewer_than_one_rank_is_refused() -> None:
    """There is nobody to give the samples to."""
    with pytest.raises(ValueError, match="num_ranks must be at least 1"):
        pack([1], 100, 0)


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [
        ([50, 50, 1], 2),  # volume: 101 tokens
        ([51, 51, 51], 3),  # no two fit together
        ([70, 70, 40, 40, 40], 4),  # L2 at t = 40: both 70s alone, the 40s need ceil(120 / 100)
        ([34, 34, 34, 34, 34], 3),  # u^(2): at most two of more than a third fit
        ([15] * 13 + [1], 3),  # count: at most six of 15 fit, though 196 tokens would fit into two
    ],
)
def test_lower_bound_sees_volume_and_samples_that_do_not_fit_together(lengths: list[int], bound: int) -> None:
    """Each case needs another one of the bounds."""
    assert lower_bound(lengths, 100) == bound


@pytest.mark.parametrize(("median", "n"), [(1000, 128), (1000, 2048), (4000, 128)])
def test_lognormal_lengths_meet_the_bound(median: int, n: int) -> None:
    """Three draws of each kind that the benchmark measures at length."""
    for seed in range(3):
        lengths = lognormal(seed, median, n)
        assert len(pack(lengths, 16384)[0]) == lower_bound(lengths, 16384)


@given(LENGTHS, RANKS)
def test_every_sample_is_placed_exactly_once_and_in_order(lengths: list[int], num_ranks: int) -> None:
    """Nothing is dropped, doubled or shuffled within a micro-batch."""
    micro_batches = filled(pack(lengths, CAPACITY, num_ranks))
    assert sorted(i for micro_batch in micro_batches for i in micro_batch) == list(range(len(lengths)))
    assert all(micro_batch == sorted(micro_batch) for micro_batch in micro_batches)


@given(LENGTHS, RANKS)
def test_no_micro_batch_exceeds_the_capacity(lengths: list[int], num_ranks: int) -> None:
    """Levelling between ranks does not overfill either."""
    for micro_batch in filled(pack(lengths, CAPACITY, num_ranks)):
        assert sum(lengths[i] for i in micro_batch) <= CAPACITY


@given(LENGTHS, RANKS)
def test_ranks_get_equally_many_micro_batches_as_one_rank_would_need_rounded_up(
    lengths: list[int], num_ranks: int
) -> None:
    """The number per rank is ceil(micro-batches / ranks)."""
    ranks = pack(lengths, CAPACITY, num_ranks)
    assert [len(rank) for rank in ranks] == [math.ceil(len(pack(lengths, CAPACITY)[0]) / num_ranks)] * num_ranks


@given(LENGTHS, RANKS)
def test_no_micro_batch_is_empty_while_samples_can_be_split(lengths: list[int], num_ranks: int) -> None:
    """Dummies exist only if there are fewer samples than micro-batches."""
    ranks = pack(lengths, CAPACITY, num_ranks)
    assert len(filled(ranks)) == min(len(lengths), num_ranks * len(ranks[0]))


@given(LENGTHS, RANKS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_change_the_number(
    lengths: list[int], num_ranks: int, rng: random.Random
) -> None:
    """Only the lengths decide how many micro-batches there are."""
    shuffled = rng.sample(lengths, len(lengths))
    assert len(pack(lengths, CAPACITY, num_ranks)[0]) == len(pack(shuffled, CAPACITY, num_ranks)[0])


@given(LENGTHS, RANKS)
def test_the_same_samples_are_always_packed_the_same_way(lengths: list[int], num_ranks: int) -> None:
    """The search draws from its own seeded generator and leaves the argument alone."""
    before = list(lengths)
    assert pack(lengths, CAPACITY, num_ranks) == pack(tuple(lengths), CAPACITY, num_ranks)
    assert lengths == before


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=6))
def test_lower_bound_never_exceeds_the_optimum(lengths: list[int]) -> None:
    """All packings of up to six samples, tried one by one."""
    assert lower_bound(lengths, 20) <= fewest(lengths, 20)
