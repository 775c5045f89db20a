"""Noise on the inference policy: `inference.noise`."""

from pydantic import Field, model_validator

from schemas.config.base import Section


class NoiseConfig(Section):
    """QeRL: normal noise on the RMSNorm weights of the inference policy, in stages over `trainer.max_steps`.

    Surogate's noise_scheduler. Evaluations are sampled with it, too.
    """

    sigma_start: float = Field(5e-2, gt=0)
    """Standard deviation of the second stage; the first one has none."""
    sigma_end: float = Field(5e-4, gt=0)
    """Of the last one."""
    num_stages: int = Field(10, ge=1)
    """Stages, of equally many steps; between the second and the last the deviation falls by equal factors."""

    @model_validator(mode="after")
    def _falls(self) -> "NoiseConfig":
        if self.sigma_end > self.sigma_start:
            raise ValueError(f"sigma_end: {self.sigma_end} is above sigma_start: {self.sigma_start}")
        return self
