"""Keys of `inference.noise`: noise on the policy that engines serve."""

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free


class NoiseConfig(Section):
    """Normal noise on the RMSNorm weights of the served policy, for more exploration (QeRL; Surogate: noise_scheduler).

    The steps of the run are cut into `num_stages` equal stages. The first has no noise; from the second to the last the
    standard deviation falls by equal factors. Trainer weights stay clean; evaluations are sampled with noise too.
    """

    sigma_start: Free[float] = Field(5e-2, gt=0)
    """Standard deviation in the second stage. The first stage has none."""
    sigma_end: Free[float] = Field(5e-4, gt=0)
    """Standard deviation in the last stage; at most sigma_start."""
    num_stages: Free[int] = Field(10, ge=1)
    """Number of stages, each of trainer.max_steps ÷ num_stages steps. With 1 or 2 the first half of the run has no
    noise and the second half has sigma_start."""

    @model_validator(mode="after")
    def _falls(self) -> "NoiseConfig":
        if self.sigma_end > self.sigma_start:
            raise ValueError(f"sigma_end: {self.sigma_end} is above sigma_start: {self.sigma_start}")
        return self
