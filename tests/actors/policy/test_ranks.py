"""Sums and exchanges over the ranks of a gang: the same bits everywhere, no waiting for the dead."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.policy.learner import TorchLearner
from actors.policy.ranks import ALONE, BUCKET_ELEMENTS, GlooRanks, Part, RanksBrokenError, Together, _buckets
from tests.actors.policy.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder


def on_ranks(folder: Path, size: int, work: Callable[[GlooRanks], Any]) -> list[Any]:
    """What `work` returns on each of the ranks, which are threads here."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = work(GlooRanks(rank, size, folder / "ranks" / "1", "127.0.0.1", lambda: None, 10.0))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def test_all_ranks_get_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Three addends whose float32 sum depends on the order: (1e8 + 1) - 1e8 is 0, not 1."""

    def work(ranks: GlooRanks) -> list[float]:
        tensors = [torch.tensor([[1e8, 1.0, -1e8][ranks.rank]]), torch.full((2, 2), float(ranks.rank))]
        ranks.sum(tensors)
        return [float(tensors[0]), float(tensors[1][1, 1])]

    assert on_ranks(tmp_path, 3, work) == [[0.0, 3.0]] * 3


def test_messages_of_all_ranks_arrive_in_their_order(tmp_path: Path) -> None:
    """Of different lengths, an empty one among them."""
    messages = on_ranks(tmp_path, 3, lambda ranks: ranks.exchange(b"ab" * ranks.rank))
    assert messages == [[b"", b"ab", b"abab"]] * 3


def test_a_lost_rank_breaks_the_exchange(tmp_path: Path) -> None:
    """Rank 1 leaves after the meeting; rank 0 is told so and does not wait."""

    def work(ranks: GlooRanks) -> str:
        ranks.exchange(b"both are there")
        if ranks.rank == 1:
            ranks._group = None
            return "left"
        with pytest.raises(RanksBrokenError, match="rank 0 of 2 lost another one"):
            ranks.exchange(b"anybody there?")
        return "told"

    assert on_ranks(tmp_path, 2, work) == ["told", "left"]


def test_ranks_that_do_not_meet_say_which_key_bounds_the_wait(tmp_path: Path) -> None:
    """One of two is there."""
    with pytest.raises(RanksBrokenError, match=r"not all were there within trainer\.gang_timeout 0\.2 s"):
        GlooRanks(0, 2, tmp_path / "1", "127.0.0.1", lambda: None, 0.2)


def test_waiting_for_the_others_ends_when_the_gang_shall_not_wait(tmp_path: Path) -> None:
    """`check` raises: the meeting is given up at once."""

    class ToldToExitError(Exception):
        pass

    def check() -> None:
        raise ToldToExitError

    with pytest.raises(ToldToExitError):
        GlooRanks(0, 2, tmp_path / "1", "127.0.0.1", check, 60.0)


def test_buckets_are_bounded_and_of_one_type() -> None:
    """Small neighbours share one, a type of its own and a large tensor do not."""
    small, other = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    large = torch.empty(BUCKET_ELEMENTS + 1, device="meta")
    assert [len(bucket) for bucket in _buckets([small, small, other, small, large, small])] == [2, 1, 1, 1, 1]


def test_one_process_replays_what_two_ranks_summed() -> None:
    """`Together` gives the bits that the ranks had: first rank 0's part, then its own."""
    first, second = torch.tensor([0.1, 1e8]), torch.tensor([0.2, -1.0])
    expected = first + second
    ranks = Together([Part([first], b"0")])
    ranks.sum([second])
    assert torch.equal(second, expected)
    assert ranks.exchange(b"1") == [b"0", b"1"]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_two_ranks_make_the_step_of_one(model_folder: ModelFolder, tmp_path: Path, lora: Any) -> None:
    """The samples of a step dealt to two ranks: weights within 1e-5 of one rank's, and the same on both ranks."""
    samples = random_samples()
    config = run_config(model_folder(), lora=lora)
    alone = TorchLearner(config)
    whole = step_batch(samples)
    alone.step(whole, ALONE)
    learners = [TorchLearner(config) for _ in range(2)]

    def work(ranks: GlooRanks) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        mine = step_batch(samples[ranks.rank :: 2]).model_copy(
            update={"loss_tokens": whole.loss_tokens, "num_completions": whole.num_completions, "rank": ranks.rank}
        )
        learner = learners[ranks.rank]
        return learner.step(mine, ranks), dict(learner.model.named_parameters())

    (values, weights), (other_values, other_weights) = on_ranks(tmp_path, 2, work)
    assert {n: v for n, v in values.items() if "seconds" not in n} == {
        n: v for n, v in other_values.items() if "seconds" not in n
    }
    for name, parameter in alone.model.named_parameters():
        assert torch.equal(weights[name], other_weights[name])
        assert torch.allclose(weights[name], parameter, atol=1e-5)
    assert values["tokens"] == whole.loss_tokens
