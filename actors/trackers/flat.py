"""Nested values as a flat table with dotted names."""

from collections.abc import Iterator, Mapping
from typing import Any


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by dotted path. Example: `{"a": [{"b": 1}]}` is `{"a.0.b": 1}`. Empty branches are left out."""
    return dict(_leaves(tree, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _leaves(below, f"{path}.{index}" if path else str(index))
    else:
        yield path, value
