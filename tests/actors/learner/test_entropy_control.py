"""Adaptive entropy in the learner: which coefficient a step has, what a checkpoint holds of it, that ranks agree."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner import learner as learner_module
from actors.learner.learner import TorchLearner
from actors.learner.ranks import SINGLE_RANK
from actors.learner.snapshots import ENTROPY_CONTROL
from schemas.config import RunConfig
from tests.actors.learner.steps import batches_of, random_samples, run_config, scored_group, step_batch
from tests.actors.learner.test_ranks import on_ranks, trained
from tests.conftest import ModelFolder

ALWAYS = {"target": 100.0, "delta": 0.25}
"""The entropy is below the target in every step, so the coefficient rises by a number without rounding."""


def adaptive(model_folder: ModelFolder, start: float = 0.5, **trainer: Any) -> RunConfig:
    """Entropy control that begins at `start`; with `ALWAYS` the steps have 0, start + ¼, start + ½ and so on."""
    return run_config(model_folder(), **{"entropy_coef": start, "adaptive_entropy": ALWAYS} | trainer)


def step(learner: TorchLearner, number: int) -> dict[str, float]:
    """A step on samples that only depend on its number."""
    return learner.step(step_batch(random_samples(number), step=number, micro_batches=2))


def weights(learner: TorchLearner) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in learner.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"top_entropy_quantile": 0.5}], ids=["all tokens", "half of them"])
def test_a_step_has_the_coefficient_that_the_entropies_before_it_left(
    model_folder: ModelFolder, keys: dict[str, Any]
) -> None:
    """A target in the middle of six entropies, followed by hand: above it nothing acts, and the coefficient falls."""
    entropies = [step(TorchLearner(adaptive(model_folder, **keys)), n)["entropy_regularised"] for n in range(1, 7)]
    target = sorted(entropies)[3] - 1e-3
    config = adaptive(model_folder, adaptive_entropy={"target": target, "delta": 0.25}, learning_rate=1e-9, **keys)
    learner, coefficient, acts, expected, found = TorchLearner(config), 0.5, False, [], []
    for number in range(1, 7):
        expected.append(coefficient if acts else 0.0)
        values = step(learner, number)
        found.append(values["entropy_coef"])
        acts = values["entropy_regularised"] <= target
        coefficient = max(coefficient + (0.25 if acts else -0.25), 0.0)
        assert values["entropy_regularised"] > values["entropy"] or not keys
    assert found == expected
    assert 0.0 in found[1:]
    assert max(found) > 0


@pytest.mark.slow
def test_an_adapted_coefficient_acts_as_one_that_is_configured(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Steps 1, 2, 3 have 0, 0.75 and 1: the bits of fixed ones, and the entropy has a gradient where they are not 0."""
    adapting = TorchLearner(adaptive(model_folder))
    for number, coefficient in enumerate((0.0, 0.75, 1.0), start=1):
        fixed = TorchLearner(run_config(model_folder(), entropy_coef=coefficient))
        if number > 1:
            fixed.restore(tmp_path / str(number))
        values, expected = step(adapting, number), step(fixed, number)
        assert values["entropy_coef"] == expected["entropy_coef"] == coefficient
        assert values["loss"] == expected["loss"]
        assert same(weights(adapting), weights(fixed))
        (tmp_path / str(number + 1)).mkdir()
        adapting.snapshot().write(tmp_path / str(number + 1))
    without = TorchLearner(run_config(model_folder()))
    without.restore(tmp_path / "3")
    step(without, 3)
    assert not same(weights(adapting), weights(without))


def test_the_entropy_has_a_gradient_exactly_where_it_is_in_the_loss(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches a step; not in the first step, whose coefficient is 0."""
    seen, whole = [], learner_module.compute_loss

    def spy(inputs: Any, objective: Any, *_: Any) -> Any:
        seen.append((objective.entropy_coef, inputs.entropy_T.requires_grad))
        return whole(inputs, objective)

    monkeypatch.setattr(learner_module, "compute_loss", spy)
    learner = TorchLearner(adaptive(model_folder))
    for number in (1, 2):
        step(learner, number)
    assert seen == [(0.0, False)] * 2 + [(0.75, True)] * 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_coefficient(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The third step from it has the same bits; without the file it begins anew, and the bits are others."""
    learner = TorchLearner(adaptive(model_folder))
    assert ENTROPY_CONTROL not in learner.snapshot().texts
    entropy = [step(learner, number)["entropy_regularised"] for number in (1, 2)][-1]
    learner.snapshot().write(tmp_path)
    assert json.loads((tmp_path / ENTROPY_CONTROL).read_text()) == {"coef": 1.0, "entropy": entropy}
    restored, from_an_old_one = TorchLearner(adaptive(model_folder)), TorchLearner(adaptive(model_folder))
    restored.restore(tmp_path)
    (tmp_path / ENTROPY_CONTROL).unlink()
    step(from_an_old_one, 1)  # whatever the learner has seen before is not the checkpoint's
    from_an_old_one.restore(tmp_path)
    values, again, anew = (step(each, 3) for each in (learner, restored, from_an_old_one))
    assert (values["entropy_coef"], again["entropy_coef"], anew["entropy_coef"]) == (1.0, 1.0, 0.0)
    assert values["loss"] == again["loss"] != anew["loss"]
    assert same(weights(learner), weights(restored))
    assert not same(weights(learner), weights(from_an_old_one))
    assert step(from_an_old_one, 4)["entropy_coef"] == 0.75


@pytest.mark.slow
def test_ranks_go_by_the_entropy_of_all_and_a_replay_too(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The target lies between the entropies of the two ranks, on either side of which each alone would go its way."""
    dealt = batches_of([scored_group(ordinal) for ordinal in range(4)], 2)
    alone = [TorchLearner(adaptive(model_folder)).step(each)["entropy_regularised"] for each in dealt]
    whole = TorchLearner(adaptive(model_folder)).step(dealt[1], SINGLE_RANK, dealt[:1])["entropy_regularised"]
    for target in (sum((whole, min(alone))) / 2, sum((whole, max(alone))) / 2):
        config = adaptive(model_folder, adaptive_entropy={"target": target})
        *learners, replaying = [TorchLearner(config) for _ in range(3)]

        def two_steps(ranks: Any, learners: list[TorchLearner] = learners) -> Any:
            learner, batch = learners[ranks.rank], dealt[ranks.rank]
            learner.step(batch, ranks)
            return trained(learner, batch.model_copy(update={"step": 2}), ranks)

        (folder := tmp_path / f"{target}").mkdir()
        one, other = on_ranks(folder, 2, two_steps)
        replaying.step(dealt[1], SINGLE_RANK, dealt[:1])
        late = [batch.model_copy(update={"step": 2}) for batch in dealt]
        replayed = trained(replaying, late[1], SINGLE_RANK, late[:1])
        assert one.values == other.values == replayed.values
        assert one.values["entropy_coef"] == (0.505 if whole <= target else 0.0)
        for name, parameter in one.weights.items():
            assert torch.equal(parameter, other.weights[name])
            assert torch.equal(parameter, replayed.weights[name])


@pytest.mark.parametrize("fault", ["nothing in the loss", "not finite"])
def test_a_step_that_tells_no_entropy_leaves_the_coefficient(model_folder: ModelFolder, fault: str) -> None:
    """No token in the loss mask, or refused since it is not finite: the third step has what the second would have."""
    learner, batch = TorchLearner(adaptive(model_folder)), step_batch(random_samples(2), step=2)
    step(learner, 1)
    if fault == "not finite":
        broken = batch.model_copy(update={"advantages": batch.advantages * float("nan")})
        with pytest.raises(FloatingPointError, match="step 2: loss nan"):
            learner.step(broken)
    else:
        assert learner.step(batch.model_copy(update={"loss_mask": batch.loss_mask * 0}))["tokens"] == 0
    assert step(learner, 3)["entropy_coef"] == 0.75


def test_a_run_without_adaptive_entropy_keeps_its_coefficient(model_folder: ModelFolder) -> None:
    """Its metric is what is configured, and there is nothing to keep in a checkpoint."""
    learner = TorchLearner(run_config(model_folder(), entropy_coef=0.25))
    assert [step(learner, number)["entropy_coef"] for number in (1, 2)] == [0.25, 0.25]
    assert ENTROPY_CONTROL not in learner.snapshot().texts
