"""Engine and learner compute the same: what one samples the other scores alike, before and after an update."""

from typing import Any

import pytest
import torch

from actors.engines.protocol import Completion
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch
from actors.learner.reference_models import logprobs_without_gradient
from actors.models import loading
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import LoraConfig
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


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3", None), ("llama", None), ("mistral", None), ("gemma2", None), ("qwen3", LORA), ("qwen3_vl", None),
     ("qwen3_vl", LORA), ("qwen2_5_vl", None), ("qwen3_moe", None), ("mixtral", None), ("qwen3_moe", LORA)],
)  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lora",
    [LORA | {"rslora": True, "target_modules": r".*_proj"}, LORA | {"dora": True},
     LORA | {"modules_to_save": ["lm_head", "embed_tokens"]}],
    ids=["rslora", "dora", "modules"],
)  # fmt: skip
def test_learner_and_engine_agree_on_every_kind_of_adapter(
    model_folder: ModelFolder, make_engine: MakeEngine, lora: Any, dtype: Any
) -> None:
    """As loaded, and after each of two updates; the engine's policy moves with the learner's."""
    learner = TorchLearner(run_config(model_folder("llama"), dtype, lora=lora))
    engine = make_engine("llama", lora=LoraConfig.model_validate(lora), dtype=dtype)
    seen = []
    for version in range(3):
        engine.load(policy(version), learner.weights(), WAIT)
        groups = sample(engine, *(ask(prompt, n=4, max_tokens=10, seed=7) for prompt in PROMPTS))
        seen.append([c.logprobs for group in groups for c in group])
        found = learner.step(step_batch(to_train_on(groups), step=version + 1))
        assert found["mismatch_max"] < (1e-5 if dtype == "float32" else 0.05)
    assert seen[0] != seen[1] != seen[2]


def test_engine_in_bfloat16_stays_near_the_learner(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """float32 engine, learner in bfloat16: the gap is that of the precision, and it is measured."""
    learner = TorchLearner(run_config(model_folder(), dtype="bfloat16"))
    groups = sample(make_engine(), *(ask(prompt, n=4, max_tokens=10) for prompt in PROMPTS))
    found = learner.step(step_batch(to_train_on(groups)))
    assert 1e-4 < found["mismatch_max"] < 0.5
    assert 0 < found["mismatch_kl"] < 0.01


@pytest.mark.slow
def test_engine_and_learner_in_bfloat16_round_alike(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """Both compute every layer in bfloat16: their gap is half of that to float32 weights under autocast, or less.

    Under autocast residual stream and norms are float32, so the learner would be the more exact one of two policies.
    """
    config = run_config(model_folder(), dtype="bfloat16")
    learner, engine = TorchLearner(config), make_engine(dtype="bfloat16", max_sequences=32)
    under_autocast = TokenLogprobs(loading.load_model(config.model, torch.float32))
    for version in range(3):
        engine.load(policy(version), learner.weights(), WAIT)
        groups = sample(engine, *(ask(prompt, n=16, max_tokens=20, seed=version) for prompt in PROMPTS))
        batch = step_batch(to_train_on(groups), step=version + 1)
        micro = micro_batch(batch, 0, torch.device("cpu"))
        loading.copy_into(loading.full_tensors(under_autocast.model), loading.full_tensors(learner.trained), "masters")
        exact_T = logprobs_without_gradient(under_autocast, micro, lambda: torch.autocast("cpu", torch.bfloat16))
        before = float((exact_T - micro.inference_logprobs_T).abs().mean())
        found = learner.step(batch)
        assert 0 < found["mismatch_abs_current"] < 0.5 * before
