"""Files of `actors quantize`, read by the packages that servers read them with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from actors.models.quantized.codes import FORMATS
from actors.ops.quantize import quantize
from tests import models

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("name", "tolerance"), [("fp8", 0.0), ("nvfp4", 2.0**-8)])
def test_compressed_tensors_decodes_the_same_weights(name: str, tolerance: float, tmp_path: Path) -> None:
    """All layers: FP8 bit for bit; NVFP4 to a rounding, since the package decodes it in bfloat16."""
    models.build(tmp_path / "model")
    quantize(tmp_path / "model", name, tmp_path / "out")
    settings = CompressedTensorsConfig(dequantize=True)
    decoded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=settings
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layers = [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]
    assert len(layers) == 2 * 7
    for layer in layers:
        own = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{layer}.")}
        ours, theirs = FORMATS[name].decode(own), decoded.get_submodule(layer).weight.float()
        assert float(((ours - theirs).abs() - tolerance * ours.abs()).max()) <= 0, layer
