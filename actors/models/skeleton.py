"""A model without values: all modules and shapes of a policy, built from its config.json alone."""

from typing import Any

import torch

from actors.models import attention, loading
from actors.models.quantized.loading import hold_bytes, replace_layers
from actors.models.quantized.scheme import read_scheme
from actors.models.vision.parts import attention_by_part, auto_class, freeze_vision
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError


def skeleton(config: ModelConfig, key: str = "model.path") -> Any:
    """Return the base model on torch's device meta, in the configured precision, in training mode.

    Args:
        config: configuration of the model.
        key: configuration key of the model, for errors.

    Raises:
        ConfigError: config.json can't be read, or transformers can't build the model.
    """
    described = loading.described(config, key)
    by_part = attention_by_part(described, attention.PADDED)
    try:
        with torch.device("meta"):
            model = auto_class(described).from_config(
                described,
                dtype=loading.TORCH_DTYPES[config.dtype],
                attn_implementation=by_part,
                trust_remote_code=config.trust_remote_code,
            )
            if scheme := read_scheme(getattr(described, "quantization_config", None), key):
                replace_layers(model, scheme)
                hold_bytes(model)
    except ValueError as error:
        raise ConfigError(f"{key}: {config.path} can't be loaded: {str(error).splitlines()[0]}") from error
    freeze_vision(model, config)
    return model.train()  # checkpointing works in no other mode
