"""Models that a run does not train: the reference that the policy is held to, the teacher that it is pulled towards."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.algorithms.losses import LossInputs, LossOutput, compute_loss
from actors.algorithms.losses.modifiers import kl_in_reward
from actors.learner import learner as learner_module
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch
from actors.learner.parallelism import DataParallel
from actors.learner.reference_models import FixedLogprobs, ReferenceModels, check_vocabulary
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig
from schemas.config.advantages import MeanAdvantageConfig, NormConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch
from tests import models
from tests.actors.learner.steps import Sampled, batches_of, random_samples, run_config, scored_group, step_batch
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}
REFERENCE = {"reference": {"beta": 0.5}}


def plain_logprobs(folder: Path, samples: list[Sampled]) -> Tensor:
    """(T,) of all completions, one after the other, by transformers alone."""
    model = models.plain(folder)
    with torch.no_grad():
        return torch.cat([models.logprobs(model, s.prompt, s.completion, s.temperature) for s in samples])


def trained_on(learner: TorchLearner, batch: StepBatch) -> list[LossInputs]:
    """Train a step; what the loss is given in its first update, by micro-batch, without gradients."""
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs, *others: Any) -> LossOutput:
        seen.append(replace(inputs, logprobs_T=inputs.logprobs_T.detach()))
        return compute_loss(inputs, *others)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learner_module, "compute_loss", spy)
        learner.step(batch)
    return seen[: batch.num_micro_batches]


def joined(found: list[LossInputs], name: str) -> Tensor:
    """(T,) of all micro-batches."""
    return torch.cat([getattr(each, name) for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_reference_stays_the_model_of_the_start(
    model_folder: ModelFolder, lora: Any, micro_batches: int, tmp_path: Path
) -> None:
    """After a step, and after going on from a checkpoint: the untrained model's logprobs, which the policy has left."""
    samples = random_samples()
    config = run_config(model_folder(), lora=lora, learning_rate=1e-2, num_iterations=2, **REFERENCE)
    base_T = plain_logprobs(model_folder(), samples)
    learner = TorchLearner(config)
    for step in (1, 2):  # the second half of the adapter moves once the first has
        learner.step(step_batch(random_samples(step), step=step))
    learner.snapshot().write(tmp_path)
    restored = TorchLearner(config)
    restored.restore(tmp_path)
    for each in (learner, restored):
        found = trained_on(each, step_batch(samples, step=3, micro_batches=micro_batches))
        torch.testing.assert_close(joined(found, "reference_logprobs_T"), base_T, rtol=0, atol=1e-5)
        assert (joined(found, "old_logprobs_T") - base_T).abs().max() > 1e-2
        assert each.model.training


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_reference_kl_of_the_first_step_is_zero_and_has_no_gradient(model_folder: ModelFolder, lora: Any) -> None:
    """Advantages are 0, so nothing moves; once the policy has left the reference, there is a way back."""
    config = run_config(model_folder(), lora=lora, learning_rate=1e-2, **REFERENCE)
    learner, indifferent, praised = TorchLearner(config), random_samples(), random_samples(1)
    for sample in indifferent:
        sample.advantage = 0.0
    first = learner.step(step_batch(indifferent))
    assert first["reference_kl"] == 0.0
    assert first["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    learner.step(step_batch(praised, step=2))
    later = learner.step(step_batch(indifferent, step=3))
    assert later["reference_kl"] > 1e-3
    assert later["grad_norm"] > 1e-3


@pytest.mark.slow
def test_the_adapter_is_trained_on_after_the_reference_was_asked(model_folder: ModelFolder) -> None:
    """With a KL factor next to nothing the steps are those without a reference, so nothing was left switched off."""
    weights = []
    for trainer in ({"reference": {"beta": 1e-12}}, {}):
        learner = TorchLearner(run_config(model_folder(), lora=LORA, **trainer))
        for step in (1, 2):
            learner.step(step_batch(random_samples(step), step=step))
        weights.append({n: p.detach() for n, p in learner.model.named_parameters() if p.requires_grad})
    assert weights[0].keys() == weights[1].keys() != set()
    for name, parameter in weights[0].items():
        torch.testing.assert_close(parameter, weights[1][name], rtol=0, atol=1e-6)


def test_a_kl_in_the_rewards_comes_before_the_baseline(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards ±1 of four completions less half of each one's sum of (old − reference), then less the group's mean."""
    from actors.learner import learner as module

    seen: list[Any] = []
    whole = module.compute_loss
    monkeypatch.setattr(
        module, "compute_loss", lambda inputs, trainer, *_: seen.append(inputs) or whole(inputs, trainer)
    )
    reference = {"beta": 0.5, "estimator": "k1", "place": "group_reward"}
    config = run_config(model_folder(), reference=reference)
    reward = config.reward.model_copy(update={"advantage": MeanAdvantageConfig()})
    learner = TorchLearner(config.model_copy(update={"reward": reward}))
    for step in (1, 2):
        learner.step(step_batch(random_samples(step), step=step, micro_batches=2))
    before_T = torch.cat([inputs.advantages_T for inputs in seen[:2]])
    assert set(before_T.tolist()) == {1.0, -1.0}  # the policy is the reference, and the mean of ±1 is 0
    samples, kls = random_samples(2), []
    for inputs in seen[2:]:
        d_T = (inputs.old_logprobs_T - inputs.reference_logprobs_T).double()
        kls += [d_T[inputs.completion_of_T == b].sum().item() for b in range(inputs.num_completions)]
    penalised = np.array([s.advantage for s in samples]) - 0.5 * np.array(kls)
    expected = (penalised.reshape(2, 4) - penalised.reshape(2, 4).mean(axis=1, keepdims=True)).ravel()
    found = [inputs.advantages_T[inputs.completion_of_T == b] for inputs in seen[2:] for b in range(4)]
    assert all(len(set(values_T.tolist())) == 1 for values_T in found)
    np.testing.assert_allclose([values_T[0].item() for values_T in found], expected, rtol=1e-5)
    assert np.abs(expected - [s.advantage for s in samples]).max() > 1e-3


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_environments_have_losses_of_their_own(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, num_minibatches: int
) -> None:
    """One group with policy loss at half weight, one with distillation at double: each ÷ its own 22 tokens, by hand."""
    from actors.learner import learner as module

    seen: list[Any] = []
    whole = module.mixed_loss

    def spy(*arguments: Any, **components: Any) -> Any:
        seen.append((arguments[0], whole(*arguments, **components)))
        return seen[-1][1]

    monkeypatch.setattr(module, "mixed_loss", spy)
    tree = run_config(model_folder(), loss={"type": "aipo"}, num_minibatches=num_minibatches).model_dump()
    tree["trainer"]["teacher"] = {"path": str(model_folder("llama", seed=5)), "dtype": "float32"}
    common = {"type": "reverse_text", "rl_weight": 0.5}
    tree["environments"] = [common | {"name": "a"}, common | {"name": "b", "rl_weight": 0.0, "ref_kl_weight": 2.0}]
    learner = TorchLearner(RunConfig.model_validate(tree))
    groups = [scored_group(i).model_copy(update={"environment": name}) for i, name in enumerate("ab")]
    (batch,) = batches_of(groups, 1, num_minibatches, weights={"a": (0.5, 0.0), "b": (0.0, 2.0)})
    learner.step(batch)
    total = sum(output.loss.item() for _, output in seen)
    expected, ordinals = 0.0, np.repeat(batch.sample_ordinals, np.diff(batch.sample_offsets) - batch.prompt_lengths)
    inputs = [inputs for inputs, _ in seen]
    parts = torch.split(torch.as_tensor(ordinals), [one.logprobs_T.numel() for one in inputs])
    for one, ordinal_T in zip(inputs, parts, strict=True):
        logp_T, q_T = one.logprobs_T.detach(), one.inference_logprobs_T
        policy_T = -0.5 * one.advantages_T * (logp_T - q_T).exp().clamp(max=8.0)
        inside_T = logp_T.exp() - q_T.exp() >= -0.2
        distilled_T = -(one.teacher_logprobs_T - logp_T) * (logp_T - q_T).exp() * inside_T + 1e-3 * (logp_T - q_T) ** 2
        expected += (policy_T[ordinal_T == 0].sum() + 2 * distilled_T[ordinal_T == 1].sum()).item() / 22
    assert total == pytest.approx(expected, rel=1e-4)


def test_adv_norm_comes_after_the_kl_in_the_reward(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages less half of (engine − reference) of this and later tokens, then less mean, ÷ deviation; once."""
    from actors.learner import learner as module

    seen: list[Any] = []
    whole = module.compute_loss
    monkeypatch.setattr(module, "compute_loss", lambda i, trainer, *_: seen.append((i, trainer)) or whole(i, trainer))
    reference = {"beta": 0.5, "estimator": "k1", "place": "reward", "old_logprobs": "inference"}
    config = run_config(model_folder(), reference=reference)
    reward = config.reward.model_copy(update={"adv_norm": NormConfig(eps=0.0)})
    samples = random_samples()
    TorchLearner(config.model_copy(update={"reward": reward})).step(step_batch(samples, micro_batches=2))
    expected = []
    for inputs, _ in seen:
        kl_T = (inputs.inference_logprobs_T - inputs.reference_logprobs_T).double()
        expected += [
            kl_T[k:][inputs.completion_of_T[k:] == inputs.completion_of_T[k]].sum().item() for k in range(kl_T.numel())
        ]
    raw = np.repeat([s.advantage for s in samples], [len(s.completion) for s in samples]) - 0.5 * np.array(expected)
    found = torch.cat([kl_in_reward(inputs, trainer) for inputs, trainer in seen])
    np.testing.assert_allclose(found.numpy(), (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-4, atol=1e-5)


def test_reference_in_the_reward_changes_advantages_alone(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k1, beta 0.5: minus half the sum of (old − reference) from each token to the end of its completion, by hand."""
    from actors.learner import learner as module

    seen: list[Any] = []
    whole = module.compute_loss

    def spy(inputs: Any, trainer: Any, *_: Any) -> Any:
        seen.append((inputs, trainer))
        return whole(inputs, trainer)

    monkeypatch.setattr(module, "compute_loss", spy)
    reference = {"beta": 0.5, "estimator": "k1", "place": "reward"}
    learner = TorchLearner(run_config(model_folder(), reference=reference))
    found = [learner.step(step_batch(random_samples(step)[:2], step=step)) for step in (1, 2)]
    (inputs, objective), expected = seen[-1], []
    d_T = (inputs.logprobs_T.detach() - inputs.reference_logprobs_T).double()
    for b, sample in enumerate(random_samples(2)[:2]):
        of_b = d_T[inputs.completion_of_T == b]
        expected += [sample.advantage - 0.5 * float(of_b[t:].sum()) for t in range(of_b.numel())]
    assert kl_in_reward(inputs, objective).tolist() == pytest.approx(expected, abs=1e-5)
    assert found[-1]["advantage_mean"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert max(abs(value) for value in expected) > 1.01


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_teachers_logprobs_are_those_of_transformers(model_folder: ModelFolder, micro_batches: int) -> None:
    """At the temperature of sampling, packed or not; a teacher of another seed."""
    teacher = model_folder("llama", seed=5)
    loss = {"type": "surogate", "teacher_tau": 0.5}
    config = run_config(model_folder(), teacher={"path": str(teacher), "dtype": "float32"}, loss=loss)
    samples = random_samples()
    for sample in samples[:4]:
        sample.temperature = 0.7
    found = trained_on(TorchLearner(config), step_batch(samples, micro_batches=micro_batches))
    teachers_T = joined(found, "teacher_logprobs_T")
    torch.testing.assert_close(teachers_T, plain_logprobs(teacher, samples), rtol=0, atol=1e-5)
    assert all(each.reference_logprobs_T is None for each in found)


@pytest.mark.slow
def test_policy_is_pulled_towards_its_teacher(model_folder: ModelFolder) -> None:
    """No reward at all: after some steps of ref_kl the completion that the teacher likes is more probable."""
    teacher = model_folder("llama", seed=5)
    config = run_config(
        model_folder(), teacher={"path": str(teacher), "dtype": "float32"}, loss={"type": "ref_kl"}, learning_rate=3e-3
    )
    samples, learner = random_samples(), TorchLearner(config)
    own_T, wanted_T = plain_logprobs(model_folder(), samples), plain_logprobs(teacher, samples)
    for sample, logprobs_T in zip(samples, own_T.split([len(s.completion) for s in samples]), strict=True):
        sample.logprobs, sample.advantage = logprobs_T.tolist(), 0.0
    learner.step(step_batch(samples))
    moved_T = joined(trained_on(learner, step_batch(samples, step=2)), "logprobs_T") - own_T
    assert float((moved_T * (wanted_T - own_T)).sum()) > 0.1


@pytest.mark.slow
def test_frozen_logprobs_that_are_not_finite_once_are_computed_again(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the machine that passes is no fault of the run."""
    learner, untouched = (TorchLearner(run_config(model_folder(), num_iterations=2, **REFERENCE)) for _ in range(2))
    expected = trained_on(untouched, step_batch(random_samples()))
    whole, calls = ReferenceModels.of, []

    def faulty(*arguments: Any) -> FixedLogprobs:
        calls.append(arguments)
        return FixedLogprobs(old_T=torch.tensor([float("nan")])) if len(calls) == 1 else whole(*arguments)

    monkeypatch.setattr(ReferenceModels, "of", faulty)
    found = trained_on(learner, step_batch(random_samples()))
    assert len(calls) == 2
    for name in ("old_logprobs_T", "reference_logprobs_T"):
        assert torch.equal(joined(found, name), joined(expected, name))


class _Lockstep(DataParallel):
    """Ranks that share forward passes, without the other ranks: `agreed` is what these would say."""

    sharded = True

    def __init__(self, *agreed: bool) -> None:
        self._agreed = list(agreed)

    def agree(self, good: bool) -> bool:
        return self._agreed.pop(0)


@pytest.mark.parametrize(("agreed", "times"), [([True], 1), ([False, True], 2), ([False, False], 2)])
def test_a_rank_without_samples_computes_frozen_logprobs_as_often_as_the_others(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, agreed: list[bool], times: int
) -> None:
    """One completion for two ranks: the other one computes a made-up row, and again when any rank must."""
    config = run_config(model_folder(), **REFERENCE)
    policy = TokenLogprobs(TorchLearner(config).model)
    frozen, calls = ReferenceModels(config, policy, nullcontext, _Lockstep(*agreed)), []
    whole = frozen.of
    monkeypatch.setattr(frozen, "of", lambda *arguments: calls.append(arguments) or whole(*arguments))
    empty = min(batches_of([scored_group(0, (3,))], 2), key=lambda batch: batch.token_ids.size)
    assert empty.token_ids.size == 0
    assert frozen.logprobs(empty, with_old=True) == {}
    assert len(calls) == times * empty.num_micro_batches == times


def test_a_teacher_with_another_vocabulary_is_refused_by_key(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The message names both models and the first token that differs."""
    policy = ModelConfig(path=str(model_folder()))
    check_vocabulary(policy, ModelConfig(path=str(model_folder("llama", seed=5))))
    text = (model_folder() / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"q"', '"Q"'))
    with pytest.raises(ConfigError, match=rf"trainer\.teacher\.path: {tmp_path} .*'Q' is 20 there and missing here"):
        check_vocabulary(policy, ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"trainer\.teacher\.path: .* has no tokenizer\.json"):
        check_vocabulary(policy, ModelConfig(path=str(tmp_path.parent)))


def test_micro_batch_has_the_completion_tokens_in_their_order(model_folder: ModelFolder) -> None:
    """Token ids, advantages and versions of the second of two micro-batches."""
    samples = random_samples()
    micro = micro_batch(step_batch(samples, step=7, micro_batches=2), 1, torch.device("cpu"))
    rest = samples[4:]
    assert micro.token_ids_T.tolist() == [token for s in rest for token in s.completion]
    assert micro.advantages_T.tolist() == [s.advantage for s in rest for _ in s.completion]
    assert set(micro.versions_T.tolist()) == {6}
    assert micro.completion_of_T.tolist() == [b for b, s in enumerate(rest) for _ in s.completion]
