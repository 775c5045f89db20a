"""Models that a run does not train: the reference that the policy is held to, the teacher that it is pulled towards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.algorithms.losses.switches import kl_in_reward
from actors.policy.frozen import FixedLogprobs, check_vocabulary
from actors.policy.learner import TorchLearner
from actors.policy.micro_batches import micro_batch
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch
from tests import models
from tests.actors.policy.steps import Sampled, random_samples, run_config, step_batch
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}
REFERENCE = {"reference": {"beta": 0.5}}


def plain_logprobs(folder: Path, samples: list[Sampled]) -> Tensor:
    """(T,) of all completions, one after the other, by transformers alone."""
    model = models.plain(folder)
    with torch.no_grad():
        return torch.cat([models.logprobs(model, s.prompt, s.completion, s.temperature) for s in samples])


def fixed(learner: TorchLearner, batch: StepBatch) -> list[FixedLogprobs]:
    """By micro-batch, the policy's among them."""
    return list(learner._frozen.logprobs(batch, with_old=True).values())


def joined(found: list[FixedLogprobs], name: str) -> Tensor:
    """(T,) of all micro-batches."""
    return torch.cat([getattr(each, name) for each in found])


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_reference_stays_the_model_of_the_start(
    model_folder: ModelFolder, lora: Any, micro_batches: int, tmp_path: Path
) -> None:
    """After a step, and after going on from a checkpoint: the untrained model's logprobs, which the policy has left."""
    samples, config = random_samples(), run_config(model_folder(), lora=lora, learning_rate=1e-2, **REFERENCE)
    base_T = plain_logprobs(model_folder(), samples)
    learner = TorchLearner(config)
    for step in (1, 2):  # the second half of the adapter moves once the first has
        learner.step(step_batch(random_samples(step), step=step))
    learner.snapshot().write(tmp_path)
    restored = TorchLearner(config)
    restored.restore(tmp_path)
    for each in (learner, restored):
        found = fixed(each, step_batch(samples, micro_batches=micro_batches))
        torch.testing.assert_close(joined(found, "reference_T"), base_T, rtol=0, atol=1e-5)
        assert (joined(found, "old_T") - base_T).abs().max() > 1e-2
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


def test_reference_in_the_reward_changes_advantages_alone(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k1, beta 0.5: minus half the sum of (old − reference) from each token to the end of its completion, by hand."""
    from actors.policy import learner as module

    seen: list[Any] = []
    whole = module.compute_loss

    def spy(inputs: Any, trainer: Any) -> Any:
        seen.append(inputs)
        return whole(inputs, trainer)

    monkeypatch.setattr(module, "compute_loss", spy)
    reference = {"beta": 0.5, "estimator": "k1", "place": "reward"}
    learner = TorchLearner(run_config(model_folder(), reference=reference))
    found = [learner.step(step_batch(random_samples(step)[:2], step=step)) for step in (1, 2)]
    inputs, expected = seen[-1], []
    d_T = (inputs.logprobs_T.detach() - inputs.reference_logprobs_T).double()
    for b, sample in enumerate(random_samples(2)[:2]):
        of_b = d_T[inputs.completion_of_T == b]
        expected += [sample.advantage - 0.5 * float(of_b[t:].sum()) for t in range(of_b.numel())]
    assert kl_in_reward(inputs, learner._objective).tolist() == pytest.approx(expected, abs=1e-5)
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
    found = fixed(TorchLearner(config), step_batch(samples, micro_batches=micro_batches))
    torch.testing.assert_close(joined(found, "teacher_T"), plain_logprobs(teacher, samples), rtol=0, atol=1e-5)
    assert all(each.reference_T is None for each in found)


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
    moved_T = joined(fixed(learner, step_batch(samples)), "old_T") - own_T
    assert float((moved_T * (wanted_T - own_T)).sum()) > 0.1


def test_frozen_logprobs_that_are_not_finite_once_are_computed_again(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the machine that passes is no fault of the run."""
    learner = TorchLearner(run_config(model_folder(), **REFERENCE))
    expected = fixed(learner, step_batch(random_samples()))
    whole, calls = learner._frozen.of, []

    def faulty(*arguments: Any) -> FixedLogprobs:
        calls.append(arguments)
        return FixedLogprobs(old_T=torch.tensor([float("nan")])) if len(calls) == 1 else whole(*arguments)

    monkeypatch.setattr(learner._frozen, "of", faulty)
    found = fixed(learner, step_batch(random_samples()))
    assert len(calls) == 2
    assert torch.equal(joined(found, "old_T"), joined(expected, "old_T"))


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
