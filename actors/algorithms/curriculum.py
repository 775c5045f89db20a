"""Which example an ordinal gets: a draw that depends on the seed and on the committed state, on nothing else.

The state is one count per environment, and what is set aside in pools. Both are stored with the commit of the tickets
that were drawn, so a packer that starts again draws the same ones.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from actors.algorithms.pools import Pools


class Curriculum:
    """Draws environments in proportion to their weights, and within one every example once per epoch, shuffled.

    Args:
        num_examples: per environment; None where examples never end (they are then taken in order).
        weights: relative, one per environment (`environments[].weight`; prime-rl and Surogate: `buffer.env_ratios`, a
            list in the order of the environments); None: by number of examples, endless ones count as the largest.
        seed: of the run.
        pools: examples that are not drawn. They are passed over, and are drawn in later epochs when they are back.
    """

    def __init__(
        self,
        num_examples: Sequence[int | None],
        weights: Sequence[float] | None,
        seed: int,
        pools: Pools | None = None,
    ) -> None:
        largest = max((n for n in num_examples if n is not None), default=1)
        self._num_examples, self._seed = list(num_examples), seed
        self._weights = list(weights) if weights else [float(largest if n is None else n) for n in num_examples]
        self.counts = [0] * len(num_examples)
        self.pools = pools
        self._given_back: list[tuple[int, int]] = []

    def draw(self) -> tuple[int, int]:
        """(environment, index of the example) of the next ordinal.

        An environment of which all is set aside gets everything back: its weight is the user's wish, and a run that
        goes on with what is too easy is seen in its rewards, where one that ends at night is only lost time.
        """
        environment = self._draw_environment() if len(self.counts) > 1 else 0
        if self.pools is not None and self.pools.is_exhausted(environment):
            self._given_back.append((environment, self.pools.give_back(environment)))
        index = self._next_index(environment)
        while self.pools is not None and self.pools.is_aside(environment, index):
            index = self._next_index(environment)
        return environment, index

    def take_given_back(self) -> list[tuple[int, int]]:
        """(environment, examples) of pools that have been emptied since the last call, for the log."""
        taken, self._given_back = self._given_back, []
        return taken

    def _next_index(self, environment: int) -> int:
        count, size = self.counts[environment], self._num_examples[environment]
        self.counts[environment] += 1
        if size is None:
            return count
        epoch, position = divmod(count, size)
        return int(_permutation(size, self._seed, environment, epoch)[position])

    def _draw_environment(self) -> int:
        rng = random.Random(f"{self._seed} {sum(self.counts)}")
        return rng.choices(range(len(self._weights)), self._weights)[0]


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, environment: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, environment, epoch]).permutation(size)
