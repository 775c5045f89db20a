"""Choice of the example for each new ordinal: a draw from the run's seed and the committed state, nothing else.

The state is a count of draws per environment and the examples set aside in difficulty pools. Both are committed with
the tickets of the draws, so a restarted packer continues with the same draws.
"""

import random
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.difficulty_pools import DifficultyPools


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
    """

    def __init__(
        self,
        num_examples: Sequence[int | None],
        weights: Sequence[float] | None,
        seed: int,
        pools: DifficultyPools | None = None,
        shuffled: Sequence[bool] | None = None,
    ) -> None:
        largest = max((n for n in num_examples if n is not None), default=1)
        self._num_examples, self._seed = list(num_examples), seed
        self._weights = list(weights) if weights else [float(largest if n is None else n) for n in num_examples]
        self.counts = [0] * len(num_examples)
        self._shuffled = list(shuffled) if shuffled else [True] * len(num_examples)
        self.pools = pools
        self._given_back: list[tuple[int, int]] = []
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        """Newest epoch and its order of examples, by environment; a cache."""

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
        epoch, position = divmod(count, size)
        if not self._shuffled[environment]:
            return position
        known, order = self._orders.get(environment, (-1, None))
        if order is None or known != epoch:
            order = np.random.default_rng([self._seed, environment, epoch]).permutation(size)
            self._orders[environment] = (epoch, order)
        return int(order[position])
