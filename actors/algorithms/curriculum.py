"""Choice of the example for each new ordinal: a draw from the run's seed and the committed state, nothing else.

The state is a count of draws per environment, the examples set aside in difficulty pools, and the levels of those
environments that have levels. All of it is committed with the tickets of the draws, so a restarted packer continues
with the same draws.
"""

import random
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.difficulty_pools import DifficultyPools
from actors.algorithms.moving_levels import MovingLevel


class Curriculum:
    """Sampler of environments in proportion to weights, and of each environment's examples, shuffled, once per epoch.

    Args:
        num_examples: examples of each environment. None: endless; examples are taken in order, not shuffled.
        weights: relative weight of each environment (`environments[].weight`; prime-rl and Surogate:
            `buffer.env_ratios`). None: the number of examples; an endless environment counts as the largest.
        seed: of the run.
        pools: difficulty pools. Examples set aside are skipped, and drawn in later epochs once they are back.
        shuffled: for each environment, True to draw each epoch in another order, False in the order of the examples.
            None: True for all.
        levels: for each environment, its level, at which all examples are drawn; None: it has no levels. None: no
            environment has.
    """

    def __init__(
        self,
        num_examples: Sequence[int | None],
        weights: Sequence[float] | None,
        seed: int,
        pools: DifficultyPools | None = None,
        shuffled: Sequence[bool] | None = None,
        levels: Sequence[MovingLevel | None] | None = None,
    ) -> None:
        self.levels = list(levels) if levels else [None] * len(num_examples)
        # of an environment with levels only one level is drawn at a time
        num_examples = [
            n if n is None or level is None else n // level.num_levels
            for n, level in zip(num_examples, self.levels, strict=True)
        ]
        largest = max((n for n in num_examples if n is not None), default=1)
        self._num_examples, self._seed = list(num_examples), seed
        self._weights = list(weights) if weights else [float(largest if n is None else n) for n in num_examples]
        self.counts = [0] * len(num_examples)
        self._shuffled = list(shuffled) if shuffled else [True] * len(num_examples)
        self.pools = pools
        self._given_back: list[tuple[int, int]] = []
        self._orders: dict[tuple[int, ...], tuple[int, NDArray[np.int64]]] = {}
        """Newest epoch and its order of examples, by environment and level; a cache."""

    @property
    def shares(self) -> list[float]:
        """Share of each environment in the draws; the sum is 1."""
        return [weight / sum(self._weights) for weight in self._weights]

    def draw(self, excluded: Collection[int] = ()) -> tuple[int, int]:
        """Draw the example of the next ordinal: (environment, index of the example).

        Environments in `excluded` are left out, unless all are. An environment with all examples set aside gets all of
        them back. A run that continues on too easy examples shows in its rewards, while a run that stops at night is
        lost time.
        """
        # a generator per draw, seeded by the number of draws so far: no generator state has to be committed
        rng = random.Random(f"{self._seed} {sum(self.counts)}")
        weights = [0.0 if number in excluded else weight for number, weight in enumerate(self._weights)]
        weights = weights if any(weights) else self._weights
        environment = rng.choices(range(len(weights)), weights)[0] if len(self.counts) > 1 else 0
        if self.pools is not None and self.pools.is_exhausted(environment):
            self._given_back.append((environment, self.pools.give_back(environment)))
        index = self._next_index(environment)
        # ends within two epochs: at least one example of the environment is not set aside
        while self.pools is not None and self.pools.is_aside(environment, index):
            index = self._next_index(environment)
        return environment, index

    def take_given_back(self) -> list[tuple[int, int]]:
        """Return (environment, number of examples) of pools given back since the last call, for the log."""
        taken, self._given_back = self._given_back, []
        return taken

    def _next_index(self, environment: int) -> int:
        count, size = self.counts[environment], self._num_examples[environment]
        self.counts[environment] += 1
        if size is None:
            return count
        level, first = self.levels[environment], 0
        place: tuple[int, ...] = (environment,)
        if level is not None:
            first, place = level.level * size, (environment, level.level)
            count = level.take()
        epoch, position = divmod(count, size)
        if not self._shuffled[environment]:
            return first + position
        known, order = self._orders.get(place, (-1, None))
        if order is None or known != epoch:
            order = np.random.default_rng([self._seed, environment, epoch, *place[1:]]).permutation(size)
            self._orders[place] = (epoch, order)
        return first + int(order[position])

    def note(self, environment: int, index: int, mean_reward: float) -> bool:
        """Note the mean reward of a group of an example; return whether the environment's level has moved."""
        level, size = self.levels[environment], self._num_examples[environment]
        return level is not None and size is not None and level.note(index // size, mean_reward)
