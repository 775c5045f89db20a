"""Level of an environment's examples that moves with the model's success.

Examples are laid out level by level: index `level · size + place`, so that the index in a ticket and in the ledger says
the level, for ever. The state is the level, a count of draws per level and the newest rewards. It is committed with the
tickets drawn from it and the groups noted in it.
"""

from collections.abc import Mapping
from typing import Any

from schemas.config.environments import CurriculumConfig


class MovingLevel:
    """Level of one environment.

    Args:
        config: number of levels, and the mean rewards at which the level moves.
        stored: `state` of an earlier process; None for a new run.
    """

    def __init__(self, config: CurriculumConfig, stored: Mapping[str, Any] | None = None) -> None:
        self._config = config
        known = dict(stored or {"level": config.start, "counts": [], "rewards": []})
        # a fork may have other levels: what is counted stays with the levels that both have
        self.level = min(int(known["level"]), config.levels - 1)
        self.counts: list[int] = [*known["counts"], *[0] * config.levels][: config.levels]
        """Number of examples drawn, by level."""
        self._rewards = [float(reward) for reward in known["rewards"]]
        self._is_changed = stored is None

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        return self._config.levels

    @property
    def state(self) -> dict[str, Any]:
        """State for the ledger, of numbers and lists."""
        return {"level": self.level, "counts": list(self.counts), "rewards": list(self._rewards)}

    def take(self) -> int:
        """Return how many examples of the present level have been drawn before, and count one more."""
        count = self.counts[self.level]
        self.counts[self.level] += 1
        self._is_changed = True
        return count

    def note(self, level: int, mean_reward: float) -> bool:
        """Note the mean reward of a group; return whether the level has moved.

        The newest `window` groups of the present level decide; groups of another level, drawn before the last move,
        count for nothing. Each move begins a new window, so that a level is kept for `window` groups at least.
        """
        if level != self.level:
            return False
        config = self._config
        self._rewards = [*self._rewards, mean_reward][-config.window :]
        self._is_changed = True
        if len(self._rewards) < config.window:
            return False
        mean, before = sum(self._rewards) / len(self._rewards), self.level
        if mean >= config.raise_at:
            self.level = min(self.level + 1, config.levels - 1)
        elif config.lower_at is not None and mean <= config.lower_at:
            self.level = max(self.level - 1, 0)
        if self.level == before:
            return False
        self._rewards = []
        return True

    def take_changed(self) -> bool:
        """Return whether the state has changed since the last call."""
        taken, self._is_changed = self._is_changed, False
        return taken
