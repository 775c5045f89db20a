"""Engine and learner compute the same: what one samples the other scores alike, before and after an update."""

from typing import Any

import pytest

from actors.engines.protocol import Completion
from actors.learner.learner import TorchLearner
from tests.actors.engines.engines import WAIT, MakeEngine, ask, policy, sample
from tests.actors.learner.steps import Sampled, run_config, step_batch
from tests.conftest import ModelFolder

PROMPTS = ([1, 8, 3], [1, 20, 9, 14, 5, 6, 7, 3])
LORA = {"rank": 4, "alpha": 8.0}


def to_train_on(groups: list[list[Completion]], temperature: float = 1.0) -> list[Sampled]:
    """Completions of PROMPTS as samples, each second one praised."""
    return [
        Sampled(prompt, c.token_ids, c.logprobs, 1.0 - 2.0 * (i % 2), ordinal, temperature)
        for ordinal, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
        for i, c in enumerate(group)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3", None), ("llama", None), ("mistral", None), ("gemma2", None), ("qwen3", LORA)]
)
def test_learner_and_engine_agree_on_logprobs(
    model_folder: ModelFolder, make_engine: MakeEngine, family: str, lora: Any, temperature: float
) -> None:
    """Largest gap below 1e-5 with the weights as loaded, and again after each of two updates through the learner."""
    learner = TorchLearner(run_config(model_folder(family), lora=lora))
    engine = make_engine(family, lora=lora is not None)
    seen = []
    for version in range(3):
        engine.load(policy(version), learner.weights(), WAIT)
        requests = [ask(prompt, n=4, max_tokens=10, temperature=temperature, seed=7) for prompt in PROMPTS]
        groups = sample(engine, *requests)
        seen.append([c.logprobs for group in groups for c in group])
        found = learner.step(step_batch(to_train_on(groups, temperature), step=version + 1))
        assert found["mismatch_max"] < 1e-5
    assert seen[0] != seen[1] != seen[2]


def test_engine_in_bfloat16_stays_near_the_learner(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """float32 engine, learner under bfloat16 autocast: the gap is that of the precision, and it is measured."""
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16"))
    groups = sample(make_engine(), *(ask(prompt, n=4, max_tokens=10) for prompt in PROMPTS))
    found = learner.step(step_batch(to_train_on(groups)))
    assert 1e-4 < found["mismatch_max"] < 0.5
    assert 0 < found["mismatch_kl"] < 0.01
