"""Keys of an origin as data: nested maps to dotted keys, tables of known keys, and the check of their types.

Items of a list of maps are numbered: `orchestrator.env.0.id`. In a table `*` stands for one part of a key.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.config.load import parse
from schemas.errors import ConfigError

MAX_DEPTH = 30
"""Levels of maps and lists that a configuration may have; a deeper one is not a configuration."""


@dataclass(frozen=True)
class Key:
    """Key of an origin."""

    kind: str
    """Type of the value: int, float, bool, str, list, map or any; with `?` also null. Several kinds stand with `|`."""
    default: Any
    """Value of the origin if no file has the key."""


def table(text: str) -> dict[str, Key]:
    """Return the keys of a table with a line `name kind default` for each; the default is YAML."""
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line.strip()]
    return {name: Key(kind, parse(default)) for name, kind, default in rows}


def defaults(keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the default of each key of a table."""
    return {name: key.default for name, key in keys.items()}


def flat(tree: Mapping[str, Any], whole: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return values by dotted key. An empty map, and a list of plain values, are values themselves.

    Args:
        tree: nested maps and lists.
        whole: last parts of keys whose maps stay whole, such as arguments of a function.

    Raises:
        ConfigError: the tree is too deep, or two keys have the same dotted name.
    """
    found: dict[str, Any] = {}
    for key, value in _leaves(tree, "", whole, 0):
        if key in found:
            raise ConfigError(f"{key}: is given twice")
        found[key] = value
    return found


def _leaves(node: Any, path: str, whole: frozenset[str], depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path[:60]}…: has more than {MAX_DEPTH} levels; a configuration has fewer")
    is_list = isinstance(node, list) and bool(node) and all(isinstance(item, dict) for item in node)
    is_map = isinstance(node, dict) and bool(node) and path.rpartition(".")[2] not in whole
    if not (is_map or is_list):
        if path:
            yield path, node
        return
    for name, value in node.items() if is_map else enumerate(node):
        yield from _leaves(value, f"{path}.{name}" if path else str(name), whole, depth + 1)


def known(key: str, keys: Mapping[str, Any]) -> str | None:
    """Return the name in a table that a key has, or None. Exact names come before patterns."""
    if key in keys:
        return key
    return next((name for name in keys if "*" in name and pattern(name).fullmatch(key)), None)


def pattern(name: str) -> re.Pattern[str]:
    """Return the expression of a name: `*` is one part of a key, `**` at the end is any number of parts."""
    words = [r"(.+)" if part == "**" else r"([^.]+)" if part == "*" else re.escape(part) for part in name.split(".")]
    return re.compile(r"\.".join(words))


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "map": (dict,),
}
_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list",
          "map": "a map"}  # fmt: skip


def check_types(given: Mapping[str, Any], keys: Mapping[str, Key], names: Mapping[str, str] | None = None) -> None:
    """Refuse values of known keys that have another type than the origin takes.

    Args:
        given: values by key.
        keys: table of the origin.
        names: names in the input of keys that have another name in the table.

    Raises:
        ConfigError: all wrong values.
    """
    problems = []
    for key, value in given.items():
        name = known(key, keys)
        if name is not None and not _fits(value, keys[name].kind):
            kinds = " or ".join(_WORDS[kind] for kind in keys[name].kind.rstrip("?").split("|"))
            problems.append(f"{(names or {}).get(key, key)}: must be {kinds}, got {_shown(value)}")
        # a section with one value in its place
        if name is None and value != {} and any(other.startswith(f"{key}.") for other in keys) and value is not None:
            problems.append(f"{(names or {}).get(key, key)}: must be a section with keys, got {_shown(value)}")
    if problems:
        raise ConfigError(*problems)


def coerced(given: Mapping[str, Any], keys: Mapping[str, Key], *, texts: bool = False) -> dict[str, Any]:
    """Return the values with texts as the numbers and switches that known keys take, as the origins' parsers do.

    Args:
        given: values by key.
        keys: table of the origin.
        texts: whether numbers become texts too where a key takes these, as in OmegaConf.
    """
    found = dict(given)
    for key, value in given.items():
        name = known(key, keys)
        kind = keys[name].kind.rstrip("?") if name is not None else ""
        if isinstance(value, str):
            found[key] = _read_as(value, kind)
        elif texts and kind == "str" and isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = str(value)
    return found


def _read_as(text: str, kind: str) -> Any:
    """Return the number or switch of a text, or the text if it is none of the kind."""
    word = text.strip().lower()
    if kind == "bool" and word in ("true", "false"):
        return word == "true"
    if kind == "int" and re.fullmatch(r"[+-]?\d{1,18}", word):
        return int(word)
    if kind == "float" and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", word):
        return float(word)
    return text


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("any"):
        return True
    if value is None:
        return kind.endswith("?")
    # no key takes infinity, and arithmetic with it would raise
    if isinstance(value, float) and not math.isfinite(value):
        return False
    # true is an integer for Python alone
    return any(
        isinstance(value, _KINDS[one]) and (one == "bool") == isinstance(value, bool)
        for one in kind.rstrip("?").split("|")
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
