"""Choice among many servers by old loads."""

from collections import Counter

from actors.algorithms.balancing import less_loaded


def test_of_two_the_less_loaded_is_chosen() -> None:
    """Whatever the seed; one alone is chosen."""
    loads = {"a": 3, "b": 2}
    assert {less_loaded(list(loads), loads.__getitem__, seed) for seed in range(50)} == {"b"}
    assert less_loaded(["a"], loads.__getitem__, 0) == "a"


def test_many_clients_with_the_same_old_loads_spread_over_all_servers() -> None:
    """Before, all would have gone to the least loaded; the most loaded gets nothing."""
    loads = dict.fromkeys(range(64), 5) | {7: 0, 9: 50}
    counts = Counter(less_loaded(range(64), loads.__getitem__, seed) for seed in range(6400))
    assert len(counts) == 63
    assert max(counts.values()) < 400
    assert counts[9] == 0
    assert counts[7] == max(counts.values())


def test_the_choice_can_be_repeated() -> None:
    """It follows from the seed."""
    first = [less_loaded(range(9), lambda one: 0, seed) for seed in range(30)]
    assert first == [less_loaded(range(9), lambda one: 0, seed) for seed in range(30)]
    assert len(set(first)) == 9
