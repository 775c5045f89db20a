"""Text with a model that sees images: what is loaded, trained, sent and saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlavaConfig

from actors.algorithms.noise import is_noisy_norm
from actors.engines.embedded.decoder import Decoder
from actors.learner.learner import TorchLearner
from actors.models import loading
from actors.models.attention import pack_row
from actors.models.memory import estimate
from actors.models.token_logprobs import TokenLogprobs
from actors.models.vision.parts import VISION, vision_part
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}


def seen_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the vision tower in a model's file."""
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if f".{VISION}." in name}


@pytest.mark.parametrize("family", models.SEEING)
def test_text_in_packed_rows_has_transformers_logprobs(model_folder: ModelFolder, family: str) -> None:
    """Two completions of a prompt in one row, and each alone by transformers' own forward."""
    config = ModelConfig(path=str(model_folder(family)), dtype="float32", device="cpu")
    prompt, completions = [1, 5, 6], [[7, 8, 9], [models.IMAGE, 12]]
    ids = [token for completion in completions for token in prompt + completion]
    row = pack_row(np.array(ids, np.int32), np.array([0, 6, 11]), np.array([3, 3]), [0, 3], torch.device("cpu"))
    chosen = torch.tensor([token for completion in completions for token in completion])
    with torch.no_grad():
        found, _ = TokenLogprobs(loading.load_model(config, torch.float32)).of(row, chosen, None)
        plain = models.plain(model_folder(family))
        expected = torch.cat([models.logprobs(plain, prompt, completion) for completion in completions])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_trains_language_layers_alone_and_the_engine_has_their_bits(
    model_folder: ModelFolder, lora: Any, dtype: Any
) -> None:
    """The tower keeps the bits of the file; every published tensor is in the engine, to the bit."""
    folder = model_folder("qwen3_vl")
    config = run_config(folder, dtype, lora)
    learner = TorchLearner(config)
    assert not any(p.requires_grad for name, p in learner.trained.named_parameters() if f".{VISION}." in name)
    before = learner.weights().tensors
    learner.step(step_batch(random_samples()))
    published = learner.weights()
    assert any(not torch.equal(before[name], value) for name, value in published.tensors.items())
    tower = vision_part(learner.trained)
    assert tower is not None
    for name, value in seen_weights(folder).items():
        kept = tower.state_dict()[name.partition(f".{VISION}.")[2]]
        assert torch.equal(kept, value.to(kept.dtype)), name
    decoder = Decoder(config.model, EmbeddedEngineConfig(type="embedded", max_sequences=2, max_sequence_len=64))
    decoder.load(published, 1)
    held = loading.full_tensors(decoder.model) if lora is None else loading.adapter_tensors(decoder.model)
    assert held.keys() == published.tensors.keys()
    for name, value in published.tensors.items():
        assert torch.equal(held[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_tower_is_a_row_of_the_estimate(model_folder: ModelFolder, lora: Any, dtype: str) -> None:
    """All parts together have the bytes of the learner's parameters; gradients are of what is trained."""
    config = run_config(model_folder("qwen3_vl"), dtype, lora)
    found, learner = estimate(config), TorchLearner(config)
    parameters = {id(p): p for model in (learner.model, learner.trained) for p in model.parameters()}
    counted = found.weights + found.adapter + found.rounded_weights + found.vision
    assert counted == sum(p.numel() * p.element_size() for p in parameters.values())
    towers = {id(p): p for model in (learner.model, learner.trained) for p in vision_part(model).parameters()}  # type: ignore[union-attr]
    assert found.vision == sum(p.numel() * p.element_size() for p in towers.values()) > 0
    assert "vision" in found.table()


def test_adapters_leave_the_tower_out(model_folder: ModelFolder) -> None:
    """Also where `target_modules` is a regular expression that matches the tower's layers."""
    for targets in ("all-linear", r".*proj"):
        lora = LoraConfig(rank=4, target_modules=targets)
        config = ModelConfig(path=str(model_folder("qwen3_vl")), dtype="float32", device="cpu", lora=lora)
        adapted = loading.add_lora(loading.load_model(config, torch.float32), config)
        names = loading.adapter_tensors(adapted).keys()
        assert names
        assert not any(VISION in name for name in names)


def test_a_quantised_model_keeps_its_tower(tmp_path: Path) -> None:
    """All linear layers of the language are of four bits, but the output layer; features of images stay exact."""
    pytest.importorskip("bitsandbytes", reason="not run: pip install 'grpo-actors[bnb]'")
    config: Any = models.seeing_config("qwen3_vl")
    # multiples of 64, which bitsandbytes needs on a CPU
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    for key, value in wide.items():
        setattr(config.text_config, key, value)
    config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    config.vision_config.out_hidden_size = 64
    models.auto_class("qwen3_vl").from_config(config).save_pretrained(tmp_path)
    keys = {"path": str(tmp_path), "device": "cpu", "dtype": "float32", "lora": {}, "quantization": {"type": "nf4"}}
    loaded = loading.load_model(ModelConfig.model_validate(keys), torch.float32)
    kinds = {name: type(module).__name__ for name, module in loaded.named_modules()}
    linear = {name for name, kind in kinds.items() if kind in ("Linear", "Linear4bit")}
    exact = {name for name in linear if f".{VISION}." in name} | {"lm_head"}
    assert {name for name in linear if kinds[name] == "Linear"} == exact
    row = pack_row(np.array([1, 5, 6], np.int32), np.array([0, 3]), np.array([2]), [0], torch.device("cpu"))
    with torch.no_grad():
        assert bool(torch.isfinite(loaded(**row.forward_arguments()).logits).all())


def test_a_part_of_the_tower_trained_as_a_whole_is_refused_by_key(model_folder: ModelFolder) -> None:
    """The message names the module."""
    lora = LoraConfig(rank=4, modules_to_save=["merger"])
    config = ModelConfig(path=str(model_folder("qwen3_vl")), dtype="float32", device="cpu", lora=lora)
    with pytest.raises(
        ConfigError, match=r"modules_to_save: model\.visual\.merger sees images, and is trained by adapters"
    ):
        loading.add_lora(loading.load_model(config, torch.float32), config)


def test_another_vision_language_model_is_refused_by_type(tmp_path: Path) -> None:
    """The message names the supported types."""
    LlavaConfig().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=r"model\.path: .* of type llava, and the supported types are qwen3_vl"):
        loading.load_model(config, torch.float32)


def test_a_checkpoint_is_a_whole_model_with_its_image_processor(model_folder: ModelFolder, tmp_path: Path) -> None:
    """transformers alone loads it; tower and image processor are those of the model."""
    folder = model_folder("qwen3_vl")
    learner = TorchLearner(run_config(folder))
    learner.step(step_batch(random_samples()))
    learner.snapshot().write(tmp_path)
    loaded = models.plain(tmp_path)
    for name, value in seen_weights(folder).items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()


def test_norms_of_the_tower_get_no_noise() -> None:
    """Noise is of the policy; features of images are the trainer's."""
    assert is_noisy_norm("model.language_model.norm.weight")
    assert not is_noisy_norm("model.visual.merger.norm.weight")
