"""Adapters on a base model whose files have weights of 8 or 4 bits: trainer, embedded engine, checks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import SampleRequest
from actors.learner.learner import TorchLearner
from actors.models import memory
from actors.models.quantized.layer import QuantizedLinear
from actors.ops.fit import model_findings
from actors.ops.quantize import quantize
from schemas.config import RunConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.learner.steps import Sampled, random_samples, run_config, step_batch
from tests.actors.learner.test_learner import changed, mismatch_of, parameters, saved

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module", params=["fp8", "nvfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with codes, whose completions do not end by themselves."""
    made = tmp_path_factory.mktemp("codes")
    models.build(made / "model", eos=models.NEVER)
    quantize(made / "model", request.param, made / request.param)
    return made / request.param


def config(folder: Path, dtype: str = "float32", **trainer: Any) -> RunConfig:
    """A run with adapters."""
    return run_config(folder, dtype, lora=LORA, **trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_and_the_codes_stay(dtype: str, folder: Path) -> None:
    """The policy that takes a step has peft's adapters in float32 and the same codes as before."""
    learner = TorchLearner(config(folder, dtype))
    before = parameters(learner)
    learner.step(step_batch(random_samples()))
    names = changed(before, learner)
    assert names
    assert all("lora_" in name for name in names)
    assert {p.dtype for p in learner.model.parameters() if p.requires_grad} == {torch.float32}


def test_logprobs_are_those_of_the_decoded_weights(folder: Path, tmp_path: Path) -> None:
    """A model of transformers with the decoded weights and peft's adapter gives the learner's logprobs to 1e-5."""
    from peft import PeftModel

    learner = TorchLearner(config(folder))
    for step in (1, 2, 3):
        learner.step(step_batch(random_samples(), step=step))
    saved(learner, tmp_path / "checkpoint")
    plain = models.plain(folder.parent / "model")
    for name, module in learner.model.named_modules():
        if isinstance(module, QuantizedLinear):
            path = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            plain.get_submodule(path).weight.data.copy_(module.decoded())
    assert mismatch_of(learner, PeftModel.from_pretrained(plain, tmp_path / "checkpoint")) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_engine_serves_what_is_trained(dtype: str, folder: Path) -> None:
    """Both load the same codes: logprobs of samples differ no more than without codes."""
    settings = config(folder, dtype)
    learner = TorchLearner(settings)
    learner.step(step_batch(random_samples()))
    engine = EmbeddedEngine(settings.model, EmbeddedEngineConfig(max_sequences=16, max_sequence_len=64), "interrupt")
    try:
        engine.load(PolicyVersion(lineage=0, version=1), learner.weights(), 60.0)
        request = SampleRequest(prompt_ids=[1, 10, 11], num_completions=8, max_tokens=6, seed=0)
        completions = engine.submit(request).result(60.0)
    finally:
        engine.close()
    samples = [
        Sampled([1, 10, 11], list(c.token_ids), list(c.logprobs), 1.0 if i % 2 else -1.0)
        for i, c in enumerate(completions)
    ]
    found = learner.step(step_batch(samples, step=2))
    assert found["mismatch_max"] < (1e-5 if dtype == "float32" else 0.1)


def test_going_on_from_a_checkpoint_has_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """Adapter and optimizer come from the checkpoint, the codes from the model's folder; the reference is the base."""
    learner, other = (TorchLearner(config(folder, reference={"beta": 0.1})) for _ in range(2))
    learner.step(step_batch(random_samples(1), step=1))
    saved(learner, tmp_path / "checkpoint")
    other.restore(tmp_path / "checkpoint")
    first, second = (each.step(step_batch(random_samples(2), step=2)) for each in (learner, other))
    assert second["loss"] == first["loss"]
    assert changed(parameters(learner), other) == set()


def test_the_estimate_counts_the_bytes_of_the_codes(folder: Path) -> None:
    """Weights of the estimate are the bytes of the loaded base model."""
    settings = config(folder)
    base = sum(p.nbytes for name, p in TorchLearner(settings).model.named_parameters() if "lora_" not in name)
    assert memory.estimate(settings).weights == base


def test_a_run_without_adapters_or_with_shards_is_refused_at_the_check(folder: Path) -> None:
    """Frozen codes can't be trained, nor spread over ranks."""
    assert not [finding for finding in model_findings(config(folder)) if finding.fatal]
    words = [finding.words for finding in model_findings(run_config(folder)) if finding.fatal]
    assert any("model.lora: empty" in one and "quantised" in one for one in words)
    sharded = config(folder, sharding="fsdp", num_ranks=2)
    words = [finding.words for finding in model_findings(sharded) if finding.fatal]
    assert any("fsdp can't spread the quantised weights" in one for one in words)
