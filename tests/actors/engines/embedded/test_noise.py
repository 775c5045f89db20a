"""Noise on the norms of the embedded engine: what it serves is the noisy model's, exactly, and never adds up."""

import pytest
import torch

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.learner.learner import TorchLearner
from actors.models import loading
from bus.weights import Weights
from schemas.config.noise import NoiseConfig
from tests import models
from tests.actors.engines.engines import WAIT, MakeEngine, ask, policy, sample
from tests.actors.learner.steps import run_config
from tests.conftest import ModelFolder

NOISE = NormNoise(NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3), total_steps=6, seed=4)
PROMPT = [1, 10, 11]


def noisy_model(folder: ModelFolder, version: int) -> torch.nn.Module:
    """The folder's model with the noise of a version."""
    model = models.plain(folder())
    norms = {name: weight for name, weight in model.state_dict().items() if is_noisy_norm(name)}
    model.load_state_dict(model.state_dict() | NOISE.on(norms, version))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_engine_samples_from_the_noisy_policy_of_each_version(
    make_engine: MakeEngine, model_folder: ModelFolder, lora: bool
) -> None:
    """Versions 0 (no noise yet), 5, 2 and 5 again: logprobs are those of the clean model plus that version's noise."""
    engine = make_engine(lora=lora, noise=NOISE)
    if lora:
        weights = TorchLearner(run_config(model_folder(), lora={"rank": 4, "alpha": 8.0})).weights()
    else:
        weights = Weights("full", loading.full_tensors(models.plain(model_folder())))
    for version in (0, 5, 2, 5):
        engine.load(policy(version), weights, WAIT)
        ((completion,),) = sample(engine, ask(PROMPT, seed=version))
        expected = models.logprobs(noisy_model(model_folder, version), PROMPT, list(completion.token_ids))
        assert list(completion.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
    clean = models.logprobs(noisy_model(model_folder, 0), PROMPT, [12, 13, 14])
    assert (models.logprobs(noisy_model(model_folder, 5), PROMPT, [12, 13, 14]) - clean).abs().max() > 0.01
