"""Difficulty pools: which examples are set aside, by the mean rewards of their newest groups.

    normal ──mean ≥ easy_threshold──▶ easy        normal ──mean ≤ hard_threshold──▶ hard
    easy, hard ──the run is started again──▶ normal (a fraction)        all of an environment set aside ──▶ normal (all)

The state is a table key → pool of what is set aside. Only what has changed is written with a commit, so its cost does
not grow with the data.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.config.pools import PoolsConfig

Keys = NDArray[np.uint64]
ASIDE = ("easy", "hard")
NORMAL = "normal"


def pool_key(task: str, prompt: Any, columns: Mapping[str, Any], hash_keys: Sequence[str]) -> int:
    """sha256 over what makes an example the same as another, its first 64 bits.

    Raises:
        KeyError: a key is neither task nor prompt nor a column.
    """
    known = {**columns, "task": task, "prompt": prompt}
    content = json.dumps([known[key] for key in hash_keys], sort_keys=True)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def pool_of(mean_reward: float, config: PoolsConfig) -> str:
    """Where a group's mean reward puts its example."""
    if config.easy_threshold is not None and mean_reward >= config.easy_threshold:
        return "easy"
    if config.hard_threshold is not None and mean_reward <= config.hard_threshold:
        return "hard"
    return NORMAL


class Pools:
    """The pools of all environments.

    Args:
        keys: per environment, of all its examples; None where they never end: nothing of it is set aside.
        stored: pool by key (hex), as `take_changes` gave them over time.
    """

    def __init__(self, config: PoolsConfig, keys: Sequence[Keys | None], stored: Mapping[str, str]) -> None:
        self._config, self._keys = config, list(keys)
        known = set[int]().union(*(mine.tolist() for mine in keys if mine is not None))
        pools = {int(key, 16): pool for key, pool in stored.items()}
        self._pool_of = {key: pool for key, pool in pools.items() if key in known}
        self.sizes = Counter(self._pool_of.values())
        """Examples set aside, by pool."""
        self._changes: dict[str, str] = {}
        aside = np.array(list(self._pool_of), np.uint64)
        self._aside = [None if mine is None else np.isin(mine, aside) for mine in keys]

    def is_aside(self, environment: int, index: int) -> bool:
        """Whether an example is in another pool than normal."""
        aside_N = self._aside[environment]
        return aside_N is not None and bool(aside_N[index])

    def is_exhausted(self, environment: int) -> bool:
        """Whether no example of an environment is normal."""
        aside_N = self._aside[environment]
        return aside_N is not None and bool(aside_N.all())

    def note(self, environment: int, index: int, mean_reward: float) -> None:
        """A group of this example has been scored; a mean of NaN, of nothing scorable, says nothing."""
        keys = self._keys[environment]
        if keys is not None and index < keys.size and not np.isnan(mean_reward):  # the data may have been cut
            self._put(int(keys[index]), pool_of(mean_reward, self._config))

    def give_back(self, environment: int) -> int:
        """All examples of an environment are normal again; returns how many keys that were."""
        keys = self._keys[environment]
        assert keys is not None
        aside = self._pool_of.keys() & set(keys.tolist())
        for key in sorted(aside):
            self._put(key, NORMAL)
        return len(aside)

    def begin_again(self, seed: str) -> int:
        """The run is started again: a fraction of each pool is normal again, drawn by this seed; returns how many."""
        fractions = {"easy": self._config.easy_fraction, "hard": self._config.hard_fraction}
        chosen: list[int] = []
        for pool, fraction in fractions.items():
            members = sorted(key for key, where in self._pool_of.items() if where == pool)
            number = min(len(members), max(1, round(fraction * len(members)))) if fraction else 0
            chosen += random.Random(f"{seed} {pool}").sample(members, number)
        for key in chosen:
            self._put(key, NORMAL)
        return len(chosen)

    def take_changes(self) -> dict[str, str]:
        """Pool by key of what has moved since the last call; normal: forget it."""
        taken, self._changes = self._changes, {}
        return taken

    def _put(self, key: int, pool: str) -> None:
        before = self._pool_of.pop(key, NORMAL)
        if pool != NORMAL:
            self._pool_of[key] = pool
        if pool == before:
            return
        self.sizes[before] -= before != NORMAL
        self.sizes[pool] += pool != NORMAL
        self._changes[f"{key:016x}"] = pool
        for keys, aside_N in zip(self._keys, self._aside, strict=True):
            if keys is not None and aside_N is not None:
                aside_N[keys == np.uint64(key)] = pool != NORMAL
