"""Writing of a folder with codes from a model in 16 or 32 bits, for trainer and engines alike."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from actors.models.quantized.codes import Codes
from actors.models.quantized.scheme import described
from actors.models.vision.parts import auto_class, vision_part
from actors.process.tasks import task
from schemas.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth", "*.gguf")
"""Files that are not copied, since they hold weights."""


def write_quantized(model: Path, codes: Codes, output: Path) -> tuple[int, int]:
    """Write a model's folder again with codes for its linear layers, except the output layer and a vision tower.

    Args:
        model: folder of a model for transformers, with safetensors files.
        codes: the number format.
        output: folder to write; must not exist, or be empty.

    Returns:
        Number of layers with codes, and bytes of all tensors.

    Raises:
        ConfigError: the model can't be read, has codes already, or has no layer that can have the format.
    """
    # imported here: transformers needs it, so it is installed
    from huggingface_hub import save_torch_state_dict

    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output: {output} is not empty; name a new folder")
    if output.resolve() == model.resolve():
        raise ConfigError("--output: is the folder of the model itself; name a new folder")
    config = _described(model)
    layers, rest = linear_layers(config)
    with ExitStack() as stack:
        tensors = _tensors(model, stack)
        taken = {
            name: path
            for path, inputs in layers.items()
            if (name := f"{path}.weight") in tensors and not codes.problem(inputs)
        }
        if not taken:
            raise ConfigError(f"MODEL: {model} has no linear layer that can have {codes.name} weights")
        written: dict[str, Tensor] = {}
        with task(f"quantise {model.name}", len(tensors), "tensors") as quantising:
            for name, file in tensors.items():
                weight = file.get_tensor(name)
                if name in taken:
                    siblings = [tensors[other].get_tensor(other) for other in _siblings(name, taken, layers)]
                    found = codes.encode(weight, siblings)
                    written |= {f"{taken[name]}.{part}": tensor for part, tensor in found.items()}
                else:
                    written[name] = weight
                quantising.advance()
        output.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(written, str(output))
    for file in model.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHTS):
            shutil.copy2(file, output / file.name)
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    ignored = sorted(set(layers) - set(taken.values())) + rest
    settings["quantization_config"] = described(codes, ignored)
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(taken), sum(tensor.nbytes for tensor in written.values())


def linear_layers(config: Any) -> tuple[dict[str, int], list[str]]:
    """Return the number of inputs of each linear layer of a model's language layers by name, and the names of the rest.

    The rest are the output layer, and the linear layers of a vision tower.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    head, tower = model.get_output_embeddings(), vision_part(model)
    apart = {head, *(tower.modules() if tower is not None else ())}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {name: module.in_features for name, module in linear.items() if module not in apart}
    return layers, [name for name in linear if name not in layers]


def _described(model: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(model)
        auto_class(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"MODEL: {model} can't be read: {str(error).splitlines()[0]}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"MODEL: {model} is quantised already; take the model in 16 bits")
    return config


def _tensors(model: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the opened file of each tensor of a folder, by name."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"MODEL: {model} has no safetensors file")
    opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _siblings(name: str, taken: Mapping[str, str], layers: Mapping[str, int]) -> Iterator[str]:
    """Yield the tensors of layers with the same parent and number of inputs: an engine may join them."""
    path = taken[name]
    parent = path.rpartition(".")[0]
    for other, layer in taken.items():
        if other != name and layer.rpartition(".")[0] == parent and layers[layer] == layers[path]:
            yield other
