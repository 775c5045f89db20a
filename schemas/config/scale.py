"""Keys of `scale`: roles whose number of processes follows the load."""

import math
from typing import Literal

from pydantic import Field, model_validator

from schemas.config.base import Section
from schemas.config.resume_classes import Free

ScaledRole = Literal["inference", "reward", "rollout"]


class RoleScaleConfig(Section):
    """Limits of the number of processes of a role."""

    min: Free[int] = Field(1, ge=1)
    """Least number of processes."""
    max: Free[int] = Field(ge=1)
    """Largest number of processes."""
    price: Free[float] = Field(0.0, ge=0)
    """Price of a process for an hour, in any currency."""
    max_cost: Free[float | None] = Field(None, gt=0)
    """Largest cost of the role for an hour, in the currency of `price`. There are never more than `max_cost` ÷ `price`
    processes. Empty: no limit."""

    @model_validator(mode="after")
    def _limits_agree(self) -> "RoleScaleConfig":
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is below min {self.min}")
        if self.max_cost is not None and not self.price:
            raise ValueError("max_cost: needs price, the cost of one process for an hour")
        if self.most < self.min:
            raise ValueError(
                f"max_cost: {self.max_cost:g} pays for {self.most} processes at price {self.price:g}, and min is "
                f"{self.min}; raise max_cost or lower min"
            )
        return self

    @property
    def most(self) -> int:
        """Largest number of processes that `max` and `max_cost` allow."""
        if self.max_cost is None or not self.price:
            return self.max
        # rounded: 0.3 at 0.1 pays for 3
        return min(self.max, math.floor(round(self.max_cost / self.price, 6)))


class ScaleConfig(Section):
    """Roles whose number of processes follows what limits the run. A role that is left out keeps its number."""

    inference: Free[RoleScaleConfig | None] = None
    """Inference actors: more while the trainer waits for samples, fewer while engines have nothing to do."""
    reward: Free[RoleScaleConfig | None] = None
    """Reward actors: more while the trainer waits and all of them are busy, fewer while they have room."""
    rollout: Free[RoleScaleConfig | None] = None
    """Rollout actors: more while the trainer waits, their slots are full and engines have room."""
    window: Free[float] = Field(30.0, ge=1)
    """Seconds of which the use of each role is averaged. A role grows after two windows that ask for it, and is given
    back after six."""

    @property
    def roles(self) -> dict[ScaledRole, RoleScaleConfig]:
        """Roles that may change, with their limits."""
        found: dict[ScaledRole, RoleScaleConfig | None] = {
            "inference": self.inference,
            "reward": self.reward,
            "rollout": self.rollout,
        }
        return {role: keys for role, keys in found.items() if keys is not None}
