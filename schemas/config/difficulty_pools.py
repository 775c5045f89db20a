"""Keys of `packer.pools`: difficulty pools (docs/reference/sampling.md)."""

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free


class DifficultyPoolsConfig(Section):
    """Difficulty pools (Surogate, prime-rl: buffer): easy and hard examples are set aside and not sampled again.

    The mean reward of an example's newest group decides. Examples of generated environments never repeat, so pools do
    nothing there.
    """

    easy_threshold: Free[float | None] = None
    """Mean reward at and above which an example is easy. Empty: no example is. At least one of the two thresholds must
    be set."""
    hard_threshold: Free[float | None] = None
    """Mean reward at and below which an example is hard; must be below easy_threshold. Empty: no example is."""
    easy_fraction: Free[float] = Field(0.0, ge=0, le=1)
    """Share of the easy examples that a restart of the run returns to sampling, at least one example unless 0."""
    hard_fraction: Free[float] = Field(0.0, ge=0, le=1)
    """Share of the hard examples that a restart of the run returns to sampling, at least one example unless 0."""
    hash_keys: Free[list[str]] = Field(["task", "prompt"], min_length=1)
    """Parts of an example that identify it: `task` (the environment's name), `prompt`, or columns of the data. A change
    of this list empties all pools."""

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> "DifficultyPoolsConfig":
        if self.easy_threshold is None and self.hard_threshold is None:
            raise ValueError("easy_threshold or hard_threshold is needed, else nothing is ever set aside")
        both = self.easy_threshold is not None and self.hard_threshold is not None
        if both and self.hard_threshold >= self.easy_threshold:  # type: ignore[operator]
            raise ValueError(f"hard_threshold {self.hard_threshold} must be below easy_threshold {self.easy_threshold}")
        return self
