"""Packages and programs that not every installation has, and that some configurations need."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from actors.process.devices import visible_gpus
from actors.process.packages import c_compiler, is_installed
from schemas.config import RunConfig
from schemas.config.data import DatasetConfig
from schemas.config.optimizers import AdamW8bitConfig


def not_installed(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, name and installation advice of each package or program that the run needs and this machine lacks."""
    engine, packages = config.inference.engine, list[tuple[str, str, str]]()
    if not config.inference.attached:
        packages += [("inference.engine.type", *package) for package in engine.packages()]
    if engine.loads_model and config.model.lora is not None:
        packages.append(("model.lora", "peft", "grpo-actors[lora]"))
    if engine.loads_model and config.model.quantization is not None:
        packages.append(("model.quantization", "accelerate", "grpo-actors[bnb]"))
        packages.append(("model.quantization", "bitsandbytes", "grpo-actors[bnb]"))
    if engine.loads_model and isinstance(config.trainer.optimizer, AdamW8bitConfig):
        packages.append(("trainer.optimizer.type", "bitsandbytes", "grpo-actors[bnb]"))
    if engine.loads_model and config.model.attention == "flash":
        packages.append(("model.attention", "flash_attn", "flash-attn, or take auto"))
    if config.push_to_hub is not None:
        packages.append(("push_to_hub", "huggingface_hub", "grpo-actors[hub]"))
    for index, tracker in enumerate(config.telemetry.trackers):
        packages.append((f"telemetry.trackers.{index}", tracker.type, f"grpo-actors[{tracker.type}]"))
    for one in config.environments:
        if isinstance(one, DatasetConfig):
            packages += [(key, name, "grpo-actors[data]") for key, name in one.packages]
    yield from (package for package in packages if not is_installed(package[1]))
    # torch.compile calls the C++ compiler that CXX names, as torch reads the variable
    compiler = os.environ.get("CXX", "g++")
    if engine.loads_model and config.model.compile and shutil.which(compiler) is None:
        yield "model.compile", compiler, compiler
    # on a GPU, compiled layers and FlexAttention are Triton's kernels; attention in float32 is FlexAttention by default
    model = config.model
    flex = model.attention == "flex" or (model.attention == "auto" and model.dtype == "float32")
    # torch's kernel for rows has no soft cap, so such layers (Gemma 2) are computed by FlexAttention
    flex = flex or (model.attention in ("auto", "varlen") and _has_soft_cap(model.path))
    builds = engine.loads_model and model.device != "cpu" and (model.compile or flex)
    # the driver is asked last, and only if the answer matters
    if builds and visible_gpus() and c_compiler() is None:
        yield "model.compile" if model.compile else "model.attention", os.environ.get("CC", "gcc"), "gcc and libc6-dev"


def _has_soft_cap(path: str) -> bool:
    """Return whether a model's folder says that attention scores are capped; False for a name on the hub."""
    try:
        model = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told elsewhere
        return False
    # models of several kinds of input have the language model's values below a key of their own
    return any(
        isinstance(part, dict) and part.get("attn_logit_softcapping") for part in (model, model.get("text_config"))
    )
