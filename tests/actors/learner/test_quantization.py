"""QLoRA: adapters on a base model of four bits, in the trainer, in the engine, and elsewhere."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import SampleRequest
from actors.learner.learner import TorchLearner
from actors.learner.parallelism import DataParallel
from actors.learner.reference_models import ReferenceModels
from actors.models import loading
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.learner.steps import Sampled, random_samples, run_config, step_batch
from tests.actors.learner.test_learner import changed, mismatch_of, parameters, saved
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have a multiple of 64 inputs, and whose completions do not end by themselves."""
    made = tmp_path_factory.mktemp("wide")
    models.build(made, eos=models.NEVER)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**models.SMALL | WIDTHS)).save_pretrained(made)
    return made


def quantized(model: Path, dtype: str = "float32", **trainer: Any) -> RunConfig:
    """A QLoRA run on a tiny model."""
    config = run_config(model, dtype, lora=LORA, **trainer)
    tree = config.model_dump()
    tree["model"]["quantization"] = {"type": "nf4", "double_quant": True}
    return RunConfig.model_validate(tree)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The quantised ones, by the names that the model has without an adapter."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            yield name.removeprefix("base_model.model.").removesuffix(".base_layer"), module


def as_quantized(learner: TorchLearner, folder: Path) -> Any:
    """The model as transformers alone loads it, with the weights that the four bits stand for."""
    from bitsandbytes.functional import dequantize_4bit  # here, since the import takes seconds in every worker

    plain = models.plain(folder)
    for name, layer in linear_layers(learner.model):
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain.get_submodule(name).weight.data.copy_(weight)
    return plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_has_four_bits_and_the_adapter_is_trained(dtype: str, folder: Path) -> None:
    """Linear layers are bytes of two weights and stay as they are, embeddings keep their type, adapters are float32."""
    learner = TorchLearner(quantized(folder, dtype))
    layers = dict(linear_layers(learner.model))
    assert len(layers) == 2 * 7
    assert all(layer.weight.dtype == torch.uint8 for layer in layers.values())
    assert layers["model.layers.0.mlp.up_proj"].weight.numel() == 128 * 64 // 2
    before = parameters(learner)
    learner.step(step_batch(random_samples()))
    names = changed(before, learner)
    assert names
    assert all("lora_" in name for name in names)
    assert {p.dtype for p in learner.model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.slow
def test_logprobs_move_the_way_advantages_point(folder: Path, tmp_path: Path) -> None:
    """Five steps with the same advantages: praised completions become more probable than blamed ones."""
    from peft import PeftModel

    learner, samples = TorchLearner(quantized(folder)), random_samples()

    def gap(checkpoint: Path) -> float:
        saved(learner, checkpoint)
        policy = PeftModel.from_pretrained(as_quantized(learner, folder), checkpoint)
        with torch.no_grad():
            return sum(s.advantage * float(models.logprobs(policy, s.prompt, s.completion).sum()) for s in samples)

    before = gap(tmp_path / "before")
    for step in range(1, 6):
        learner.step(step_batch(samples, step=step))
    assert gap(tmp_path / "after") > before + 5.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_serves_what_is_trained(dtype: str, folder: Path) -> None:
    """It quantises the base alike: logprobs of its samples differ no more than without quantisation."""
    config = quantized(folder, dtype)
    learner = TorchLearner(config)
    learner.step(step_batch(random_samples()))
    engine = EmbeddedEngine(config.model, EmbeddedEngineConfig(max_sequences=16, max_sequence_len=64), "interrupt")
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


@pytest.mark.slow
def test_an_adapter_loads_with_peft_alone_on_the_base_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Where the base has the weights that the four bits stand for, logprobs are the learner's; else they are near."""
    from peft import PeftModel

    learner = TorchLearner(quantized(folder))
    for step in (1, 2, 3):
        learner.step(step_batch(random_samples(), step=step))
    saved(learner, tmp_path / "checkpoint")
    alike, exact = (
        PeftModel.from_pretrained(base, tmp_path / "checkpoint")
        for base in (as_quantized(learner, folder), models.plain(folder))
    )
    fresh = TorchLearner(quantized(folder))
    fresh.restore(tmp_path / "checkpoint")
    assert mismatch_of(fresh, alike) < 1e-5
    for (name, ours), theirs in zip(alike.named_parameters(), exact.parameters(), strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert 0.05 < error < 0.15 if name.endswith("base_layer.weight") else error == 0, name
    tokens = torch.tensor([[1, 10, 11, 12, 13]])
    with torch.no_grad():
        logits = torch.stack([model(tokens).logits.flatten() for model in (alike, exact)])
    assert torch.corrcoef(logits)[0, 1] > 0.8  # weights of this model are random and wide, and so is what 4 bits change


@pytest.mark.slow
def test_going_on_from_a_checkpoint_has_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """The base is quantised again from where it was read, adapter and optimizer come from the checkpoint."""
    learner, other = (TorchLearner(quantized(folder, reference={"beta": 0.1})) for _ in range(2))
    learner.step(step_batch(random_samples(1), step=1))
    saved(learner, tmp_path / "checkpoint")
    other.restore(tmp_path / "checkpoint")
    first, second = (each.step(step_batch(random_samples(2), step=2)) for each in (learner, other))
    assert second["loss"] == first["loss"]
    assert changed(parameters(learner), other) == set()


@pytest.mark.slow
def test_evaluating_in_between_leaves_gradients_as_they_are(folder: Path) -> None:
    """Old logprobs, in eval mode without gradient, change neither the layers nor what flows through them."""
    learner, other = (TorchLearner(quantized(folder, "bfloat16")) for _ in range(2))
    batch, policy = step_batch(random_samples()), TokenLogprobs(learner.model)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    frozen = ReferenceModels(quantized(folder, "bfloat16"), policy, autocast, DataParallel())
    assert frozen.logprobs(batch, with_old=True)
    assert learner.step(batch)["grad_norm"] == other.step(batch)["grad_norm"]
    assert changed(parameters(learner), other) == set()


def test_a_width_that_is_computed_wrongly_on_a_cpu_is_refused(model_folder: ModelFolder) -> None:
    """A layer of 32 inputs would get the scales of other rows."""
    config = quantized(model_folder()).model
    with pytest.raises(ConfigError, match=r"q_proj has 32 inputs, and on a CPU bitsandbytes .* multiples of 64 only"):
        loading.load_model(config, torch.float32)


def test_without_the_library_the_extra_is_named(folder: Path, monkeypatch: Any) -> None:
    """Said before anything is loaded."""
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.quantization: needs .*bitsandbytes; install grpo-actors\[bnb\]"):
        loading.load_model(quantized(folder).model, torch.float32)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"quantization": {"type": "nf4"}}, "quantised weights can't be trained themselves; set lora too"),
        ({"lora": {}, "quantization": {"type": "fp8"}}, r"`actors quantize MODEL --type fp8 --output DIR`"),
    ],
)
def test_what_can_not_be_trained_is_refused(section: dict[str, Any], problem: str) -> None:
    """All weights in four bits; fp8, which is in the model's files."""
    with pytest.raises(ValueError, match=problem):
        ModelConfig.model_validate({"path": "some/model"} | section)
