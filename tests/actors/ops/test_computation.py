"""What a check says about the ways of computing, and why."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.algorithms.batches import prompts_count_once
from actors.models import attention as attention_of_models
from actors.ops import computation as module
from actors.ops.computation import attention, computation
from schemas.config.model import ModelConfig
from tests.actors.learner.steps import run_config


def test_each_choice_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with adapters."""
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    lines = [str(choice) for choice in computation(run_config(tmp_path, lora={"rank": 12}))]
    assert lines == [
        "model.attention: padded (on a CPU)",
        "model.lora_forward: peft (the scale 2.66667 is no power of two, so on a CPU the last bits would differ)",
        "model.output_layer: torch (on a CPU)",
        "model.row_multiple: 1 (on a CPU no row is padded)",
    ]


def test_a_machine_that_is_not_there_yet_has_the_gpus_that_are_named(tmp_path: Path) -> None:
    """As in the plan of devices: `actors check --gpus 2` on a laptop."""
    assert config_auto(tmp_path, 2)["model.row_multiple"] == "256"
    assert config_auto(tmp_path, 0)["model.row_multiple"] == "1"


def test_the_embedded_engine_on_a_gpu_is_advised_against(tmp_path: Path) -> None:
    """With the reason, where the machine has a GPU; on a CPU it is the engine of choice."""
    assert config_auto(tmp_path, 1)["inference.engine.type"] == "embedded"
    assert "inference.engine.type" not in config_auto(tmp_path, 0)


def test_what_a_gpu_would_make_faster_is_told(tmp_path: Path) -> None:
    """Compiled layers, and prompts counted once, which the packer decides by the name of the device alone."""
    taken = config_auto(tmp_path, 1)
    assert taken["model.compile"] == "false"
    assert taken["packer.count_prompts"] == "per_completion"
    assert not {"model.compile", "packer.count_prompts"} & config_auto(tmp_path, 0).keys()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_prompts_are_counted_as_it_is_told(tmp_path: Path, device: Any) -> None:
    """The packer decides alike."""
    config = run_config(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    taken = {choice.key: choice.taken for choice in computation(config, 1)}["packer.count_prompts"]
    assert (taken == "once") is prompts_count_once(config)


def config_auto(tmp_path: Path, num_gpus: int) -> dict[str, str]:
    """What is taken by a run whose device is not decided, by key."""
    config = run_config(tmp_path)
    model = config.model.model_copy(update={"device": "auto"})
    packer = config.packer.model_copy(update={"sequence_len": 2048})
    changed = config.model_copy(update={"model": model, "packer": packer})
    return {choice.key: choice.taken for choice in computation(changed, num_gpus)}


def test_a_run_without_a_model_has_nothing_to_tell(tmp_path: Path) -> None:
    """Made-up completions."""
    config = run_config(tmp_path)
    engine = config.inference.engine.model_copy(update={"loads_model": False})
    changed = config.inference.model_copy(update={"engine": engine})
    assert computation(config.model_copy(update={"inference": changed})) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiler", [None, "gcc"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("torch_version", ["2.10.0", "2.11.0+cu130"])
def test_the_attention_is_the_one_that_the_trainer_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, compiler: str | None, device: Any, torch_version: str
) -> None:
    """Both choose alike, for each combination."""
    model = ModelConfig(path="m", dtype=dtype)
    monkeypatch.setattr(module, "version", lambda name: torch_version)
    for place in (module, attention_of_models):
        monkeypatch.setattr(place, "c_compiler", lambda: compiler)
    monkeypatch.setattr(attention_of_models, "has_varlen", lambda: torch_version.startswith("2.11"))
    taken = attention(model, on_gpu=device == "cuda").taken
    assert attention_of_models.NAMES[taken] == attention_of_models.implementation(model, torch.device(device))


def test_no_torch_is_loaded_for_it() -> None:
    """A check takes a second."""
    code = "import sys, actors.ops.computation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
