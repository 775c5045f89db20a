"""Published weights have the names of a model's files, as views: what is written into them is in the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps

from actors.models import file_names as module
from actors.models.file_names import FileNames, file_names
from actors.models.loading import full_tensors
from schemas.errors import ConfigError
from tests import models
from tests.conftest import ModelFolder

JOINED = ["qwen3_moe", "mixtral"]


def model_of(family: str) -> Any:
    """With random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(models.config(family))


@pytest.mark.parametrize("family", [*JOINED, "qwen3", "gemma2", "llama"])
def test_weights_have_the_names_and_values_of_the_files_that_transformers_writes(family: str, tmp_path: Path) -> None:
    """Experts one by one, and layers under the names of the files."""
    model = model_of(family)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    found = dict(FileNames(model).views(full_tensors(model).items()))
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor), name
    assert any("experts.3." in name for name in found) == (family in JOINED)


@pytest.mark.parametrize("family", JOINED)
def test_what_is_written_into_a_view_is_in_the_model(family: str) -> None:
    """As an engine takes a version over: in place."""
    model, other = model_of(family), model_of(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0).add_(0.5)
        targets = dict(file_names(model).views(full_tensors(model).items()))
        for name, tensor in file_names(other).views(full_tensors(other).items()):
            targets[name].copy_(tensor)
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3"])
def test_models_whose_weights_are_not_joined_keep_their_names(family: str, model_folder: ModelFolder) -> None:
    """Vision towers among them."""
    model = models.plain(model_folder(family))
    tensors = full_tensors(model)
    assert list(dict(file_names(model).views(tensors.items()))) == list(tensors)


def test_a_way_of_joining_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained: nothing is published under names that no engine has."""

    class Rolled(ConversionOps):
        """An operation of a later transformers."""

        def convert(self, *_: Any, **__: Any) -> Any:
            """Not called."""

    converters = module.get_model_conversion_mapping(model_of("qwen3_moe"), add_legacy=False)
    reverse = converters[0].reverse_transform()
    reverse.operations = [Rolled()]
    monkeypatch.setattr(type(converters[0]), "reverse_transform", lambda _: reverse)
    monkeypatch.setattr(module, "get_model_conversion_mapping", lambda *_, **__: converters[:1])
    with pytest.raises(ConfigError, match="Rolled can't be undone without a copy"):
        FileNames(model_of("qwen3_moe"))
