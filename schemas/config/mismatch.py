"""Keys of `trainer.mismatch`: how far the logprobs of trainer and engine may differ."""

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free


class MismatchConfig(Section):
    """Limits of the mean |logp − q| per token in nats: logp by the trainer, q by the engine.

    Tokens of current weights and of older weights are averaged apart; the larger mean counts. Engine `fake` is not
    compared.
    """

    warn: Free[float] = Field(0.1, gt=0)
    """Nats above which the log names the likely cause, once per cause."""
    stop: Free[float | None] = Field(0.7, gt=0)
    """Nats above which the step is not applied and the run fails with the same message. Empty: never."""

    @model_validator(mode="after")
    def _warns_first(self) -> "MismatchConfig":
        if self.stop is not None and self.stop < self.warn:
            raise ValueError(f"stop: {self.stop} is below warn: {self.warn}")
        return self
