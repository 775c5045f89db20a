"""Reference that follows the policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.learner.learner import TorchLearner
from actors.learner.moving_reference import MOVED, is_due, mix_in
from actors.models import loading
from schemas.config.objective import ReferenceSyncConfig
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.actors.learner.test_parallelism import config_of, sharded, whole
from tests.actors.learner.test_reference_models import joined, trained_on
from tests.conftest import ModelFolder

SYNC = {"reference": {"beta": 0.5, "sync": {"every_steps": 2, "alpha": 0.25}}}


def weights_of(learner: TorchLearner) -> dict[str, Tensor]:
    """Copies of the trained weights."""
    return {name: tensor.clone() for name, tensor in loading.full_tensors(learner.trained).items()}


def trained_to(learner: TorchLearner, first: int, last: int) -> TorchLearner:
    """Train steps in a row, each with samples of its own."""
    for step in range(first, last + 1):
        learner.step(step_batch(random_samples(step), step=step))
    return learner


def test_a_weight_of_the_reference_becomes_the_mixture_of_trl() -> None:
    """(1 − 0.6) · 1 + 0.6 · 2 = 1.6; with 1 it becomes the policy itself."""
    reference = torch.tensor([1.0, 3.0])
    mix_in(reference, torch.tensor([2.0, 3.0]), 0.6)
    torch.testing.assert_close(reference, torch.tensor([1.6, 3.0]))
    mix_in(reference, torch.tensor([0.1, 7.0]), 1.0)
    assert torch.equal(reference, torch.tensor([0.1, 7.0]))


def test_moves_come_after_every_nth_step() -> None:
    """After 3, 6 and 9, whenever the process started."""
    config = ReferenceSyncConfig(every_steps=3)
    assert [step for step in range(1, 11) if is_due(step, config)] == [3, 6, 9]


def test_reference_logprobs_are_those_of_the_mixed_weights(model_folder: ModelFolder) -> None:
    """In steps 1 and 2 the model of the start, then three quarters of it and a quarter of the policy of step 2."""
    learner, samples = TorchLearner(run_config(model_folder(), **SYNC)), random_samples()
    plain = models.plain(model_folder())

    def expected_T() -> Tensor:
        with torch.no_grad():
            return torch.cat([models.logprobs(plain, s.prompt, s.completion, s.temperature) for s in samples])

    first_T = expected_T()
    for step in (1, 2):
        found_T = joined(trained_on(learner, step_batch(samples, step=step)), "reference_logprobs_T")
        torch.testing.assert_close(found_T, first_T, rtol=0, atol=1e-5)
    policy = weights_of(learner)
    with torch.no_grad():
        for name, weight in loading.full_tensors(plain).items():
            weight.copy_(0.75 * weight + 0.25 * policy[name])
    mixed_T = expected_T()
    assert (mixed_T - first_T).abs().max() > 1e-3
    for step in (3, 4):
        found_T = joined(trained_on(learner, step_batch(samples, step=step)), "reference_logprobs_T")
        torch.testing.assert_close(found_T, mixed_T, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_a_continued_or_rewound_run_has_the_bits_of_one_without_a_stop(
    model_folder: ModelFolder, tmp_path: Path, saved_at: int, dtype: str
) -> None:
    """Checkpoints before, at and after a move; five steps with moves after the second and the fourth."""
    config = run_config(model_folder(), dtype=dtype, **SYNC)
    learner = trained_to(TorchLearner(config), 1, saved_at)
    learner.snapshot().write(tmp_path)
    trained_to(learner, saved_at + 1, 5)
    continued = TorchLearner(config)
    continued.restore(tmp_path)
    trained_to(continued, saved_at + 1, 5)
    found, expected = (each.snapshot().tensors[MOVED] for each in (continued, learner))
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    policy = weights_of(continued)
    assert all(torch.equal(policy[name], tensor) for name, tensor in weights_of(learner).items())


def test_small_shares_add_up_in_bfloat16(model_folder: ModelFolder) -> None:
    """A share of a thousandth after each step is below the precision of bfloat16, and moves the float32 weights."""
    sync: dict[str, Any] = {"reference": {"beta": 0.5, "sync": {"every_steps": 1, "alpha": 0.001}}}
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16", **sync))
    before = learner.snapshot().tensors[MOVED]
    trained_to(learner, 1, 2)
    policy, after = weights_of(learner), learner.snapshot().tensors[MOVED]
    name = next(iter(after))
    moved, way = after[name] - before[name], policy[name] - before[name]
    assert (way != 0).any()
    assert float((moved * way).sum()) > 0


def test_a_checkpoint_without_a_reference_leaves_that_of_the_start(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A fork may add `sync` to a run that had none; tensors of another model are refused by name."""
    trained_to(TorchLearner(run_config(model_folder(), reference={"beta": 0.5})), 1, 2).snapshot().write(tmp_path)
    assert not (tmp_path / MOVED).exists()
    forked = TorchLearner(run_config(model_folder(), **SYNC))
    before = forked.snapshot().tensors[MOVED]
    forked.restore(tmp_path)
    after = forked.snapshot().tensors[MOVED]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ranks_with_halves_of_the_policy_move_the_reference_alike(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Each rank gathers the policy, and has the reference of one process that has all."""
    sync = {"reference": {"beta": 0.5, "sync": {"every_steps": 1, "alpha": 0.25}}}
    config = config_of(model_folder, **sync)
    found, alone = sharded(tmp_path / "two", config, [1, 2, 3]), whole(config, [1, 2, 3])
    for name, tensor in alone.weights.items():
        assert (found.weights[name] - tensor).abs().max() <= 1e-5, name
    assert (found.checkpoint / MOVED).is_file()
