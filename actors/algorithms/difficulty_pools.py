"""Difficulty pools: examples set aside as easy or hard by the mean reward of their newest group.

    normal ──mean ≥ easy_threshold──▶ easy        normal ──mean ≤ hard_threshold──▶ hard
    easy, hard ──the run is started again──▶ normal (a fraction)        all of an environment set aside ──▶ normal (all)

The state is a table from keys of examples to pools, without normal examples. A commit writes only the changes, so its
cost does not grow with the data.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.config.difficulty_pools import DifficultyPoolsConfig

Keys = NDArray[np.uint64]
"""Keys of an environment's examples, (N,), by index of the example."""
FILTERED_POOLS = ("easy", "hard")
"""Pools of examples that are not drawn."""
NORMAL = "normal"
"""Pool of examples that are drawn."""


def difficulty_pool_key(task: str, prompt: Any, columns: Mapping[str, Any], hash_keys: Sequence[str]) -> int:
    """Return the key of an example: the first 64 bits of a sha256 over its parts named in hash_keys.

    Examples with equal keys count as the same example.

    Args:
        task: name of the environment.
        prompt: text or messages.
        columns: further columns of the example.
        hash_keys: parts of the example to hash (`packer.pools.hash_keys`).

    Raises:
        KeyError: a hash key is neither `task` nor `prompt` nor a column.
    """
    known = {**columns, "task": task, "prompt": prompt}
    # sort_keys: columns read from another file may come in another order
    content = json.dumps([known[key] for key in hash_keys], sort_keys=True)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")


def pool_of(mean_reward: float, config: DifficultyPoolsConfig) -> str:
    """Return the pool of an example from the mean reward of its newest group."""
    if config.easy_threshold is not None and mean_reward >= config.easy_threshold:
        return "easy"
    if config.hard_threshold is not None and mean_reward <= config.hard_threshold:
        return "hard"
    return NORMAL


class DifficultyPools:
    """Pools of all environments.

    Args:
        config: thresholds and fractions.
        keys: keys of each environment's examples. None: endless environment; nothing is set aside.
        stored: pool by key (hex), the result of all `take_changes` of the run so far.
    """

    def __init__(self, config: DifficultyPoolsConfig, keys: Sequence[Keys | None], stored: Mapping[str, str]) -> None:
        self._config, self._keys = config, list(keys)
        known = set[int]().union(*(mine.tolist() for mine in keys if mine is not None))
        # keys that the data no longer has are forgotten: a changed hash_keys empties all pools
        pools = {int(key, 16): pool for key, pool in stored.items()}
        self._pool_of = {key: pool for key, pool in pools.items() if key in known}
        self.sizes = Counter(self._pool_of.values())
        """Number of keys set aside, by pool."""
        self._changes: dict[str, str] = {}
        aside = np.array(list(self._pool_of), np.uint64)
        self._aside = [None if mine is None else np.isin(mine, aside) for mine in keys]

    def is_aside(self, environment: int, index: int) -> bool:
        """Return whether an example is set aside."""
        aside_N = self._aside[environment]
        return aside_N is not None and bool(aside_N[index])

    def is_exhausted(self, environment: int) -> bool:
        """Return whether all examples of an environment are set aside."""
        aside_N = self._aside[environment]
        return aside_N is not None and bool(aside_N.all())

    def note(self, environment: int, index: int, mean_reward: float) -> None:
        """Move an example to the pool of its newest group's mean reward; NaN (nothing scorable) changes nothing."""
        keys = self._keys[environment]
        if keys is not None and index < keys.size and not np.isnan(mean_reward):  # the data may have been cut
            self._put(int(keys[index]), pool_of(mean_reward, self._config))

    def give_back(self, environment: int) -> int:
        """Return all examples of an environment to the normal pool; return the number of keys moved."""
        keys = self._keys[environment]
        assert keys is not None
        aside = self._pool_of.keys() & set(keys.tolist())
        for key in sorted(aside):
            self._put(key, NORMAL)
        return len(aside)

    def begin_again(self, seed: str) -> int:
        """Return a fraction of each pool to normal when a run is started again; return the number of keys moved.

        The keys are drawn with this seed. A fraction above 0 moves at least one key of a non-empty pool.
        """
        fractions = {"easy": self._config.easy_fraction, "hard": self._config.hard_fraction}
        chosen: list[int] = []
        for pool, fraction in fractions.items():
            # sorted: the draw must not depend on the order in which the table was read
            members = sorted(key for key, where in self._pool_of.items() if where == pool)
            number = min(len(members), max(1, round(fraction * len(members)))) if fraction else 0
            chosen += random.Random(f"{seed} {pool}").sample(members, number)
        for key in chosen:
            self._put(key, NORMAL)
        return len(chosen)

    def take_changes(self) -> dict[str, str]:
        """Return the new pool of each key (hex) moved since the last call; `normal` deletes the key from the table."""
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
        # rows with equal keys, in any environment, move together
        for keys, aside_N in zip(self._keys, self._aside, strict=True):
            if keys is not None and aside_N is not None:
                aside_N[keys == np.uint64(key)] = pool != NORMAL
