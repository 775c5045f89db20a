"""Output layer in float32 behind layers of 16 bits (`model.head_dtype`), where whole logits are computed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from schemas.errors import ConfigError


def use_exact_head(model: nn.Module) -> None:
    """Let the output layer of a model compute float32 logits, of its weights as they are at each call.

    Args:
        model: causal language model, with its adapter if it has one.

    Raises:
        ConfigError: the output layer is not a plain linear one.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    is_plain = type(head) is nn.Linear
    if not is_plain:
        raise ConfigError(refusal(f"the output layer is {type(head).__name__}, not a plain linear one"))

    def exact(hidden: Tensor) -> Tensor:
        # autocast would round the product
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.float()
            return linear(hidden.float(), head.weight.float(), bias)

    head.forward = exact


def refusal(why: str) -> str:
    """Return the error for a model whose output layer can't be computed in float32."""
    return f"model.head_dtype: float32 is not possible: {why}; set model"
