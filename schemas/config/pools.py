"""Difficulty pools: examples that teach nothing more, or nothing yet, are set aside (docs/algorithms.md)."""

from pydantic import Field, model_validator

from schemas.config.base import Section


class PoolsConfig(Section):
    """What Surogate and prime-rl call a buffer: only examples that are neither easy nor hard are drawn.

    Which they are, the mean reward of their newest group tells. Environments that never end have no pools.
    """

    easy_threshold: float | None = None
    """Groups with this mean reward or more make their example easy."""
    hard_threshold: float | None = None
    """Groups with this mean reward or less make their example hard."""
    easy_fraction: float = Field(0.0, ge=0, le=1)
    """Share of the easy examples that is normal again when the run is started again (at least one, unless 0)."""
    hard_fraction: float = Field(0.0, ge=0, le=1)
    """The same of the hard ones."""
    hash_keys: list[str] = Field(["task", "prompt"], min_length=1)
    """What makes two examples the same: `task` (the environment's name), `prompt`, or columns of the data. When the
    list is changed, all pools are empty."""

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> "PoolsConfig":
        if self.easy_threshold is None and self.hard_threshold is None:
            raise ValueError("easy_threshold or hard_threshold is needed, else nothing is ever set aside")
        both = self.easy_threshold is not None and self.hard_threshold is not None
        if both and self.hard_threshold >= self.easy_threshold:  # type: ignore[operator]
            raise ValueError(f"hard_threshold {self.hard_threshold} must be below easy_threshold {self.easy_threshold}")
        return self
