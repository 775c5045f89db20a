"""Which example an ordinal gets: a draw that depends on the seed and on how many were drawn before, on nothing else.

The state is one count per environment, so it is stored with each commit and survives a restart of the packer.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class Curriculum:
    """Draws environments in proportion to their weights, and within one every example once per epoch, shuffled.

    Args:
        num_examples: per environment; None where examples never end (they are then taken in order).
        weights: relative, one per environment; None: by number of examples, endless ones count as the largest.
        seed: of the run.
    """

    def __init__(self, num_examples: Sequence[int | None], weights: Sequence[float] | None, seed: int) -> None:
        largest = max((n for n in num_examples if n is not None), default=1)
        self._num_examples, self._seed = list(num_examples), seed
        self._weights = list(weights) if weights else [float(largest if n is None else n) for n in num_examples]
        self.counts = [0] * len(num_examples)

    def draw(self) -> tuple[int, int]:
        """(environment, index of the example) of the next ordinal."""
        environment = self._draw_environment() if len(self.counts) > 1 else 0
        count = self.counts[environment]
        self.counts[environment] += 1
        size = self._num_examples[environment]
        if size is None:
            return environment, count
        epoch, position = divmod(count, size)
        return environment, int(_permutation(size, self._seed, environment, epoch)[position])

    def _draw_environment(self) -> int:
        rng = random.Random(f"{self._seed} {sum(self.counts)}")
        return rng.choices(range(len(self._weights)), self._weights)[0]


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, environment: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, environment, epoch]).permutation(size)
