"""Sums and exchanges over the ranks of a gang: the same bits everywhere, no waiting for the dead."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from actors.learner import process_groups
from actors.learner import ranks as ranks_module
from actors.learner.learner import TorchLearner
from actors.learner.ranks import BUCKET_ELEMENTS, SINGLE_RANK, GlooRanks, Ranks, RanksBrokenError, _buckets
from schemas.config.advantages import NormConfig, ReinforcePPAdvantageConfig
from schemas.messages import ScoredGroup, StepBatch
from tests.actors.learner.steps import batches_of, branched_group, run_config, scored_group
from tests.conftest import ModelFolder

CPU = torch.device("cpu")


def on_ranks(folder: Path, size: int, work: Callable[[GlooRanks], Any]) -> list[Any]:
    """What `work` returns on each of the ranks, which are threads here."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = work(GlooRanks(rank, size, folder / "ranks" / "1", "127.0.0.1", lambda: None, 60.0))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_all_ranks_get_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Three addends whose float32 sum depends on the order: (1e8 + 1) - 1e8 is 0, not 1."""

    def work(ranks: GlooRanks) -> list[float]:
        tensors = [torch.tensor([[1e8, 1.0, -1e8][ranks.rank]]), torch.full((2, 2), float(ranks.rank))]
        ranks.sum(tensors)
        return [float(tensors[0]), float(tensors[1][1, 1])]

    assert on_ranks(tmp_path, 3, work) == [[0.0, 3.0]] * 3


class Recorded:
    """A group that notes how many elements it is given to gather."""

    def __init__(self, group: Any) -> None:
        self._group, self.gathered = group, list[int]()

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> Any:
        """Pass on."""
        self.gathered.append(tensors[0].numel())
        return self._group.allgather(parts, tensors)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Recorded]]:
    """Groups of gloo by rank, in the order of their making."""
    made: dict[int, list[Recorded]] = {}
    gloo = process_groups.gloo

    def recorded(store: Any, rank: int, *arguments: Any) -> Recorded:
        group = Recorded(gloo(store, rank, *arguments))
        made.setdefault(rank, []).append(group)
        return group

    monkeypatch.setattr(process_groups, "gloo", recorded)
    return made


def addends(rank: int) -> list[Tensor]:
    """In buckets of 10 elements these are three: of 3 + 5, of 20, of 9 + 1. Each sum depends on the order."""
    rng = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=rng) * 10.0 ** (4 * rank) for shape in ((3,), (5, 1), (4, 5), (9,), ())]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_on_a_device_have_the_bits_of_sums_through_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[int, list[Recorded]], size: int
) -> None:
    """A second group of gloo in the place of NCCL's, in uneven buckets; exchanges stay with the first."""
    monkeypatch.setattr(ranks_module, "BUCKET_ELEMENTS", 10)

    def work(ranks: GlooRanks) -> list[list[Tensor]]:
        through_cpus, on_device = addends(ranks.rank), addends(ranks.rank)
        ranks.sum(through_cpus)
        ranks.sum_on(CPU, f"device {ranks.rank}", backend="gloo")
        ranks.sum(on_device)
        ranks.exchange(b"over")
        return [through_cpus, on_device]

    expected = addends(0)
    for rank in range(1, size):
        for total, part in zip(expected, addends(rank), strict=True):
            total += part
    for through_cpus, on_device in on_ranks(tmp_path, size, work):
        for found in (through_cpus, on_device):
            assert all(torch.equal(mine, total) for mine, total in zip(found, expected, strict=True))
    for first, second in groups.values():
        assert first.gathered[:3] == second.gathered == [8, 20, 10]
        assert first.gathered[3:] == [1, 8, 1, 4, 1, 4], "lengths and texts of three exchanges"


@pytest.mark.parametrize(("names", "why"), [(["one", "one"], "shared"), (["one", ""], "not on each rank")])
def test_ranks_without_a_device_each_sum_through_the_cpus(
    tmp_path: Path, groups: dict[int, list[Recorded]], names: list[str], why: str
) -> None:
    """They share one, or one of them has none: all decide alike, and no second group is made."""

    def work(ranks: GlooRanks) -> float:
        ranks.sum_on(CPU, names[ranks.rank], backend="gloo")
        tensor = torch.tensor(ranks.rank + 1.0)
        ranks.sum([tensor])
        return float(tensor)

    assert on_ranks(tmp_path, 2, work) == [3.0, 3.0], why
    assert [len(made) for made in groups.values()] == [1, 1]


def test_ranks_of_a_row_whose_gpus_do_not_reach_each_other_exchange_through_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL fails on one of four ranks: neither of the two rows uses it."""

    def nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
        if rank == 1:
            raise RuntimeError("no route")
        return Recorded(None)

    def work(ranks: GlooRanks) -> list[int]:
        row = ranks.row_group(CPU, 2)
        assert (row.place, row.size) == (ranks.rank % 2, 2)
        sent = torch.tensor([10 * ranks.rank, 10 * ranks.rank + 1])[:, None]
        return [int(value) for value in row.all_to_all(sent).flatten()]

    monkeypatch.setattr(process_groups, "nccl", nccl)
    monkeypatch.setattr("actors.learner.ranks.gpu_name", lambda _: f"device of {threading.current_thread().name}")
    with capture_logs() as logs:
        assert on_ranks(tmp_path, 4, work) == [[0, 10], [1, 11], [20, 30], [21, 31]]
    assert [line["event"] for line in logs].count("rows are exchanged through the CPUs") == 4


def test_a_gang_whose_gpus_do_not_reach_each_other_sums_through_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL fails on one of two ranks: the other one goes back with it, and both say so."""

    def nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
        if rank == 1:
            raise RuntimeError("no route")
        return Recorded(None)

    def work(ranks: GlooRanks) -> float:
        ranks.sum_on(CPU, f"device {ranks.rank}")
        tensor = torch.tensor(ranks.rank + 1.0)
        ranks.sum([tensor])
        return float(tensor)

    monkeypatch.setattr(process_groups, "nccl", nccl)
    with capture_logs() as logs:
        assert on_ranks(tmp_path, 2, work) == [3.0, 3.0]
    told = sorted(line["why"] for line in logs if line["event"] == "gradients are summed through the CPUs")
    assert told[0] == "another rank could not join"
    assert "no route" in told[1]


def test_data_parallel_ranks_on_cpus_join_without_a_second_group(
    model_folder: ModelFolder, tmp_path: Path, groups: dict[int, list[Recorded]]
) -> None:
    """A CPU has no name among devices."""
    learners = [TorchLearner(run_config(model_folder())) for _ in range(2)]
    on_ranks(tmp_path, 2, lambda ranks: learners[ranks.rank].join(ranks, lambda: None))
    assert [len(made) for made in groups.values()] == [1, 1]


def test_messages_of_all_ranks_arrive_in_their_order(tmp_path: Path) -> None:
    """Of different lengths, an empty one among them."""
    messages = on_ranks(tmp_path, 3, lambda ranks: ranks.exchange(b"ab" * ranks.rank))
    assert messages == [[b"", b"ab", b"abab"]] * 3


def test_a_lost_rank_breaks_the_exchange(tmp_path: Path) -> None:
    """Rank 1 leaves after the meeting; rank 0 is told so and does not wait."""

    def work(ranks: GlooRanks) -> str:
        ranks.exchange(b"both are there")
        if ranks.rank == 1:
            return "left"
        with pytest.raises(RanksBrokenError, match="rank 0 of 2 lost another rank"):
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


@dataclass
class Trained:
    """What a step has left."""

    values: dict[str, float]
    weights: dict[str, torch.Tensor]


def trained(
    learner: TorchLearner, batch: StepBatch, ranks: Ranks = SINGLE_RANK, before: Sequence[StepBatch] = ()
) -> Trained:
    """A learner after one step; of what it measured, all but times."""
    values = learner.step(batch, ranks, before)
    return Trained({n: v for n, v in values.items() if "seconds" not in n}, dict(learner.model.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "place", "norm"),
    [
        (2, "group_reward", None),
        (4, "group_reward", None),
        (2, "reward", NormConfig()),
        (4, "reward", NormConfig(mean_level="group")),
    ],
)
def test_a_kl_in_the_rewards_makes_the_same_advantages_on_any_number_of_ranks(
    model_folder: ModelFolder, tmp_path: Path, num_ranks: int, place: str, norm: NormConfig | None
) -> None:
    """A group's completions lie on several ranks: they tell each other, and a replay has the bits of the gang."""
    reference = {"beta": 0.5, "estimator": "k1", "place": place, "old_logprobs": "inference"}
    config = run_config(model_folder(), reference=reference, learning_rate=1e-3)
    reward = config.reward.model_copy(update={"advantage": ReinforcePPAdvantageConfig(), "adv_norm": norm})
    config = config.model_copy(update={"reward": reward})
    groups = [scored_group(ordinal) for ordinal in range(4)]
    dealt = batches_of(groups, num_ranks)
    assert len({int(ordinal) for batch in dealt[:1] for ordinal in batch.sample_ordinals}) > 1
    *learners, one, another = [TorchLearner(config) for _ in range(num_ranks + 2)]
    alone = trained(one, batches_of(groups, 1)[0])
    gang = on_ranks(tmp_path, num_ranks, lambda ranks: trained(learners[ranks.rank], dealt[ranks.rank], ranks))
    replayed = trained(another, dealt[-1], SINGLE_RANK, dealt[:-1])
    assert all(mine.values == replayed.values for mine in gang)
    assert gang[0].values["advantage_std"] == pytest.approx(alone.values["advantage_std"], rel=1e-4)
    for name, parameter in alone.weights.items():
        assert torch.equal(gang[0].weights[name], replayed.weights[name])
        assert torch.allclose(gang[0].weights[name], parameter, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    ("lora", "group"),
    [(None, scored_group), ({"rank": 4}, scored_group), (None, branched_group)],
    ids=["full", "lora", "branches"],
)
def test_two_ranks_make_the_step_of_one_and_one_process_replays_them(
    model_folder: ModelFolder, tmp_path: Path, lora: Any, group: Callable[[int], ScoredGroup], minibatches: int
) -> None:
    """Two ranks have the same bits, within 1e-5 of one rank's; a process that stands for both has theirs too."""
    config = run_config(model_folder(), lora=lora, num_iterations=minibatches, learning_rate=1e-3)
    groups = [group(ordinal) for ordinal in range(4)]
    (whole,) = batches_of(groups, 1, minibatches)
    dealt = batches_of(groups, 2, minibatches)
    *learners, one, another = [TorchLearner(config) for _ in range(4)]
    alone = trained(one, whole)
    mine, other = on_ranks(tmp_path, 2, lambda ranks: trained(learners[ranks.rank], dealt[ranks.rank], ranks))
    replayed = trained(another, dealt[1], SINGLE_RANK, dealt[:1])
    assert mine.values == other.values == replayed.values
    assert mine.values["tokens"] == whole.loss_tokens.sum()
    assert mine.values["updates"] == minibatches**2
    for name, parameter in alone.weights.items():
        assert torch.equal(mine.weights[name], other.weights[name])
        assert torch.equal(mine.weights[name], replayed.weights[name])
        assert torch.allclose(mine.weights[name], parameter, atol=1e-5)
    for name in ("loss", "entropy", "mismatch_kl"):
        assert mine.values[name] == pytest.approx(alone.values[name], rel=1e-4), name
