"""Gradients that a comparison takes out of a step are those that the optimizer applied."""

import torch

from actors.learner.learner import TorchLearner
from benchmarks.gradients import captured_gradients
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder


def test_gradients_of_a_step_are_copies_clipped_as_they_were_applied(model_folder: ModelFolder) -> None:
    """By name, with the norm that the step reports as its limit; later steps leave them as they are."""
    learner = TorchLearner(run_config(model_folder(), max_grad_norm=1e-3))
    with captured_gradients(learner) as gradients:
        measured = learner.step(step_batch(random_samples(1)))
    assert measured["grad_norm"] > 1e-3, "there is something to clip"
    assert gradients.keys() == dict(learner.trained.named_parameters()).keys()
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert abs(norm - 1e-3) < 1e-6
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    learner.step(step_batch(random_samples(2), step=2))
    assert all(torch.equal(gradients[name], before[name]) for name in before)
