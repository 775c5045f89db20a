"""What config.json says of a model's codes, and folders that `actors quantize` writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen2Config

from actors.models.loading import load_model
from actors.models.quantized.codes import FORMATS, Fp8Codes
from actors.models.quantized.layer import QuantizedLinear
from actors.models.quantized.scheme import described, read_scheme
from actors.ops.quantize import quantize
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from tests import models


def config(path: Path, **keys: Any) -> ModelConfig:
    """A model of a run with adapters."""
    return ModelConfig.model_validate(
        {"path": str(path), "device": "cpu", "dtype": "float32", "lora": {"rank": 2}} | keys
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied model."""
    models.build(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_a_written_folder_loads_with_the_codes_of_each_layer(name: str, family: str, tmp_path: Path) -> None:
    """All linear layers but the output layer; everything else has its bits; logits are near the model's."""
    models.build(tmp_path / "model", family)
    quantize(tmp_path / "model", name, tmp_path / "out")
    plain = models.plain(tmp_path / "model", "eager")
    found: Any = load_model(config(tmp_path / "out"), torch.float32, attention="eager")
    layers = {key: module for key, module in found.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == 2 * 7
    for key, layer in layers.items():
        expected = FORMATS[name].decode(FORMATS[name].encode(weight := plain.get_submodule(key).weight.data))
        # the factor of NVFP4 is shared with siblings, so the codes of one layer alone may differ
        near = 0.2 if name == "nvfp4" else 0.0
        assert float((layer.decoded().detach() - expected).norm() / weight.norm()) <= near, key
    others = {key: tensor for key, tensor in plain.state_dict().items() if key.rpartition(".")[0] not in layers}
    for key, tensor in others.items():
        assert torch.equal(found.state_dict()[key], tensor), key
    tokens = torch.tensor([[1, 10, 11, 12, 13]])
    with torch.no_grad():
        pair = torch.stack([model(tokens).logits.flatten() for model in (found.eval(), plain)])
    assert torch.corrcoef(pair)[0, 1] > (0.98 if name == "fp8" else 0.8)


def test_a_layer_with_a_bias_keeps_it(tmp_path: Path) -> None:
    """Qwen2 has one at q, k and v."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**models.SMALL))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", "fp8", tmp_path / "out")
    found = load_model(config(tmp_path / "out"), torch.float32, attention="sdpa")
    layer = found.get_submodule("model.layers.1.self_attn.k_proj")
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(layer.bias, model.get_submodule("model.layers.1.self_attn.k_proj").bias)


def test_a_vision_tower_keeps_its_weights(tmp_path: Path) -> None:
    """Language layers have codes; tower and projector are as in the model."""
    models.build(tmp_path / "model", "qwen3_vl")
    quantize(tmp_path / "model", "fp8", tmp_path / "out")
    before, after = (
        load_model(config(path), torch.float32, attention="sdpa") for path in (tmp_path / "model", tmp_path / "out")
    )
    layers = [name for name, module in after.named_modules() if isinstance(module, QuantizedLinear)]
    assert layers
    assert all("language_model" in name for name in layers)
    vision = {name: tensor for name, tensor in before.state_dict().items() if ".visual." in name}
    assert vision
    for name, tensor in vision.items():
        assert torch.equal(after.state_dict()[name], tensor), name


def test_files_of_the_model_travel_along(folder: Path) -> None:
    """Tokenizer and generation settings are copied; config.json names the layers that stay as they are."""
    words = quantize(folder, "nvfp4", folder.parent / "out")
    assert "14 linear layers with 4.5 bits a weight" in words
    out = folder.parent / "out"
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").is_file()
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "nvfp4-pack-quantized"
    assert settings["ignore"] == ["lm_head"]
    with safe_open(out / "model.safetensors", "pt") as opened:
        names = set(opened.keys())
    assert "model.layers.0.self_attn.q_proj.weight_packed" in names
    assert "model.layers.0.self_attn.q_proj.weight" not in names


def test_joined_layers_have_one_factor_in_the_files(folder: Path) -> None:
    """Engines join q, k and v, and gate and up."""
    quantize(folder, "nvfp4", folder.parent / "out")
    with safe_open(folder.parent / "out" / "model.safetensors", "pt") as opened:
        for parent, names in (("self_attn", ["q_proj", "k_proj", "v_proj"]), ("mlp", ["gate_proj", "up_proj"])):
            key = "model.layers.1.{}.{}.weight_global_scale"
            factors = {float(opened.get_tensor(key.format(parent, name))) for name in names}
            assert len(factors) == 1, parent


@pytest.mark.parametrize("target", ["Linear", "re:.*mlp.*", "model.layers.0.mlp.up_proj"])
def test_targets_and_ignored_layers_are_names_expressions_or_all(target: str) -> None:
    """The ignored layers win."""
    tree = described(Fp8Codes(), ["re:.*down_proj", "lm_head"])
    tree["config_groups"]["group_0"]["targets"] = [target]
    scheme = read_scheme(tree, "model.path")
    assert scheme is not None
    assert scheme.codes_of("model.layers.0.mlp.up_proj") == Fp8Codes()
    assert scheme.codes_of("model.layers.0.mlp.down_proj") is None
    assert (scheme.codes_of("model.layers.0.self_attn.q_proj") is None) == (target != "Linear")


def test_fp8_of_other_makers_is_read(folder: Path) -> None:
    """Scales per tensor and per block, in bfloat16, as published models have them."""
    for codes, strategy in ((Fp8Codes(per_row=False), "tensor"), (Fp8Codes((16, 16)), "block")):
        tree = described(Fp8Codes(), ["lm_head"])
        weights = tree["config_groups"]["group_0"]["weights"]
        weights |= {"strategy": strategy, "block_structure": [16, 16]}
        scheme = read_scheme(tree, "model.path")
        assert scheme is not None
        assert scheme.codes_of("x") == codes


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, "4 bits of type int, strategy group"),
        ({"num_bits": 8, "type": "float", "strategy": "token"}, "8 bits of type float, strategy token"),
    ],
)
def test_other_codes_are_refused_by_name(weights: dict[str, Any], words: str) -> None:
    """Never computed wrongly in silence."""
    tree = described(Fp8Codes(), [])
    tree["config_groups"]["group_0"]["weights"] = weights
    with pytest.raises(ConfigError, match=words):
        read_scheme(tree, "model.path")


def test_an_unusable_model_or_folder_is_named(folder: Path) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigError, match="there is no folder"):
        quantize(folder / "missing", "fp8", folder.parent / "out")
    with pytest.raises(ConfigError, match=r"--output: .* is not empty"):
        quantize(folder, "fp8", folder)
    quantize(folder, "fp8", folder.parent / "out")
    with pytest.raises(ConfigError, match="is quantised already"):
        quantize(folder.parent / "out", "nvfp4", folder.parent / "again")
    assert not (folder.parent / "again").exists()
