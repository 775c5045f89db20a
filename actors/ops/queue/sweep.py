"""Sweeps: the Cartesian product of values of keys, and a readable name for each combination. Pure functions.

    --sweep trainer.learning_rate=1e-5,3e-5 --sweep seed=1,2

    learning_rate-1e-5__seed-1    learning_rate-1e-5__seed-2    learning_rate-3e-5__seed-1    learning_rate-3e-5__seed-2

The name of a combination depends on its own values alone. A sweep that later gets further values therefore finds its
earlier runs again.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.errors import ConfigError

MOST_RUNS = 256
"""Largest number of runs of a sweep."""
OWN_KEYS = ("name", "output_dir", "ledger.path")
"""Keys that a sweep sets for each run."""
LONGEST_VALUE = 40
"""Most characters of a value in a name."""
BETWEEN = "__"
"""Separator of the parts of a name; a key may have single underscores."""
OPENING, CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Axis:
    """Key of run.yaml with the values that it takes in a sweep.

    Args:
        key: dotted path.
        values: values as YAML texts, in order.
    """

    key: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Return the axis described by a word of `--sweep`, such as `seed=1,2` or `rollout.stop=[a,b],[c]`.

    Commas inside brackets and quotes belong to a value.

    Raises:
        ConfigError: the word has another form, a value occurs twice, or the key is one of OWN_KEYS.
    """
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split(rest))
    if not (key and equals and all(values)):
        raise ConfigError(f"--sweep {text}: write KEY=VALUE,VALUE,…, as in seed=1,2")
    if key in OWN_KEYS:
        raise ConfigError(f"--sweep {text}: {key} follows from the values of the other keys; sweep another key")
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ConfigError(f"--sweep {text}: {twice} is given twice")
    return Axis(key, values)


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that stand outside of brackets and quotes."""
    start, depth, quote = 0, 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in OPENING:
            depth += 1
        elif letter in CLOSING:
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def product(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Return all combinations of values, the last axis fastest; a single empty one without axes.

    Raises:
        ConfigError: a key is given twice, or there are more than MOST_RUNS combinations.
    """
    keys = [axis.key for axis in axes]
    if twice := next((key for key in keys if keys.count(key) > 1), ""):
        raise ConfigError(f"--sweep: {twice} is given twice; give all of its values at once, as {twice}=A,B")
    combinations = list(itertools.product(*(axis.values for axis in axes)))
    if len(combinations) > MOST_RUNS:
        raise ConfigError(f"--sweep: {len(combinations)} runs; {MOST_RUNS} are the most, so give fewer values")
    return combinations


def label(axes: Sequence[Axis], values: Sequence[str]) -> str:
    """Return the name of a combination: letters, digits, `_`, `.` and `-` alone; different for each combination."""
    keys = short_keys([axis.key for axis in axes])
    return BETWEEN.join(f"{key}-{plain(value)}" for key, value in zip(keys, values, strict=True))


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the shortest ends of dotted keys that tell these keys apart: `learning_rate` for the only such key."""
    found = []
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        # a whole key may be the end of another one
        found.append(next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key))
    return found


def plain(value: str) -> str:
    """Return a value as part of a name. A value that can't be written out has a digest at the end."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "-", value).strip("-")
    # two separators in a value could make two combinations look alike
    if text == value and len(text) <= LONGEST_VALUE and BETWEEN not in text:
        return text
    short = text.replace(BETWEEN, "-")[:LONGEST_VALUE].strip("-")
    return f"{short}-{hashlib.sha256(value.encode()).hexdigest()[:6]}".strip("-")
