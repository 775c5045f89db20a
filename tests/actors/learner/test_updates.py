"""Several updates per step: the same as updates driven by hand, with old logprobs from before the first of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from actors.learner import learner as learner_module
from actors.learner.learner import TorchLearner
from actors.learner.optimizer import PolicyOptimizer, make_optimizer
from schemas.config import RunConfig
from schemas.config.advantages import GaeAdvantageConfig
from tests import models
from tests.actors.learner.steps import Sampled, batches_of, random_samples, run_config, scored_group, step_batch
from tests.actors.learner.test_learner import faulty_losses
from tests.conftest import ModelFolder

CLIPPED = {"type": "dapo"}
LORA = {"rank": 4, "alpha": 8.0}


def several(model_folder: ModelFolder, **trainer: Any) -> RunConfig:
    """Two iterations with a loss that reads old logprobs."""
    return run_config(model_folder(), **{"num_iterations": 2, "loss": CLIPPED, "max_grad_norm": 0.5} | trainer)


def weights(model: Any) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def seen_inputs(monkeypatch: pytest.MonkeyPatch) -> list[LossInputs]:
    """All that the loss is given from now on, without gradients."""
    seen = []

    def spy(inputs: LossInputs, objective: Any, *_: Any) -> LossOutput:
        seen.append(replace(inputs, logprobs_T=inputs.logprobs_T.detach()))
        return compute_loss(inputs, objective)

    monkeypatch.setattr(learner_module, "compute_loss", spy)
    return seen


def clipped_loss(model: Any, samples: list[Sampled], old: list[Tensor]) -> Tensor:
    """The mean over tokens of PPO's objective with ε = 0.2, sample by sample on a plain model."""
    total: Any = 0.0
    for sample, old_T in zip(samples, old, strict=True):
        ratio_T = (models.logprobs(model, sample.prompt, sample.completion) - old_T).exp()
        a = sample.advantage
        total = total - torch.minimum(ratio_T * a, ratio_T.clamp(0.8, 1.2) * a).sum()
    return total / sum(len(sample.completion) for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_two_iterations_over_two_minibatches_are_four_updates_by_hand(
    model_folder: ModelFolder, micro_batches: int
) -> None:
    """Old logprobs, loss, clipping of the gradient and optimizer on a plain model, halves in turn: within 1e-6."""
    config = several(model_folder, learning_rate=1e-3, optimizer={"eps": 1e-3})
    samples, learner = random_samples(), TorchLearner(config)
    found = learner.step(step_batch(samples, micro_batches=micro_batches, minibatches=2))

    plain = models.plain(model_folder())
    optimizer = make_optimizer(plain, config.trainer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = 1e-3
    with torch.no_grad():
        old = [models.logprobs(plain, s.prompt, s.completion) for s in samples]
    losses, norms = [], []
    for part in (slice(0, 4), slice(4, 8)) * 2:
        loss = clipped_loss(plain, samples[part], old[part])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    for (name, ours), theirs in zip(learner.model.named_parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6, name
    assert min(norms) > 0.5
    assert found["updates"] == 4
    assert found["loss"] == pytest.approx(sum(losses) / 4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert found["tokens"] == sum(len(s.completion) for s in samples)


def test_old_logprobs_are_of_before_the_first_update(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update sees its own bits as old ones; the last still those, though the policy has moved."""
    learner, seen = TorchLearner(several(model_folder)), seen_inputs(monkeypatch)
    learner.step(step_batch(random_samples(), micro_batches=4, minibatches=2))
    assert len(seen) == 8
    assert all(inputs.old_logprobs_T is not None for inputs in seen)
    for first, last in zip(seen[:4], seen[4:], strict=True):
        assert torch.equal(first.old_logprobs_T, last.old_logprobs_T)
        assert (last.logprobs_T - last.old_logprobs_T).abs().max() > 1e-3
    assert all(torch.equal(inputs.old_logprobs_T, inputs.logprobs_T) for inputs in seen[:2])
    assert (seen[2].logprobs_T - seen[2].old_logprobs_T).abs().max() > 1e-3  # the second minibatch, after one update


def test_the_only_update_of_a_step_computes_no_old_logprobs(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass is spent on them."""
    learner, seen = TorchLearner(run_config(model_folder(), loss=CLIPPED)), seen_inputs(monkeypatch)
    learner.step(step_batch(random_samples()))
    assert [inputs.old_logprobs_T for inputs in seen] == [None]


def test_losses_know_their_minibatch_and_the_versions_of_tokens(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups of 22 tokens in two minibatches: 44 tokens, 8 completions each; sampled by 0, trained in step 1."""
    learner, seen = TorchLearner(run_config(model_folder(), num_minibatches=2)), seen_inputs(monkeypatch)
    (batch,) = batches_of([scored_group(ordinal) for ordinal in range(4)], 1, 2)
    learner.step(batch)
    assert {(i.loss_tokens, i.step_completions, i.version, i.max_completion_length) for i in seen} == {(44, 8, 0, 12)}
    assert [i.num_micro_batches for i in seen] == [len(seen) // 2] * len(seen)
    assert sum(i.versions_T.numel() for i in seen if i.versions_T is not None) == 88


@pytest.mark.parametrize(("kind", "expected"), [("minibatch", [44, 22]), ("step_mean", [33, 33])])
def test_a_minibatch_is_divided_by_its_own_tokens_or_by_their_mean_over_the_step(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, kind: str, expected: list[int]
) -> None:
    """Minibatches of 44 and 22 tokens: TRL divides both by the 66 of the generation ÷ 2 updates."""
    loss = CLIPPED | {"compat": {"loss_normalizer": kind}}
    learner = TorchLearner(run_config(model_folder(), num_minibatches=2, loss=loss))
    seen = seen_inputs(monkeypatch)
    (batch,) = batches_of([scored_group(0), scored_group(1), scored_group(2, (11,)), scored_group(3, (11,))], 1, 2)
    learner.step(batch)
    assert list(dict.fromkeys(i.loss_tokens for i in seen)) == list(dict.fromkeys(expected))


def test_a_kl_in_the_reward_is_discounted_like_the_reward(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """γλ = .9 · .5 of advantage gae; other advantages know no discount."""
    config, seen = run_config(model_folder()), seen_inputs(monkeypatch)
    reward = config.reward.model_copy(update={"advantage": GaeAdvantageConfig(discount=0.9, gae_lambda=0.5)})
    for each in (config, config.model_copy(update={"reward": reward})):
        TorchLearner(each).step(step_batch(random_samples()))
    assert [inputs.reward_discount for inputs in seen] == [1.0, 0.45]


def test_a_step_without_any_sample_is_a_step(model_folder: ModelFolder) -> None:
    """All advantages were 0 and have been filtered: no gradient, no metric, and nothing fails."""
    group = scored_group(0)
    group = group.model_copy(update={"advantages_G": np.zeros_like(group.advantages_G)})
    (batch,) = batches_of([group], 1, 1, filter_zero_advantages=True)
    assert batch.token_ids.size == 0
    measured = TorchLearner(run_config(model_folder(), num_iterations=2)).step(batch)
    assert (measured["loss"], measured["grad_norm"], measured["tokens"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [{"reference": {"beta": 0.1}}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 1.0, "loss": CLIPPED}],
    ids=["reference", "entropy", "clipped"],
)
def test_packed_is_unpacked_in_every_update(model_folder: ModelFolder, trainer: dict[str, Any]) -> None:
    """One row per minibatch or one per sample, 2 × 2 updates: the same metrics."""
    config = several(model_folder, **{"learning_rate": 1e-3, "optimizer": {"eps": 1e-3}} | trainer)
    packed, single = (
        TorchLearner(config).step(step_batch(random_samples(), micro_batches=m, minibatches=2)) for m in (2, 8)
    )
    assert packed.keys() == single.keys()
    for name in packed.keys() - {n for n in packed if "seconds" in n}:
        assert packed[name] == pytest.approx(single[name], rel=1e-3, abs=1e-6), name


def test_a_later_update_that_is_not_finite_says_which_it_was(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of four: two have been applied, this one not, and it was tried twice."""
    learner, after = TorchLearner(several(model_folder, num_minibatches=2)), list[dict[str, Tensor]]()

    def factor(number: int) -> float:
        after.append(weights(learner.model))
        return float("nan") if number > 2 else 1.0

    faulty_losses(monkeypatch, factor)
    with pytest.raises(FloatingPointError, match=r"step 1 \(update 3 of 4\): loss nan, .*, twice"):
        learner.step(step_batch(random_samples(), micro_batches=2, minibatches=2))
    assert len(after) == 4
    now = weights(learner.model)
    assert all(torch.equal(now[name], after[2][name]) for name in now)
    assert any(not torch.equal(now[name], after[0][name]) for name in now)


def test_a_fault_in_a_later_update_that_passes_leaves_no_trace(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have the bits of a step without it."""
    learner, untouched = (TorchLearner(several(model_folder)) for _ in range(2))
    untouched.step(step_batch(random_samples()))
    calls = faulty_losses(monkeypatch, lambda number: float("inf") if number == 2 else 1.0)
    learner.step(step_batch(random_samples()))
    assert len(calls) == 3
    ours, theirs = weights(learner.model), weights(untouched.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_each_update_of_a_step_has_random_numbers_of_its_own(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout in both iterations, at a learning rate next to 0: logprobs differ, and the same step has them again."""
    config = run_config(model_folder(), lora=LORA | {"dropout": 0.3}, num_iterations=2, warmup_steps=10)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"learning_rate": 1e-30})})
    learner = TorchLearner(config)
    for name, parameter in learner.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)  # else dropout in front of the adapter has nothing to change
    before, seen = weights(learner.model), seen_inputs(monkeypatch)
    for _ in range(2):
        learner.step(step_batch(random_samples()))
    now = weights(learner.model)
    assert all(torch.equal(now[name], before[name]) for name in now)
    first, second, *again = (inputs.logprobs_T for inputs in seen)
    assert not torch.equal(first, second)
    assert [torch.equal(*pair) for pair in zip((first, second), again, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [({}, [0.005, 0.005, 0.01, 0.01]), ({"unit": "update"}, [0.005, 0.01, 0.01, 0.01]),
     ({"unit": "update", "first": 0}, [0.0, 0.005, 0.01, 0.01])],
)  # fmt: skip
def test_each_update_of_a_step_has_its_own_rate_where_updates_are_counted(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any], expected: list[float]
) -> None:
    """A warm-up of two steps, or of two updates, over two steps of two updates."""
    seen: list[float] = []
    step = PolicyOptimizer.step

    def noted(self: PolicyOptimizer) -> None:
        seen.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(PolicyOptimizer, "step", noted)
    learner = TorchLearner(run_config(model_folder(), num_minibatches=2, lr_schedule=schedule, warmup_steps=2))
    groups = [scored_group(1), scored_group(2)]
    told = [learner.step(batches_of(groups, 1, 2, step=number)[0])["learning_rate"] for number in (1, 2)]
    assert seen == pytest.approx(expected)
    assert told == seen[1::2]
