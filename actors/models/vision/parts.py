"""Parts of a vision-language model: recognition, the vision tower, and what of it is trained.

A vision-language model has a vision tower, a projector that makes features as wide as the token embeddings, and
language layers. Tower and projector are one module, and stay frozen: language layers alone are trained, as a whole or
by adapters. A frozen tower gives an image the same features in trainer and engine under every policy version.
"""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

MODEL_TYPES = ("qwen3_vl", "qwen2_5_vl")
"""Supported vision-language models, by `model_type` in config.json."""
VISION = "visual"
"""Name of the module with vision tower and projector in these models."""
IN_VISION = rf"(.+\.)?{VISION}(\..+)?"
"""Regular expression for names of modules inside vision tower and projector."""


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


def freeze_vision(model: nn.Module) -> None:
    """Exclude vision tower and projector from training."""
    part = vision_part(model)
    if part is not None:
        part.requires_grad_(False)
