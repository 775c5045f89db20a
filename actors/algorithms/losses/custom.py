"""Loss of type `custom`: the user's function, loaded by the caller (this package imports no user code)."""

from collections.abc import Callable

from actors.algorithms.losses.inputs import LossInputs, LossOutput
from schemas.config.losses import CustomLossConfig

CustomLoss = Callable[[LossInputs], LossOutput]
"""User function from a micro-batch to its share of the loss."""


def custom(inputs: LossInputs, config: CustomLossConfig, function: CustomLoss | None) -> LossOutput:
    """Return the result of the user's function for a micro-batch.

    Raises:
        ValueError: the function is None.
        TypeError: the function does not return a LossOutput.
    """
    if function is None:
        raise ValueError(f"trainer.loss.path: the function {config.path} was not handed in")
    output = function(inputs)
    if not isinstance(output, LossOutput):
        raise TypeError(f"trainer.loss.path: {config.path} returned a {type(output).__name__}, expected a LossOutput")
    return output
