"""Keys that differ between the configurations of several runs. Pure functions of their trees."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.config.resume import changed_keys

OF_EACH_RUN = ("name", "output_dir", "ledger.path")
"""Keys that differ between all runs, and explain nothing."""


def differing(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the value of each tree by dotted key, for the keys whose values differ; None where a tree has no such key.

    Keys of sections of different types count as one key, the type.
    """
    found = dict.fromkeys(key for tree in trees[1:] for key in changed_keys(trees[0], tree) if key not in OF_EACH_RUN)
    return {key: [_at(tree, key) for tree in trees] for key in sorted(found)}


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        else:
            return None
    return tree
