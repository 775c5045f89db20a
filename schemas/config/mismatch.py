"""The watch over trainer and engine: `trainer.mismatch`."""

from pydantic import Field, model_validator

from schemas.config.base import Section


class MismatchConfig(Section):
    """Limits of mean |logp − q| per token, trainer against engine, in nats. Engine `fake` has no policy to compare."""

    warn: float = Field(0.1, gt=0)
    """Above it the log says what is likely wrong, once for each cause."""
    stop: float | None = Field(0.7, gt=0)
    """Above it the step is not applied and the run fails, with the same words; null: never."""

    @model_validator(mode="after")
    def _warns_first(self) -> "MismatchConfig":
        if self.stop is not None and self.stop < self.warn:
            raise ValueError(f"stop: {self.stop} is below warn: {self.warn}")
        return self
