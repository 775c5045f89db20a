"""Memory: what is estimated before a model loads, and that logits of a large vocabulary are never held."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.cli import main
from actors.learner.learner import TorchLearner
from actors.learner.optimizer import make_optimizer
from actors.learner.snapshots import OPTIMIZER
from actors.models.memory import MemoryEstimate, _state_bytes, estimate
from schemas.config import RunConfig
from schemas.config.trainer import TrainerConfig
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

LORA = {"rank": 4, "alpha": 8.0}
PEAK = """
import json, sys
from pathlib import Path
import torch
from actors.learner.learner import TorchLearner
from benchmarks.trainer_cases import Shape, config_of, status_bytes, step_batch, write_model

folder, vocab_size, lora = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
write_model(folder, Shape(vocab_size, 64, 128, 1, 1, 1))
learner = TorchLearner(config_of(folder, 4096, {"lora": lora}))
before = status_bytes("VmHWM")
for step in (1, 2):
    learner.step(step_batch([(8, [126] * 4)], vocab_size, 4096, step))
print(status_bytes("VmHWM") - before, sum(p.numel() for p in learner.model.parameters() if p.requires_grad))
"""


def num_bytes(tensor: Tensor) -> int:
    """Of its values."""
    return tensor.numel() * tensor.element_size()


def peak_of(folder: Path, vocab_size: int, lora: Any) -> tuple[int, int]:
    """Bytes that two steps on 504 completion tokens add to a process's peak, and trained parameters."""
    command = [sys.executable, "-c", PEAK, str(folder), str(vocab_size), json.dumps(lora)]
    whole_pages = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else what glibc keeps back counts too
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=whole_pages).stdout
    peak, parameters = found.splitlines()[-1].split()
    return int(peak), int(parameters)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_peak_of_a_step_does_not_grow_with_vocabulary_times_tokens(tmp_path: Path, lora: Any) -> None:
    """From 8 000 to 128 000 tokens: gradients (twice under way) and states of more weights, a whole chunk, no logits.

    Those of 504 tokens alone would be 242 MB more, and as much again for their softmax and for their gradient.
    """
    small, few = peak_of(tmp_path / "small", 8_000, lora)
    large, many = peak_of(tmp_path / "large", 128_000, lora)
    of_weights = (many - few) * 4 * (2 + 2)
    assert large - small < of_weights + 120e6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_weights_gradients_and_states_are_those_of_the_learner(
    model_folder: ModelFolder, lora: Any, dtype: str
) -> None:
    """To the byte: from config.json alone what the loaded model, its gradients and its optimizer turn out to have."""
    config = run_config(model_folder(), dtype, lora)
    found, learner = estimate(config), TorchLearner(config)
    moved: list[Tensor] = []
    for parameter in learner.model.parameters():
        if parameter.requires_grad and learner.trained is not learner.model:
            parameter.register_hook(moved.append)
    learner.step(step_batch(random_samples()))
    parameters = {id(p): p for model in (learner.model, learner.trained) for p in model.parameters()}
    assert found.weights + found.adapter + found.rounded_weights == sum(map(num_bytes, parameters.values()))
    trained = [p for p in learner.trained.parameters() if p.requires_grad]
    assert found.gradients == sum(map(num_bytes, trained)) + max(map(num_bytes, moved), default=0)
    states = [tensor for tensor in learner.snapshot().tensors[OPTIMIZER].values() if tensor.ndim]
    assert found.optimizer == sum(map(num_bytes, states))
    assert found.published == sum(map(num_bytes, learner.weights().tensors.values()))


class Wide(nn.Module):
    """Weights with rows of whole blocks and of others, a bias, and one too small for blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"rows": (64, 256), "odd": (100, 100), "experts": (2, 64, 128), "bias": (8192,), "small": (8, 128)}
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()})


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_states_in_eight_bits_are_those_of_the_optimizer(sharding: str) -> None:
    """To the byte, but for the maps of 256 values that all weights may share."""
    optimizer: Any = {"type": "adamw_8bit"}
    trainer = TrainerConfig(max_steps=1, optimizer=optimizer, sharding=sharding)  # type: ignore[arg-type]
    model = Wide()
    made = make_optimizer(model, trainer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.step()
    found = [value for _, name, value in made.states() if "qmap" not in name and isinstance(value, Tensor)]
    assert _state_bytes(model, list(model.parameters()), trainer) == sum(map(num_bytes, found))


def with_model(config: RunConfig, **model: Any) -> RunConfig:
    """The configuration with other keys of `model`."""
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


@pytest.mark.slow
def test_activations_grow_with_the_row_and_shrink_with_checkpointing(model_folder: ModelFolder) -> None:
    """Twice the row, about twice as much; with checkpointing less than without, and with the selective one between."""
    config = run_config(model_folder())
    long = config.model_copy(update={"packer": config.packer.model_copy(update={"sequence_len": 4096})})
    short, whole = estimate(config).activations, estimate(long).activations
    assert whole == pytest.approx(2 * short, rel=0.05)
    rows = config.trainer.model_copy(update={"num_ranks": 2, "context_parallel": 2})
    assert estimate(long.model_copy(update={"trainer": rows})).activations == short
    selective = estimate(with_model(long, gradient_checkpointing="selective")).activations
    assert estimate(with_model(long, gradient_checkpointing=True)).activations < selective < 0.8 * whole


@pytest.mark.slow
def test_ranks_that_divide_weights_gather_less_and_keep_inputs_of_all_tokens(model_folder: ModelFolder) -> None:
    """Half of the experts, or of attention and MLP; the input of each attention and MLP is kept for the whole row."""
    config = run_config(model_folder("qwen3_moe"), num_ranks=2, sharding="fsdp")

    def of(**keys: int) -> MemoryEstimate:
        return estimate(config.model_copy(update={"trainer": config.trainer.model_copy(update=keys)}))

    shards, rows, heads = of(), of(context_parallel=2), of(tensor_parallel=2)
    layer = models.config("qwen3_moe")
    size = 3 * layer.num_experts * layer.moe_intermediate_size * layer.hidden_size * 4
    assert shards.gathered - of(expert_parallel=2).gathered == 2 * size // 2
    attention = 2 * (layer.num_attention_heads + layer.num_key_value_heads) * layer.head_dim * layer.hidden_size * 4
    assert shards.gathered - heads.gathered == 2 * attention // 2
    tokens = config.packer.sequence_len
    assert heads.activations - rows.activations == 2 * layer.num_hidden_layers * tokens // 2 * layer.hidden_size * 4


@pytest.mark.slow
def test_a_trainer_at_rest_has_all_but_what_a_step_needs(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Weights, gradients and states stay; longer rows make a step larger, and the rest is the same."""
    config = run_config(model_folder("qwen3"))
    long = estimate(config.model_copy(update={"packer": config.packer.model_copy(update={"sequence_len": 4096})}))
    short = estimate(config)
    assert short.resting_trainer == long.resting_trainer
    assert short.trainer < long.trainer
    assert long.resting_trainer >= long.weights + long.gradients + long.optimizer


@pytest.mark.slow
def test_an_exact_head_is_a_copy_of_the_output_layer(model_folder: ModelFolder) -> None:
    """In float32, of a model in bfloat16 alone."""
    for dtype, size in (("bfloat16", 4), ("float32", 0)):
        config = run_config(model_folder(), dtype)
        exact = config.model_copy(update={"model": config.model.model_copy(update={"head_dtype": "float32"})})
        shape = models.config("qwen3")
        copied = size * shape.vocab_size * shape.hidden_size
        assert estimate(exact).output_layer - estimate(config).output_layer == copied


@pytest.mark.slow
def test_weights_that_stay_on_the_device_are_counted_there(model_folder: ModelFolder) -> None:
    """The kept versions, a new one and its source, and the one that an engine receives, all of one size."""
    config = run_config(model_folder())
    by_channel = {
        channel: estimate(config.model_copy(update={"weights": config.weights.model_copy(update={"channel": channel})}))
        for channel in ("filesystem", "rendezvous", "device")
    }
    files, host, device = by_channel.values()
    assert files.published == files.weights
    assert (host.published, host.published_on_device) == (4 * files.weights, 0)
    assert (device.published, device.published_on_device) == (0, 5 * files.weights)
    assert device.engine_received == files.weights
    assert device.trainer - host.trainer == device.resting_trainer - host.resting_trainer == 5 * files.weights


@pytest.mark.slow
def test_reference_and_engine_are_counted_where_the_run_has_them(model_folder: ModelFolder) -> None:
    """A reference is a second model, under LoRA none; the KV cache is 2 × layers × heads × dim per token."""
    config = run_config(model_folder(), reference={"beta": 0.1})
    found = estimate(config)
    assert found.reference == found.weights == found.engine_weights
    assert estimate(run_config(model_folder(), lora=LORA, reference={"beta": 0.1})).reference == 0
    assert found.engine_kv_cache == 16 * 64 * 2 * 2 * 2 * 8 * 4
    assert "reference" in found.table()
    moves = {"beta": 0.1, "sync": {}}
    assert estimate(run_config(model_folder(), reference=moves)).reference == found.reference
    rounded, moving = (
        estimate(run_config(model_folder(), dtype="bfloat16", reference=one)) for one in ({"beta": 0.1}, moves)
    )
    assert moving.reference == 3 * rounded.reference  # 4 bytes of each weight beside 2
    assert moving.checkpoint == rounded.checkpoint + 2 * rounded.reference


def test_check_prints_the_estimate(model_folder: ModelFolder, tmp_path: Path, capsys: Any) -> None:
    """`actors check run.yaml --memory`."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run_config(model_folder()).model_dump(mode="json")))
    assert main(["check", str(path), "--memory"]) == 0
    printed = capsys.readouterr().out
    assert "one trainer rank" in printed
    assert "engine kv cache" in printed


@pytest.mark.slow
def test_shards_are_rounded_when_they_are_gathered(model_folder: ModelFolder) -> None:
    """In bfloat16 half the bytes, of the same float32 shards; no copy of the weights is kept beside them."""
    keys = {"sharding": "fsdp", "num_ranks": 2}
    exact, rounded = (estimate(run_config(model_folder(), dtype, **keys)) for dtype in ("float32", "bfloat16"))
    assert exact.gathered == 2 * rounded.gathered > 0
    assert exact.weights == rounded.weights
    assert exact.gradients == rounded.gradients
    assert rounded.rounded_weights == 0
