"""A loss of the user's own, by its path."""

from collections.abc import Callable
from functools import cache

from actors.algorithms.losses.inputs import LossInputs, LossOutput
from actors.user_functions import load_function
from schemas.config.losses import CustomLossConfig


def custom(inputs: LossInputs, config: CustomLossConfig) -> LossOutput:
    """What the function at `path` makes of a micro-batch.

    Raises:
        ConfigError: it can't be found or can't be called.
        TypeError: it returns something else than a LossOutput.
    """
    output = _function(config.path)(inputs)
    if not isinstance(output, LossOutput):
        raise TypeError(f"trainer.loss.path: {config.path} returned a {type(output).__name__}, expected a LossOutput")
    return output


@cache
def _function(path: str) -> Callable[..., object]:
    return load_function(path, "trainer.loss.path")
