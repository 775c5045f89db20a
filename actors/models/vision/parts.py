"""Parts of a vision-language model: recognition, the vision tower, and what of it is trained.

A vision-language model has a vision tower, a projector that makes features as wide as the token embeddings, and
language layers. Tower and projector are one module. Language layers are trained, as a whole or by adapters; tower and
projector are frozen, unless a key says otherwise. A frozen tower with a frozen projector gives an image the same
features in trainer and engine under every policy version.
"""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

MODEL_TYPES = ("qwen3_vl", "qwen2_5_vl")
"""Supported vision-language models, by `model_type` in config.json."""
VISION = "visual"
"""Name of the module with vision tower and projector in these models."""
IN_VISION = rf"(.+\.)?{VISION}(\..+)?"
"""Regular expression for names of modules inside vision tower and projector."""
PROJECTOR = ("merger", "deepstack_merger_list")
"""Names of the projector's modules inside the module with both."""


def is_vision_language(described: Any) -> bool:
    """Return whether a model's configuration is that of a supported vision-language model."""
    return getattr(described, "model_type", None) in MODEL_TYPES


def auto_class(described: Any) -> Any:
    """Return transformers' class that loads a language model with this configuration.

    Raises:
        ValueError: the model sees images, and is of no supported type.
    """
    if is_vision_language(described):
        return AutoModelForImageTextToText
    # some models with a vision tower are known to transformers as language models too; these are loaded as such
    known: Any = AutoModelForCausalLM._model_mapping
    if getattr(described, "vision_config", None) is not None and type(described) not in known:
        raise ValueError(
            f"is a vision-language model of type {described.model_type}, and the supported types are "
            f"{', '.join(MODEL_TYPES)}"
        )
    return AutoModelForCausalLM


def attention_by_part(described: Any, kernel: str) -> str | dict[str, str]:
    """Return the attention of each part of a model, for transformers; `kernel` is that of the language layers."""
    if not is_vision_language(described):
        return kernel
    # each image is a call of its own in the tower, with no row and no cache that the other kernels ask for
    return {"": kernel, "text_config": kernel, "vision_config": "sdpa"}


def vision_part(model: nn.Module) -> nn.Module | None:
    """Return the vision tower with its projector, under an adapter too; None for a model of text alone."""
    return next((module for name, module in model.named_modules() if name.rpartition(".")[2] == VISION), None)


def in_projector(name: str) -> bool:
    """Return whether a module or parameter is the projector's, by its name inside vision tower and projector."""
    return name.partition(".")[0] in PROJECTOR


def frozen_in_vision(config: ModelConfig) -> str | None:
    """Return a regular expression for names of modules of the frozen parts; None if no part is frozen."""
    projector = rf"({'|'.join(PROJECTOR)})(\..+)?"
    frozen = {
        (False, False): IN_VISION,
        (False, True): rf"(.+\.)?{VISION}(\.(?!{projector}$).+)?",
        (True, False): rf"(.+\.)?{VISION}\.{projector}",
    }
    return frozen.get((config.train_vision_tower, config.train_projector))


def freeze_vision(model: nn.Module, config: ModelConfig) -> None:
    """Exclude the frozen parts of vision tower and projector from training.

    Raises:
        ConfigError: a part shall be trained, and the model has none.
    """
    part = vision_part(model)
    if part is None:
        if config.trained_vision:
            raise ConfigError(
                f"model.{config.trained_vision[0]}: {config.path} has no vision tower; remove the key, or name a "
                "vision-language model in model.path"
            )
        return
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(config.train_projector if in_projector(name) else config.train_vision_tower)


def check_adapted(model: nn.Module, config: ModelConfig) -> None:
    """Check that each part of vision tower and projector that shall be trained has adapters.

    Raises:
        ConfigError: no module of a part has an adapter; names its key.
    """
    part = vision_part(model)
    trained = {in_projector(name) for name, p in part.named_parameters() if p.requires_grad} if part else set()
    for key in config.trained_vision:
        if (key == "train_projector") not in trained:
            raise ConfigError(
                f"model.{key}: model.lora.target_modules names no layer of this part; set target_modules: all-linear, "
                f"add the part's layers, or remove model.{key}"
            )
