"""Dropout of the base model: off in training unless it is asked for, so that trainer and engine compute the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, PhiConfig, PretrainedConfig

from actors.learner.learner import TorchLearner
from schemas.config import RunConfig
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch

SIZES: dict[str, Any] = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.2),
    "llama": LlamaConfig(**models.SMALL, attention_dropout=0.5),
    "opt": OPTConfig(
        **SIZES, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=96, init_std=0.2, layerdrop=0.5,
    ),
    "phi": PhiConfig(
        **SIZES, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, resid_pdrop=0.3, embd_pdrop=0.3, attention_dropout=0.3,
    ),
}  # fmt: skip


def run_of(folder: Path, config: PretrainedConfig, **model: Any) -> RunConfig:
    """A run on a random model of this architecture."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    run = run_config(folder, lora=model.pop("lora", None))
    return run.model_copy(update={"model": run.model.model_copy(update=model)})


def difference(config: RunConfig) -> float:
    """Mean |trainer − engine| per token in a first step, whose tokens the published weights have sampled."""
    samples = random_samples()
    plain = models.plain(Path(config.model.path))
    for sample in samples:
        sample.logprobs = models.logprobs(plain, sample.prompt, sample.completion).tolist()
    return TorchLearner(config).step(step_batch(samples))["mismatch_abs_current"]


@pytest.mark.parametrize("family", CONFIGS)
def test_trainer_and_engine_agree_on_a_model_that_was_trained_with_dropout(tmp_path, family):
    """To a millionth of a nat, on architectures that keep their dropout in modules, attention and layers."""
    assert difference(run_of(tmp_path, CONFIGS[family])) < 1e-6


def test_dropout_that_is_asked_for_acts(tmp_path):
    """With the key the model trains as its config.json says, and the two differ by what dropout changes."""
    assert difference(run_of(tmp_path, CONFIGS["gpt2"], dropout=True)) > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_trains_on_a_base_model_without_dropout(tmp_path, checkpointing):
    """The same with LoRA, and with gradient checkpointing, which needs the training mode."""
    config = run_of(tmp_path, CONFIGS["llama"], lora={"rank": 4}, gradient_checkpointing=checkpointing)
    assert difference(config) < 1e-6


def test_the_dropout_of_the_models_config_stays_in_its_checkpoints(tmp_path):
    """What is trained without it may be fine-tuned with it elsewhere: config.json is the model's own."""
    learner = TorchLearner(run_of(tmp_path / "model", CONFIGS["llama"]))
    (tmp_path / "saved").mkdir()
    learner.snapshot().write(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["attention_dropout"] == 0.5
