"""What a model must be, and how weights are put into one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.models import loading
from actors.process import tasks
from actors.process.tasks import Task
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError
from tests.conftest import ModelFolder


def model_config(folder: Path) -> ModelConfig:
    """Configuration of a model directory on the CPU."""
    return ModelConfig(path=str(folder), dtype="float32", device="cpu")


def test_a_directory_without_a_model_is_refused_by_key(tmp_path: Path) -> None:
    """The message names model.path and the directory."""
    with pytest.raises(ConfigError, match=f"model.path: {tmp_path} can't be loaded"):
        loading.load_model(model_config(tmp_path), torch.float32)


def test_a_model_whose_layers_carry_state_is_refused(tmp_path: Path) -> None:
    """In a packed row its state would run from one sample into the next."""
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=30, hidden_size=16, state_size=4, num_hidden_layers=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        loading.load_model(model_config(tmp_path), torch.float32)


def test_a_model_with_attention_sinks_is_refused(tmp_path: Path) -> None:
    """gpt-oss adds a learned logit to each softmax; the packed attention would leave it out in silence."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attention sinks"):
        loading.load_model(model_config(tmp_path), torch.float32)


def test_lora_on_a_module_that_does_not_exist_is_refused_by_key(model_folder: ModelFolder) -> None:
    """The message names model.lora.target_modules."""
    config = model_config(model_folder()).model_copy(update={"lora": LoraConfig(target_modules=["nonsense"])})
    model = loading.load_model(config, torch.float32)
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules: .*nonsense"):
        loading.add_lora(model, config)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"a": torch.ones(2)}, r"missing \['b'\]"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, r"unknown \['c'\]"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, r"b has shape \(4,\), the model has \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_overwrite_nothing(given: dict[str, torch.Tensor], problem: str) -> None:
    """The message names the tensor, and the one that would have fitted is untouched as well."""
    targets = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=problem):
        loading.copy_into(targets, given, "published weights")
    assert not targets["a"].any()


def test_the_precision_of_a_models_files_is_read_from_their_headers(tmp_path: Path) -> None:
    """A folder with one precision has it; one with two, or without a file, has none."""
    assert loading.stored_dtype(str(tmp_path)) is None
    save_file({"a": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert loading.stored_dtype(str(tmp_path)) is torch.bfloat16
    save_file({"b": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    assert loading.stored_dtype(str(tmp_path)) is None
    (tmp_path / "model-2.safetensors").write_bytes(b"no such file format")
    assert loading.stored_dtype(str(tmp_path)) is None
    assert loading.stored_dtype("nobody/has-downloaded-this") is None


def test_the_load_of_a_model_is_a_task_that_counts_its_tensors(
    model_folder: ModelFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And none is under way once it is loaded. Transformers draws no bar then, nor when it writes a checkpoint."""
    found: list[tuple[str, float, float, str]] = []

    class Recorder:
        def told(self, task: Task) -> None:
            found.append((task.name, task.done, task.total, task.unit))

        def ended(self, task: Task) -> None:
            self.told(task)

    folder = model_folder()
    tasks.tell_by(Recorder())
    try:
        model = loading.load_model(model_config(folder), torch.float32)
    finally:
        tasks.tell_by(None)
    name, done, total, unit = found[-1]
    assert (name, unit) == (f"load model {folder.name}", "tensors")
    assert 0 < done == total <= len(list(model.parameters()))
    assert tasks.reported() is None
    model.save_pretrained(tmp_path / "written")  # type: ignore[operator]
    assert (tmp_path / "written" / "model.safetensors").is_file()
    assert "\r" not in capfd.readouterr().err
